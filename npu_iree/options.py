"""The options of one `torch.compile` call: a typed value, checked before anything is compiled."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch

from lowering.suggest import suggested, there_are
from npu_iree.errors import OptionError, TargetError
from npu_iree.targets import ABI_FLAGS, ENTRY_POINT_GROUP, Target, against_abi, find_target

_MOST_BYTES = sys.maxsize  # more cannot be asked of the system as a limit


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `torch.compile(model, backend="npu_iree", options={...})` takes.

    Attributes:
        target: name of an installed target.
        fallback: `host` runs what the target cannot run as PyTorch CPU kernels; `error` raises
            one error that lists all such ops.
        disabled_ops: ops to send to the host, by `aten.name.overload`, `aten.name` or `name`.
        keep_ops: ops that are not decomposed, named in the same way.
        decompositions: op overload -> function; they win over the default table.
        flags: more flags for `iree-compile`, after the target's.
        bind_weights: bind parameters and buffers once per compiled graph (inference). Turn it off
            if something outside PyTorch reads or writes their memory, e.g. through a NumPy view
            that is kept over a call: PyTorch's next write moves them elsewhere.
        rng: `host` makes random numbers those of CPU eager, bit for bit: random ops run as
            PyTorch's CPU kernels, in eager's order and with eager's generators. By default some
            are decomposed, and a seed reproduces a run of this backend only.
        bundle: file that `npu_iree.save_bundle` wrote; what is in it is not compiled.
        compile: what to do with what neither the bundle nor the cache has: `if_missing` compiles
            it, `never` raises an error that says what differs, `eager` runs the whole graph with
            PyTorch's CPU kernels, with one warning. The last two need no compiler installed.
        tune: measure the target's candidate settings for each region on the device, with made-up
            inputs, and keep the fastest that computes what the default does: `quick` tries those
            that often win, `full` all. What was found is kept in the cache.
        donate: parameters of the compiled function, by name or position, whose tensors on "npu" a
            call takes over: their memory is used again, and the caller's tensors are gone.
        compile_time_limit_s: seconds that one lowering stage of one region may take.
        compile_memory_limit_bytes: address space that it may take.
    """

    target: str = "npu-local"
    fallback: Literal["host", "error"] = "host"
    disabled_ops: frozenset[str] = frozenset()
    keep_ops: frozenset[str] = frozenset()
    decompositions: Mapping[torch._ops.OpOverload, Callable[..., Any]] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    bind_weights: bool = True
    rng: Literal["default", "host"] = "default"
    bundle: Path | None = None
    compile: Literal["if_missing", "never", "eager"] = "if_missing"
    tune: Literal["off", "quick", "full"] = "off"
    donate: tuple[str | int, ...] = ()
    compile_time_limit_s: float = 600.0
    compile_memory_limit_bytes: int = 8 << 30

    @classmethod
    def parse(cls, options: Mapping[str, Any] | None) -> Options:
        """Check a dict of options.

        Raises:
            OptionError: an unknown name (the message suggests the near one) or a bad value.
        """
        given = as_dict(options)
        names = [f.name for f in fields(cls)]
        for name in given:
            if name not in names:
                raise OptionError(f"no option {name!r}.{there_are(name, names)}")
        parsed = cls(**{name: _CHECKS[name](name, value) for name, value in given.items()})
        if parsed.fallback == "error" and parsed.compile == "eager":
            raise OptionError(
                "fallback='error' keeps ops off the host, and compile='eager' sends whole graphs "
                "there; with fallback='error', compile can be 'if_missing' or 'never'"
            )
        return parsed

    def printable(self) -> dict[str, str]:
        """Return the options that decide what is built, as text."""
        skipped = {"bundle", "compile", "compile_time_limit_s", "compile_memory_limit_bytes"}
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in skipped}
        return {name: _text(value) for name, value in values.items()}

    @property
    def whole_ops(self) -> frozenset[str]:
        """The ops that are not decomposed: the user's `keep_ops`, and the target's."""
        return self.keep_ops | self.target_value.compile.keep_ops

    @property
    def target_value(self) -> Target:
        """The target itself."""
        return find_target(self.target)


