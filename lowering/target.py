"""What the compiler may know of a target, as one frozen value: also its part of a cache key."""

from __future__ import annotations

from dataclasses import dataclass

FlagSet = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class CompileTarget:
    """The part of a target that may change the bytes of a .vmfb.

    Attributes:
        name: name of the target, as in `options={"target": name}`.
        flag_sets: `iree-compile` flags, tried in this order; the first set that compiles a region
            is taken. A set that fails is not an error while another one is left.
        conv_flags: flags added to a set where the region holds a convolution.
        capabilities: the capability table: a file name in `lowering/capabilities`, or the path of
            a TOML file of a vendor's own package.
        keep_ops: ATen ops (`aten.name` or `aten.name.overload`) that are not decomposed.
        rewrites: which of `lowering.rewrites.REWRITES` pay on it.
    """

    name: str
    flag_sets: tuple[FlagSet, ...]
    conv_flags: FlagSet = ()
    capabilities: str = "npu-local.toml"
    keep_ops: frozenset[str] = frozenset()
    rewrites: tuple[str, ...] = ()

    def flag_sets_for(self, has_convolution: bool, extra: FlagSet = ()) -> tuple[FlagSet, ...]:
        """Return the flag sets to try for a region, best first; `extra` is the user's own."""
        conv = self.conv_flags if has_convolution else ()
        sets = [(*flags, *conv, *extra) for flags in self.flag_sets]
        if conv:
            sets += [(*flags, *extra) for flags in self.flag_sets]
        return tuple(sets)
