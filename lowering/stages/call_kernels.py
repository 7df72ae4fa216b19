"""Calls of custom ops become calls of their kernels, which are linked in and inlined later."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lowering.kernels import Kernel, KernelType
from lowering.stages.ir.symbols import ops_of

_OPERATOR = "torch.operator"
_VTENSOR = re.compile(r"!torch\.vtensor<\[(?P<sizes>[^\]]*)\],(?P<element>[\w<>]+)>$")
_NUMBERS = {"!torch.bool": "i1", "!torch.float": "f64", "!torch.int": "i64"}
_SIGNED = re.compile(r"^[su]i(?=\d)")  # linalg's integers have no sign


def call_kernels(module: Any, texts: Mapping[str, str]) -> None:
    """Let a module in the torch dialect call kernels, which it only declares.

    Before: %1 = torch.operator "torch.mylib.scale"(%0, %float2) : (!torch.vtensor<[4],f32>, ...)
    After:  func.func private @"kernel.mylib.scale.default.main"(!torch.vtensor<[?],f32>, ...)
            %a = torch.tensor_static_info_cast %0 : !torch.vtensor<[4],f32> to ...<[?],f32>
            %b = func.call @"kernel.mylib.scale.default.main"(%a, %float2)
            %1 = torch.tensor_static_info_cast %b : ...<[?],f32> to !torch.vtensor<[4],f32>

    Args:
        module: one whose context is entered.
        texts: op -> the text of its kernel.

    Raises:
        RuntimeError: no function of a kernel takes the arguments of a call.
    """
    kernels = {op: Kernel.parse(op, text) for op, text in texts.items()}
    declared: dict[str, Any] = {}
    for function in list(module.body.operations):
        for op in ops_of(function):
            if op.name == _OPERATOR and (kernel := kernels.get(_op_name(op))):
                _call(module, op, kernel, declared)


def link_kernels(session: Any, module: Any, texts: Mapping[str, str]) -> None:
    """Put the functions of kernels in the place of their declarations, and inline them.

    Where one has branches, the compiler inlines later: until then, an entry point is one block.

    Args:
        session: of the compiler, whose context is entered; it parses.
        module: in linalg; declares what it calls.
        texts: op -> the text of its kernel.

    Raises:
        RuntimeError: a kernel cannot be parsed.
    """
    from iree.compiler import ir
    from iree.compiler.passmanager import PassManager

    for op, text in texts.items():
        kernel = session.parse(Kernel.parse(op, text).linkable())
        for function in list(kernel.body.operations):
            name = function.attributes["sym_name"]
            for declaration in list(module.body.operations):
                if declaration.attributes["sym_name"] == name:
                    declaration.erase()
            function.attributes["sym_visibility"] = ir.StringAttr.get("private")
            function.operation.detach_from_parent()
            module.body.append(function)
    functions = [op for op in module.body.operations if op.operation.name == "func.func"]
    if texts and all(len(function.regions[0].blocks) == 1 for function in functions):
        PassManager.parse("builtin.module(inline,symbol-dce)").run(module.operation)


def _op_name(op: Any) -> str:
    """Return the op as we name it: torch-mlir leaves `.default` out."""
    name = str(op.attributes["name"].value).removeprefix("torch.")
    return name if name.count(".") > 1 else f"{name}.default"


def _call(module: Any, op: Any, kernel: Kernel, declared: dict[str, Any]) -> None:
    from torch_mlir import ir

    operands, results = list(op.operands), list(op.results)
    function = kernel.function_for([_type(value) for value in operands])
    if function is None:
        raise RuntimeError(f"no function of the kernel of {kernel.op} takes {op}")
    symbol = kernel.symbol(function.name)
    with op.operation.location, ir.InsertionPoint(op):
        taken = [_like(v, t) for v, t in zip(operands, function.arguments, strict=True)]
        given = [_like(v, t) for v, t in zip(results, function.results, strict=True)]
        if symbol not in declared:
            declared[symbol] = _declare(module, symbol, taken, given)
        arguments = [_cast(v, t) for v, t in zip(operands, taken, strict=True)]
        call = ir.Operation.create(
            "func.call",
            results=given,
            operands=arguments,
            attributes={"callee": ir.FlatSymbolRefAttr.get(symbol)},
        )
        for old, new in zip(results, call.results, strict=True):
            old.replace_all_uses_with(_cast(new, old.type))
    op.operation.erase()


def _declare(module: Any, symbol: str, taken: list[Any], given: list[Any]) -> Any:
    from torch_mlir import ir

    with ir.InsertionPoint.at_block_begin(module.body):
        return ir.Operation.create(
            "func.func",
            regions=1,
            attributes={
                "sym_name": ir.StringAttr.get(symbol),
                "sym_visibility": ir.StringAttr.get("private"),
                "function_type": ir.TypeAttr.get(ir.FunctionType.get(taken, given)),
            },
        )


def _cast(value: Any, kind: Any) -> Any:
    from torch_mlir import ir

    if value.type == kind:
        return value
    cast = ir.Operation.create("torch.tensor_static_info_cast", results=[kind], operands=[value])
    return cast.result


def _like(value: Any, kind: KernelType) -> Any:
    """Return the type of a value, with the sizes that a kernel declares."""
    from torch_mlir import ir

    if kind.shape is None:
        return value.type
    sizes = ",".join("?" if size is None else str(size) for size in kind.shape)
    element = _VTENSOR.match(str(value.type))
    assert element is not None
    return ir.Type.parse(f"!torch.vtensor<[{sizes}],{element['element']}>")


def _type(value: Any) -> KernelType:
    text = str(value.type)
    if text in _NUMBERS:
        return KernelType(_NUMBERS[text])
    found = _VTENSOR.match(text)
    if found is None:
        return KernelType(text)
    sizes = [s for s in found["sizes"].split(",") if s]
    shape = tuple(None if s == "?" else int(s) for s in sizes)
    return KernelType(_SIGNED.sub("i", found["element"]), shape)
