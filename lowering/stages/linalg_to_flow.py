"""Stage 3: linalg on tensors to IREE's flow dialect: dispatches formed, parameters as globals."""

from __future__ import annotations

from typing import Any

from lowering.abi import ENTRY, PARAMETER_SCOPE, parameter_name
from lowering.stages import CompileOptions, Stage
from lowering.stages.iree_session import IreeSession
from lowering.stages.keep_arguments import keep_arguments
from lowering.stages.separate_reads import separate_reads


def linalg_to_flow(linalg_asm: str, options: CompileOptions) -> str:
    """Form dispatches; the last `options.parameters` arguments become parameter globals.

    Before: func.func @main(%arg0: tensor<1x8xf32>, %arg1: tensor<8x8xf32>)
    After:  util.global private @p0 = #flow.parameter.named<"model"::"p0"> : tensor<8x8xf32>
            util.func public @main(%arg0: !hal.buffer_view, %wait: !hal.fence, %signal: !hal.fence)

    A parameter is a global so that IREE packs it once, at load, for the code that reads it.

    Args:
        linalg_asm: one module with the function `main`.
        options: `flags` go to IREE as they are.

    Raises:
        RuntimeError: the compiler refused the module; the text is what it said.
    Source: `iree-compile --compile-to=flow`; `#flow.parameter.named` and `util.global`.
    """
    from iree.compiler import ir

    with IreeSession(options) as session:
        module = session.parse(linalg_asm)
        with session.context:
            function = next(op for op in module.body.operations if _symbol(op) == ENTRY)
            _bind_parameters(module, function, options.parameters)
            with ir.Location.unknown():
                keep_arguments(function)
                separate_reads(function)
        session.compile(module, end="flow")
        return str(module.operation.get_asm())


def _bind_parameters(module: Any, function: Any, count: int) -> None:
    """Turn the last `count` arguments of the entry point into loads of globals."""
    from iree.compiler import ir

    block = function.regions[0].blocks[0]
    first = len(block.arguments) - count
    with ir.Location.unknown():
        for index in range(count):
            argument = block.arguments[first + index]
            name = parameter_name(index)
            with ir.InsertionPoint.at_block_begin(module.body):
                _create_global(name, argument.type)
            with ir.InsertionPoint.at_block_begin(block):
                load = ir.Operation.create(
                    "util.global.load",
                    results=[argument.type],
                    attributes={"global": ir.FlatSymbolRefAttr.get(name)},
                )
            argument.replace_all_uses_with(load.result)
        for index in reversed(range(first, first + count)):
            block.erase_argument(index)
        kind = ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value)
        function.attributes["function_type"] = ir.TypeAttr.get(
            ir.FunctionType.get(kind.inputs[:first], kind.results)
        )
    if "arg_attrs" in function.attributes:
        del function.attributes["arg_attrs"]


def _create_global(name: str, kind: Any) -> None:
    from iree.compiler import ir

    value = f'#flow.parameter.named<"{PARAMETER_SCOPE}"::"{name}"> : {kind}'
    ir.Operation.create(
        "util.global",
        attributes={
            "sym_name": ir.StringAttr.get(name),
            "sym_visibility": ir.StringAttr.get("private"),
            "type": ir.TypeAttr.get(kind),
            "initial_value": ir.Attribute.parse(value),
        },
    )


def _symbol(op: Any) -> str | None:
    return op.attributes["sym_name"].value if "sym_name" in op.attributes else None


def _has_entry(asm: str) -> str | None:
    return None if f"@{ENTRY}(" in asm else f"the module has no function @{ENTRY}"


LINALG_TO_FLOW = Stage("linalg-to-flow", "flow.mlir", linalg_to_flow, _has_entry)
