"""What `npu-iree compile` was asked for: checked as a whole, then made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lowering.files import is_written_through
from npu_iree.cli.outputs import refuse_unwritable
from npu_iree.errors import OptionError
from npu_iree.targets import find_target

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from npu_iree.offline.build import BuildOptions


class Params(StrEnum):
    """Where parameters go; `split` is `irpa`."""

    SPLIT = "split"
    IRPA = "irpa"
    SAFETENSORS = "safetensors"
    EMBED = "embed"


class Tune(StrEnum):
    """How many of the target's candidate settings are measured."""

    OFF = "off"
    QUICK = "quick"
    FULL = "full"


class HostOps(StrEnum):
    """Whether the host may run what the target cannot."""

    FORBID = "forbid"
    ALLOW = "allow"


_STORES: dict[Params, Literal["irpa", "safetensors", "embed"]] = {
    Params.SPLIT: "irpa",
    Params.IRPA: "irpa",
    Params.SAFETENSORS: "safetensors",
    Params.EMBED: "embed",
}
# What is made -> the options that would have no effect on it.
_WITHOUT = {
    "a bundle": ("--stop-after", "--cpu", "--params", "--least-size"),
    "a stage's product": ("--verify", "--params", "--tune"),
    "an artifact from IR": (
        *("--stop-after", "--dynamic", "--least-size", "--params", "--verify", "--tune"),
    ),
}


@dataclass(frozen=True, kw_only=True)
class CompileRequest:
    """The options of `npu-iree compile`, by the names that they have there."""

    sources: Sequence[str]
    output: Path
    target: str
    cpu: str | None
    dynamic: Sequence[str]
    least_size: int
    params: Params
    stop_after: str | None
    flags: Sequence[str]
    tune: Tune
    host_ops: HostOps
    bundle: bool
    verify: bool

    def check(self) -> None:
        """Refuse options that would have no effect or do harm, before anything is compiled.

        Raises:
            OptionError: there are such options, or there is no such stage, or nothing can be
                written there.
            TargetError: there is no such target.
        """
        from lowering.pipeline import STAGES

        find_target(self.target)
        stages = [s.name for s in STAGES]
        if self.stop_after is not None and self.stop_after not in stages:
            raise OptionError(f"no stage {self.stop_after!r}; there are: {', '.join(stages)}")
        if self.host_ops is HostOps.ALLOW and not self.bundle:
            raise OptionError("an artifact has no host: --host-ops allow goes with --bundle")
        if self._is_from_ir and self.bundle:
            raise OptionError("an IR file is compiled into an artifact, not into a bundle")
        if self._is_from_ir and len(self.sources) > 1:
            raise OptionError("an IR file is compiled alone: its functions are the entry points")
        for source in self.sources:
            file = Path(source.rpartition("=")[2].partition(":")[0])
            if file.exists() and self.output.exists() and file.samefile(self.output):
                raise OptionError(
                    f"--output {self.output} is what is to be compiled: give it another name, "
                    "e.g. model.vmfb"
                )
        refuse_unwritable(self.output)
        made = {
            "a bundle": self.bundle,
            "a stage's product": self.stop_after is not None,
            "an artifact from IR": self._is_from_ir,
        }
        for what in (name for name, is_made in made.items() if is_made):
            if useless := [option for option in _WITHOUT[what] if option in self._given]:
                raise OptionError(f"{what} has no {', '.join(useless)}")
        if self.stop_after is not None:
            self._check_name(next(s.product for s in STAGES if s.name == self.stop_after))

    def _check_name(self, product: str) -> None:
        """Refuse a name by which a stage's product could not be gone on from."""
        output = self.output
        if output.name.endswith(f".{product}") or is_written_through(output):
            return
        name = output.with_name(f"{output.name.partition('.')[0]}.{product}")
        raise OptionError(
            f"--output {output} is no name for what {self.stop_after} makes, which the next stage "
            f"goes on from by its ending: call it {name}"
        )

    def make(self, tell: Callable[[str], None]) -> dict[str, Any]:
        """Write what was asked for; return what is to be told of it.

        Args:
            tell: is told what is about to be done.
        """
        if self.bundle:
            return self._make_bundle()
        from npu_iree.offline.build import write_artifact, write_stage
        from npu_iree.offline.ir import write_from_ir

        options, output = self._build_options(), self.output
        options.check()
        if self._is_from_ir:
            return _told(output, write_from_ir(Path(self.sources[0]), output, options))
        tell("exporting")
        programs = self._programs()
        tell("capturing")
        if self.stop_after is not None:
            write_stage(programs, output, self.stop_after, options)
            size = output.stat().st_size
            return {"output": str(output), "bytes": size, "stage": self.stop_after}
        return _told(output, write_artifact(programs, output, options))

    @property
    def _is_from_ir(self) -> bool:
        return any(source.endswith(".mlir") for source in self.sources)

    @property
    def _given(self) -> set[str]:
        """Return the options that were given, of those that not everything has."""
        given = {
            "--stop-after": self.stop_after is not None,
            "--cpu": self.cpu is not None,
            "--dynamic": bool(self.dynamic),
            "--least-size": self.least_size == 1,
            "--params": self.params is not Params.SPLIT,
            "--verify": self.verify,
            "--tune": self.tune is not Tune.OFF,
        }
        return {option for option, is_given in given.items() if is_given}

    def _build_options(self) -> BuildOptions:
        from npu_iree.offline.build import BuildOptions
        from npu_iree.offline.sources import source_record

        return BuildOptions(
            target=self.target,
            cpu=self.cpu,
            flags=tuple(self.flags),
            tune=self.tune.value,
            params=_STORES[self.params],
            source=source_record(self.sources),
            least_size=self.least_size,
        )

    def _make_bundle(self) -> dict[str, Any]:
        from npu_iree.offline.bundles import write_bundle

        choices = {
            "target": self.target,
            "flags": list(self.flags),
            "tune": self.tune.value,
            "fallback": "error" if self.host_ops is HostOps.FORBID else "host",
        }
        return write_bundle(self.sources, self.output, choices, dynamic=bool(self.dynamic))

    def _programs(self) -> dict[str, ExportedProgram]:
        from npu_iree.offline.sources import load_programs

        programs: dict[str, ExportedProgram] = {}
        for source in self.sources:
            for name, program in load_programs(source, self.dynamic).items():
                if name in programs:
                    raise OptionError(
                        f"two entry points are called {name!r}; name them: a=one b=other"
                    )
                programs[name] = program
        return programs


def _told(output: Path, manifest: Any) -> dict[str, Any]:
    from npu_iree.offline.parameters import file_beside

    name = manifest.parameter_file
    beside = file_beside(output, name) if name else None
    return {
        "output": str(output),
        "bytes": output.stat().st_size,
        "target": manifest.target,
        "entries": {
            name: {"inputs": [str(a) for a in call.arguments], "outputs": len(call.outputs)}
            for name, call in manifest.entries.items()
        },
        "parameters": len(manifest.parameters),
        "parameter_file": str(beside) if beside else "",
        "parameter_bytes": beside.stat().st_size if beside else 0,
        "cpu_features": list(manifest.cpu_features),
        "flags": list(manifest.flags),
    }
