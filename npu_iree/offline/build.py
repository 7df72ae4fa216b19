"""Write an artifact: exported programs in, a `.vmfb` with its manifest and parameters out."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

import torch
from torch.export import ExportedProgram

from lowering.abi import ENTRY
from lowering.build import Builder
from lowering.compiler import Compiler
from lowering.cpu import CPU_FLAG, THIS_CPU
from lowering.export import Export
from lowering.files import is_written_through, opened_atomically, place_behind, try_to_write
from lowering.manifest import Manifest
from lowering.offline import (
    OfflineProgram,
    capture_exports,
    check_exports,
    compile_exports,
    stored_tensors,
)
from lowering.pipeline import stop_after
from lowering.program import Program
from lowering.ranges import LEAST_TRACED
from lowering.vmfb import pack, read_manifest
from npu_iree.errors import ArtifactError, ExportError, OptionError
from npu_iree.offline.parameter_files import holds, save_parameters
from npu_iree.offline.parameters import Parameters
from npu_iree.options import Options
from npu_iree.toolchain import compiler_for
from npu_iree.versions import check_versions

Programs = ExportedProgram | Mapping[str, ExportedProgram]
ParameterStore = Literal["irpa", "safetensors", "embed"]


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """How to compile an artifact.

    Attributes:
        target: name of an installed target; its device need not be here.
        cpu: for a target of CPU code: LLVM's name of the CPU to compile for, e.g. `x86-64-v3`; by
            default this machine's.
        flags: more flags for `iree-compile`.
        tune: `quick` or `full`: measure the target's candidate settings on its device, here.
        params: where the parameters go: a `.irpa` or `.safetensors` file beside the artifact, or
            `embed`, into it.
        source: what is compiled, for the manifest.
        least_size: 1, if sizes that PyTorch says are 2 or more may be 1, where the program is the
            same then; a model whose own code asks whether one is 1 is not.
    """

    target: str = "npu-local"
    cpu: str | None = None
    flags: tuple[str, ...] = ()
    tune: str = "off"
    params: ParameterStore = "irpa"
    source: Mapping[str, str] = field(default_factory=dict)
    least_size: int = LEAST_TRACED

    @property
    def compiler(self) -> Compiler:
        """What compiles under these options."""
        options = Options.parse({"target": self.target, "flags": self.flags, "tune": self.tune})
        compiler = compiler_for(options)
        if self.cpu is None:
            return compiler
        if not self.cpu:
            raise OptionError("--cpu is LLVM's name of a CPU, such as x86-64-v3, not an empty text")
        if self.tune != "off":
            raise OptionError("tuning measures code for this machine's CPU: --tune has no --cpu")
        target = compiler.builder.target
        if not any(THIS_CPU in flags for flags in target.flag_sets):
            raise OptionError(f"{self.target} is no target of CPU code, so it has no --cpu")
        other = target.replacing(THIS_CPU, f"{CPU_FLAG}{self.cpu}")
        builder = replace(compiler.builder, target=other)
        return replace(compiler, builder=builder)

    def check(self) -> None:
        """Check that there is such a target, that it takes these options, and a compiler.

        Raises:
            OptionError: there is none, or it does not.
            VersionError: the verified compilers are not installed.
        """
        if self.params not in get_args(ParameterStore):
            stores = ", ".join(get_args(ParameterStore))
            raise OptionError(f"params is one of {stores}, not {self.params!r}")
        check_versions("torch", "torch-mlir", "iree-base-compiler", "iree-base-runtime")
        _ = self.compiler

    @property
    def driver(self) -> str:
        """The IREE driver of the target."""
        return Options.parse({"target": self.target}).target_value.driver


def write_artifact(
    programs: Programs,
    path: str | os.PathLike[str],
    options: BuildOptions = BuildOptions(),
) -> Manifest:
    """Compile exported programs into one artifact that `npu_iree.load` loads.

    Args:
        programs: by the name of their entry point, or one of them, whose is `main`; parameters of
            one name are shared.
        path: where to write it, `model.vmfb`; split parameters go to `model.irpa` or
            `model.safetensors` beside it. Nothing is there unless all of it is. A link is
            followed, with the parameters; what is no file is written as it is.
        options: how.

    Returns:
        What the artifact says of itself.

    Raises:
        ExportError: they are no exported programs, or cannot be one artifact.
        UnsupportedOpError: the target cannot run some ops; lists them all.
        StageError: the compiler refused the program.
        ArtifactError: nothing can be written there, or it would be written over parameters that
            are of no such artifact.
    """
    options.check()
    path, builder = place_behind(Path(path)), options.compiler.builder
    if path.is_dir() or path.suffix == f".{options.params}":
        raise ArtifactError(path, "it cannot be written: call it something.vmfb")
    beside = path.with_suffix(f".{options.params}")
    try:
        try_to_write(path)  # before all is compiled
    except OSError as error:
        raise ArtifactError(path, f"it cannot be written: {error.strerror}") from error
    exports = _captured(programs, options)
    tensors = stored_tensors(exports)
    if options.params == "embed" and tensors:
        made = _compiled_with(tensors, exports, builder, options.driver)
    else:
        name = beside.name if tensors else ""
        if name:
            _check_beside(path, beside, tensors)
        made = compile_exports(exports, builder, driver=options.driver, parameter_file=name)
    manifest = replace(made.manifest, source=dict(options.source))
    write_files(path, pack(made.module, manifest), manifest.parameter_file, made.tensors)
    return manifest


def _captured(programs: Programs, options: BuildOptions) -> list[Export]:
    """Capture programs, of which the target runs every op."""
    by_name = programs if isinstance(programs, Mapping) else {ENTRY: programs}
    for name, program in by_name.items():
        if not isinstance(program, ExportedProgram):
            raise ExportError(
                f"{name!r} is of {type(program).__name__}, not a torch.export.ExportedProgram: "
                "torch.export.export(model, args) makes one"
            )
    compiler = options.compiler
    exports = capture_exports(by_name, compiler.builder.target.keep_ops, options.least_size)
    kernels = compiler.builder.toolchain.kernels
    check_exports(exports, options.target, compiler.capabilities, kernels)
    return exports


def _compiled_with(
    tensors: Mapping[str, torch.Tensor], exports: Sequence[Export], builder: Builder, driver: str
) -> OfflineProgram:
    """Compile captured programs into one module that holds their parameters."""
    with tempfile.TemporaryDirectory(prefix="npu-iree-") as scratch:
        file = Path(scratch) / "parameters.irpa"
        save_parameters(tensors, file)
        imports = _import_flags(file)
        flags = (*builder.toolchain.flags, *imports)
        toolchain = replace(builder.toolchain, flags=flags)
        builder = replace(builder, cache=None, toolchain=toolchain)  # a key holds no weights
        made = _without_flags(compile_exports(exports, builder, driver=driver), imports)
    _check_embedded(made.manifest, tensors)
    return made


def _check_beside(artifact: Path, beside: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse what has nothing beside it, and to write over parameters of others.

    The same, and those that the artifact has now, are written over. Models are often
    kept as `model.safetensors`.
    """
    if is_written_through(artifact):
        raise ArtifactError(artifact, "it is no file, and has no parameters beside it: embed them")
    if not beside.exists():
        return
    with contextlib.suppress(ArtifactError):  # the artifact is not there, or has others
        manifest = read_manifest(artifact)
        if manifest.parameter_file == beside.name:
            Parameters.beside(artifact, manifest)
            return
    with contextlib.suppress(ArtifactError):
        if holds(beside, tensors):
            return
    raise ArtifactError(
        beside,
        f"it would be written over, and {artifact.name} was not written with it: move it, or call "
        "the artifact something else",
    )