def as_dict(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return options as they were given; none is an empty dict.

    Raises:
        OptionError: they are no dict.
    """
    if options is not None and not isinstance(options, Mapping):
        raise OptionError(f"options are a dict of values by name, not {options!r}")
    return dict(options or {})


def _target(name: str, value: Any) -> str:
    if not isinstance(value, (str, Target)):
        raise OptionError(f"option {name!r} is the name of a target, not {value!r}")
    try:
        found = find_target(value if isinstance(value, str) else value.name)
    except TargetError as error:
        raise OptionError(f"option {name!r}: {error}") from error
    if isinstance(value, Target) and value != found:
        raise OptionError(
            f"option {name!r}: the target that is installed as {value.name!r} is another one; a "
            f"target is installed by an entry point of the group {ENTRY_POINT_GROUP!r}"
        )
    return found.name


def _text(value: Any) -> str:
    if isinstance(value, frozenset):
        return ", ".join(sorted(value)) or "none"
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    if isinstance(value, Mapping):
        names = {str(op): getattr(f, "__qualname__", type(f).__name__) for op, f in value.items()}
        return ", ".join(f"{op}: {name}" for op, name in sorted(names.items())) or "none"
    return str(value)


def _one_of(*choices: str) -> Callable[[str, Any], str]:
    def check(name: str, value: Any) -> str:
        if value not in choices:
            raise OptionError(f"option {name!r} cannot be {value!r}.{there_are(value, choices)}")
        return str(value)

    return check


def _path(name: str, value: Any) -> Path | None:
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)) or not str(value):
        raise OptionError(f"option {name!r} is the path of a file, not {value!r}")
    return Path(value).absolute()


def _op_names(name: str, value: Any) -> frozenset[str]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise OptionError(f"option {name!r} is a list of op names, not {value!r}")
    return frozenset(_op_name(name, item) for item in value)


def _ops_of(namespace: str) -> list[str]:
    """Return the names of all ops of a namespace; `dir(torch.ops.aten)` has those in use."""
    ops = (name.partition("::") for name in torch._C._dispatch_get_all_op_names())
    return sorted({op.partition(".")[0] for found, _, op in ops if found == namespace})


def _op_name(name: str, item: Any) -> str:
    """Accept an op or its name; a name must be one that PyTorch knows."""
    if isinstance(item, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(item)
    if not isinstance(item, str) or not all(item.split(".")):
        raise OptionError(f"option {name!r}: {item!r} is no op; give a name such as 'aten.relu'")
    parts = item.split(".")
    namespace, rest = (parts[0], parts[1:]) if len(parts) > 1 else ("aten", parts)
    known: Any = getattr(torch.ops, namespace)
    for part in rest:
        found = getattr(known, part, None)
        if not isinstance(found, (torch._ops.OperatorBase, torch._ops.OpOverloadPacket)):
            names = known.overloads() if hasattr(known, "overloads") else _ops_of(namespace)
            raise OptionError(
                f"option {name!r}: PyTorch has no op {item!r}.{suggested(part, names)}"
            )
        known = found
    return item


def _decompositions(name: str, value: Any) -> Mapping[torch._ops.OpOverload, Callable[..., Any]]:
    if not isinstance(value, Mapping):
        raise OptionError(f"option {name!r} is a dict from op overload to function, not {value!r}")
    for op, function in value.items():
        if not isinstance(op, torch._ops.OpOverload) or not callable(function):
            raise OptionError(
                f"option {name!r}: {op!r} -> {function!r} is no op overload (such as "
                "torch.ops.aten.gelu.default) with a function"
            )
    return dict(value)


def _flags(name: str, value: Any) -> tuple[str, ...]:
    is_list = isinstance(value, Iterable) and not isinstance(value, str)
    if not is_list or not all(isinstance(v, str) and v.startswith("--") for v in value):
        raise OptionError(f"option {name!r} is a list of flags that start with '--', not {value!r}")
    for flag in against_abi(value):
        raise OptionError(
            f"option {name!r} cannot have {flag!r}: calls of this runtime are made for code that "
            f"is compiled with {' '.join(ABI_FLAGS)}"
        )
    return tuple(value)


def _parameters(name: str, value: Any) -> tuple[str | int, ...]:
    if isinstance(value, (str, int)) or not isinstance(value, Iterable):
        raise OptionError(f"option {name!r} is a list of names of parameters, not {value!r}")
    found = tuple(value)
    for item in found:
        is_position = isinstance(item, int) and not isinstance(item, bool) and item >= 0
        if not is_position and not (isinstance(item, str) and item):
            raise OptionError(f"option {name!r}: {item!r} is no name or position of a parameter")
        if found.count(item) > 1:
            raise OptionError(f"option {name!r} names {item!r} twice: it can be given away once")
    return found


def _bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"option {name!r} is True or False, not {value!r}")
    return value


def _positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise OptionError(f"option {name!r} is a number above 0, not {value!r}")
    return value


def _bytes(name: str, value: Any) -> int:
    if not 1 <= _positive(name, value) <= _MOST_BYTES:
        raise OptionError(
            f"option {name!r} is a number of bytes up to {_MOST_BYTES}, not {value!r}"
        )
    return int(value)


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "target": _target,
    "fallback": _one_of("host", "error"),
    "disabled_ops": _op_names,
    "keep_ops": _op_names,
    "decompositions": _decompositions,
    "flags": _flags,
    "bind_weights": _bool,
    "rng": _one_of("default", "host"),
    "bundle": _path,
    "compile": _one_of("if_missing", "never", "eager"),
    "tune": _one_of("off", "quick", "full"),
    "donate": _parameters,
    "compile_time_limit_s": _positive,
    "compile_memory_limit_bytes": _bytes,
}
