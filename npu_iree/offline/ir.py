"""Artifacts from an IR file of any stage: entry points as the module itself declares them."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

from iree.runtime import _binding as hal
from torch.utils import _pytree as pytree

from lowering.cpu import required_features
from lowering.dtypes import DTYPES
from lowering.key import compiler_build
from lowering.manifest import Argument, Call, Manifest, Source
from lowering.pipeline import restart
from lowering.signature import Signature, TensorSpec, mlir_type
from lowering.stages import CompileOptions
from lowering.vmfb import pack
from npu_iree.errors import SourceError, StageError
from npu_iree.offline.build import BuildOptions, write_files
from npu_iree.offline.declarations import declared_tensors

_PARAMETER = "#flow.parameter.named<"
_PLAIN = {mlir_type(dtype): dtype for dtype in DTYPES if mlir_type(dtype) not in DTYPES}


def write_from_ir(file: Path, path: str | os.PathLike[str], options: BuildOptions) -> Manifest:
    """Go on from a dumped `.torch.mlir`, `.linalg.mlir` or `.flow.mlir`, and write an artifact.

    The arguments of each function are called `input0`, `input1`, ...; all are tensors.

    Raises:
        SourceError: no stage continues from such a file, its weights are parameters, or a function
            takes something else.
        StageError: a stage failed.
    """
    builder = options.compiler.builder
    flags = builder.target.flag_sets_for(extra=options.flags)[0]
    with tempfile.TemporaryDirectory(prefix="npu-iree-") as scratch:
        try:
            _refuse_parameters(file)
            product = restart(file, CompileOptions(flags=flags), Path(scratch), builder.toolchain)
        except (ValueError, OSError) as error:
            raise SourceError(f"cannot compile {file}: {error}") from error
        except StageError as error:  # its folder is about to go
            told = f"{file}: {error.diagnostics}"
            raise StageError(error.stage, told, timed_out=error.timed_out) from error
        flow = [*Path(scratch).glob("*.flow.mlir"), *([file] if ".flow." in file.name else [])]
        features = required_features(flow[0].read_text())
        module = product.read_bytes()
    manifest = Manifest(
        entries=_entries(file, module),
        parameters=(),
        states=(),
        parameter_file="",
        target=options.target,
        driver=options.driver,
        cpu_features=features,
        flags=flags,
        versions=compiler_build(),
        source=dict(options.source),
    )
    write_files(Path(path), pack(module, manifest), "", {})
    return manifest


def _refuse_parameters(file: Path) -> None:
    if _PARAMETER in file.read_text():
        raise SourceError(
            f"{file}: its weights are parameters, whose values no IR file has: go on from a "
            ".linalg.mlir, where they are arguments"
        )


def _entries(file: Path, module: bytes) -> dict[str, Call]:
    loaded = hal.VmModule.copy_buffer(hal.VmInstance(), module)
    declarations = {
        name: loaded.lookup_function(name).reflection.get("iree.abi.declaration")
        for name in loaded.function_names
    }
    return {name: _call(file, name, text) for name, text in declarations.items() if text}


def _call(file: Path, name: str, declaration: str) -> Call:
    inputs, outputs = declared_tensors(declaration)
    if len(re.findall(r"%input\d+:", declaration)) != len(inputs):
        raise SourceError(f"{file}: {name} takes something else than tensors: {declaration}")
    taken = tuple(_spec(text, f"s{i}_") for i, text in enumerate(inputs))
    given = tuple(_spec(text, f"r{i}_") for i, text in enumerate(outputs))
    names = tuple(f"input{i}" for i in range(len(taken)))
    return Call(
        arguments=tuple(map(Argument, names, taken)),
        in_tree=_tree_text(((0,) * len(taken), {})),
        names=names,
        function=Signature(taken, (), given),
        takes=tuple(Source("argument", i) for i in range(len(taken))),
        outputs=tuple(Source("result", i) for i in range(len(given))),
        out_tree=_tree_text((0,) * len(given)),
    )


def _spec(text: str, symbol: str) -> TensorSpec:
    """Read `2x?xf32`; a size that may change gets a name of its own."""
    *sizes, dtype = text.split("x") if not text.endswith(">") else _complex_parts(text)
    shape = tuple(int(s) if s != "?" else f"{symbol}{d}" for d, s in enumerate(sizes))
    return TensorSpec(_PLAIN.get(dtype, dtype), shape, tuple(range(len(shape))))


def _complex_parts(text: str) -> list[str]:
    sizes, _, element = text.partition("complex<")
    return [*sizes.split("x")[:-1], f"complex<{element}"]


def _tree_text(value: object) -> str:
    return pytree.treespec_dumps(pytree.tree_structure(value))