def write_files(
    path: Path, artifact: bytes, parameter_file: str, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Write an artifact and its parameters: neither is there before both are written."""
    try:
        with opened_atomically(path) as file:
            file.write(artifact)
            file.flush()
            if parameter_file:
                save_parameters(tensors, place_behind(path).with_name(parameter_file))
    except OSError as error:
        raise ArtifactError(path, f"it cannot be written: {error}") from error


def write_stage(
    programs: Programs,
    path: str | os.PathLike[str],
    stage: str,
    options: BuildOptions = BuildOptions(),
) -> None:
    """Lower exported programs only as far as one stage, and write its product.

    Raises:
        ExportError, UnsupportedOpError, StageError, ArtifactError: as `write_artifact`.
    """
    compiler = options.compiler
    exports = _captured(programs, options)
    regions = {export.name: export.region() for export in exports}
    builder = compiler.builder
    product = stop_after(stage, Program("main", regions), builder.target, builder.toolchain)
    write_files(Path(path), product, "", {})


def _check_embedded(manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse to embed what is no constant of the module: calls change it, or hand it out.

    IREE reads complex parameters when the module is loaded, even if it is told to import them.
    """
    outputs = [source for call in manifest.entries.values() for source in call.outputs]
    returned = {source.name for source in outputs if source.kind == "parameter"}
    reasons = {
        "calls write to it or return it": {*manifest.states, *returned},
        "it is complex": {name for name, tensor in tensors.items() if tensor.is_complex()},
    }
    for reason, names in reasons.items():
        if names:
            raise ExportError(
                f"{', '.join(sorted(names))} cannot be embedded: {reason}. Keep the parameters in "
                'a file beside the artifact (params="irpa"; on the command line, --params split)'
            )


def _import_flags(file: Path) -> Sequence[str]:
    """Have IREE read parameters at compile time. Source: `iree-compile --help`."""
    return (
        f"--iree-parameter-import=model={file}",
        "--iree-parameter-import-maximum-size=1099511627776",
    )


def _without_flags(made: OfflineProgram, flags: Sequence[str]) -> OfflineProgram:
    """Leave out of a manifest what named a file that is gone."""
    kept = tuple(flag for flag in made.manifest.flags if flag not in flags)
    return replace(made, manifest=replace(made.manifest, flags=kept))
