"""What a manifest says, against itself and against what the module declares of its functions."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from typing import Any

from lowering.dtypes import DTYPES, dtype_name
from lowering.manifest import Call, Manifest, Source
from lowering.signature import NUMBERS, ScalarSpec, TensorSpec, mlir_type
from npu_iree.executable import Executable

_TENSOR = re.compile(r"tensor<((?:[^<>]|<[^<>]*>)*)>")


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


def check_manifest(manifest: Manifest) -> None:
    """Check that there is something to call, and that all dtypes are known.

    Raises:
        ValueError: there is not, or one is not.
    """
    if not manifest.entries:
        raise ValueError("it has no entry points")
    specs: list[TensorSpec | ScalarSpec] = []
    for call in manifest.entries.values():
        function = call.function
        specs += [*function.inputs, *function.parameters, *function.outputs]
        specs += [a.spec for a in call.arguments if a.spec is not None]
    wrong = {s.dtype for s in specs if s.dtype not in (NUMBERS if _is_number(s) else DTYPES)}
    wrong |= {p.dtype for p in manifest.parameters if p.dtype not in DTYPES}
    if wrong:
        listed = ", ".join(sorted(wrong))
        raise ValueError(f"this version of npu_iree knows no dtype {listed[:200]}")


def check_call(
    name: str, call: Call, parameters: Container[str], states: Mapping[str, Any]
) -> None:
    """Check that each value of a call comes from where there is one of its kind.

    Args:
        name: of the entry point.
        call: what the manifest says of it.
        parameters: the names of those there are.
        states: the states by name, as tensors or handles.

    Raises:
        ValueError: one does not.
    """
    counts = {"argument": len(call.arguments), "result": len(call.function.outputs)}
    names: dict[str, Container[str]] = {"state": states.keys(), "parameter": parameters}
    for source in (*call.takes, *call.outputs, *(s for pair in call.writes for s in pair)):
        if source.kind in counts and not 0 <= source.index < counts[source.kind]:
            raise ValueError(f"{name}: there is no {source.kind} {source.index}")
        if source.kind in names and source.name not in names[source.kind]:
            raise ValueError(f"{name}: there is no {source.kind} {source.name[:80]!r}")
    if len(call.takes) != len(call.function.inputs):
        raise ValueError(f"{name}: takes and inputs do not match")
    for source, spec in zip(call.takes, call.function.inputs, strict=True):
        if source.kind not in ("argument", "state"):
            raise ValueError(f"{name}: no function takes a {source.kind}")
        _check_same(name, _kind(call, states, source), _plain_kind(spec))
    for target, source in call.writes:
        if target.kind not in ("argument", "state") or source.kind != "result":
            raise ValueError(f"{name}: a {source.kind} cannot be written to a {target.kind}")
        _check_same(name, _kind(call, states, target), _kind(call, states, source))
    _check_order(name, call)


def _kind(call: Call, states: Mapping[str, Any], source: Source) -> tuple[str, int]:
    """Return the dtype and the number of dimensions of a value; -1 of a number."""
    match source.kind:
        case "argument":
            spec = call.arguments[source.index].spec
            return _plain_kind(spec) if spec is not None else ("constant", -1)
        case "result":
            return _plain_kind(call.function.outputs[source.index])
        case "state":
            state = states[source.name]
            return dtype_name(state.dtype), len(state.shape)
    return source.kind, -1


def _plain_kind(spec: TensorSpec | ScalarSpec) -> tuple[str, int]:
    return spec.dtype, len(spec.shape) if isinstance(spec, TensorSpec) else -1


def _check_same(name: str, one: tuple[str, int], other: tuple[str, int]) -> None:
    if one != other:
        raise ValueError(f"{name}: a value is {one[0]} of {one[1]} dimensions, and {other} too")


def _check_order(name: str, call: Call) -> None:
    """Check that states lie in the order of their dimensions: what writes one is what takes it."""
    takes = zip(call.takes, call.function.inputs, strict=True)
    writes = ((target, call.function.outputs[source.index]) for target, source in call.writes)
    for source, spec in (*takes, *writes):
        if source.kind == "state" and isinstance(spec, TensorSpec) and not spec.is_contiguous:
            raise ValueError(
                f"{name}: {source.name[:80]} is not in the order of its dimensions; an artifact of "
                "an earlier version is to be compiled again"
            )


def _is_number(spec: TensorSpec | ScalarSpec) -> bool:
    return isinstance(spec, ScalarSpec)


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
    return "x".join([*dims, mlir_type(spec.dtype)])


def _plain(text: str) -> str:
    return re.sub(r"\bsi(\d+)", r"i\1", text)
