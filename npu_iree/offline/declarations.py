"""What a manifest says of functions, against what the module itself declares of them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lowering.manifest import Manifest
from lowering.signature import ScalarSpec, TensorSpec
from npu_iree.executable import Executable

_TENSOR = re.compile(r"tensor<((?:[^<>]|<[^<>]*>)*)>")
# How IREE declares an element type, where it is not our name.
DECLARED = {"u8": "ui8", "bool": "i1", "c64": "complex<f32>", "c128": "complex<f64>"}


def check_declarations(executable: Executable, manifest: Manifest) -> None:
    """Compare what the manifest says of each function with what the module itself declares.

    Raises:
        ValueError: they differ: the manifest is not that of this module.
    """
    for name, call in manifest.entries.items():
        declared = executable.functions[name].declaration
        if not declared:
            continue
        inputs, outputs = declared_tensors(declared)
        given = call.function.outputs  # the module may give more: see lowering's keep_arguments
        _compare(name, "takes", _tensors(call.function.inputs), inputs)
        _compare(name, "gives", given, outputs[: len(given)])


def declared_tensors(declaration: str) -> tuple[list[str], list[str]]:
    """Return the tensors that a function takes and gives, e.g. `2x?xf32`.

    Args:
        declaration: `async func @main(%input0: tensor<2xf32>) -> (%output0: tensor<2xf32>)`.
    """
    inputs, _, outputs = declaration.partition(" -> ")
    return [_plain(t) for t in _TENSOR.findall(inputs)], [
        _plain(t) for t in _TENSOR.findall(outputs)
    ]


def _tensors(specs: Sequence[TensorSpec | ScalarSpec]) -> list[TensorSpec]:
    return [s for s in specs if isinstance(s, TensorSpec)]


def _compare(name: str, verb: str, specs: Sequence[TensorSpec], declared: Sequence[str]) -> None:
    wanted = [_declared(spec) for spec in specs]
    if wanted != list(declared):
        found, said = ", ".join(declared), ", ".join(wanted)
        raise ValueError(f"its manifest lies about {name}, which {verb} ({found}), not ({said})")


def _declared(spec: TensorSpec) -> str:
    sizes = [spec.shape[d] for d in spec.order]
    dims = [str(s) if isinstance(s, int) else "?" for s in sizes]
    return "x".join([*dims, DECLARED.get(spec.dtype, spec.dtype)])


def _plain(text: str) -> str:
    return re.sub(r"\bsi(\d+)", r"i\1", text)
