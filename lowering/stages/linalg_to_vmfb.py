"""Stage 3: linalg on tensors to an IREE module (.vmfb), parameters turned into globals."""

from __future__ import annotations

from typing import Any

from lowering.artifact import ENTRY, PARAMETER_SCOPE, parameter_name
from lowering.stages import CompileOptions, Stage


def linalg_to_vmfb(linalg_asm: str, options: CompileOptions) -> bytes:
    """Compile linalg IR to a .vmfb whose last `options.parameters` arguments became globals.

    Before: func.func @main(%arg0: tensor<1x8xf32>, %arg1: tensor<8x8xf32>)
    After:  util.global private @p0 = #flow.parameter.named<"model"::"p0"> : tensor<8x8xf32>
            func.func @main(%arg0: tensor<1x8xf32>) { %0 = util.global.load @p0 ... }

    A parameter is a global so that IREE packs it once, at load, for the code that reads it.

    Args:
        linalg_asm: one module with the function `main`.
        options: `flags` go to IREE as they are.

    Raises:
        RuntimeError: the compiler refused the module; the text is what it said.
    Source: `iree.compiler.api`; `#flow.parameter.named` and `util.global` of IREE's dialects.
    """
    from iree.compiler import ir
    from iree.compiler.api import Invocation, Output, Session

    session = Session()
    session.set_flags(*options.flags)
    messages: list[str] = []
    context = session.context
    handler = context.attach_diagnostic_handler(lambda d: _collect(messages, d))
    try:
        with context, ir.Location.unknown():
            module = ir.Module.parse(linalg_asm)
            _bind_parameters(module, options.parameters)
        invocation = Invocation(session)
        invocation.import_module(module.operation)
        if not invocation.execute():
            raise RuntimeError("\n".join(messages) or "iree-compile failed without a word")
        output = Output.open_membuffer()
        invocation.output_vm_bytecode(output)
        return bytes(output.map_memory())
    except ir.MLIRError as error:
        raise RuntimeError("\n".join(messages) or str(error)) from error
    finally:
        handler.detach()


def _collect(messages: list[str], diagnostic: Any) -> bool:
    if "error" in str(diagnostic.severity).lower():
        messages.append(f"{diagnostic.location}: {diagnostic.message}")
    return True


def _bind_parameters(module: Any, count: int) -> None:
    """Turn the last `count` arguments of the entry point into parameter globals."""
    from iree.compiler import ir

    if not count:
        return
    function = next(
        op for op in module.body.operations
        if "sym_name" in op.attributes and op.attributes["sym_name"].value == ENTRY
    )
    block = function.regions[0].blocks[0]
    first = len(block.arguments) - count
    for index in range(count):
        argument = block.arguments[first + index]
        name = parameter_name(index)
        with ir.InsertionPoint.at_block_begin(module.body):
            ir.Operation.create(
                "util.global",
                attributes={
                    "sym_name": ir.StringAttr.get(name),
                    "sym_visibility": ir.StringAttr.get("private"),
                    "type": ir.TypeAttr.get(argument.type),
                    "initial_value": ir.Attribute.parse(
                        f'#flow.parameter.named<"{PARAMETER_SCOPE}"::"{name}"> : {argument.type}'
                    ),
                },
            )
        with ir.InsertionPoint.at_block_begin(block):
            load = ir.Operation.create(
                "util.global.load",
                results=[argument.type],
                attributes={"global": ir.FlatSymbolRefAttr.get(name)},
            )
        argument.replace_all_uses_with(load.result)
    for index in reversed(range(first, first + count)):
        block.erase_argument(index)
    old = ir.FunctionType(function.attributes["function_type"].value)
    function.attributes["function_type"] = ir.TypeAttr.get(
        ir.FunctionType.get(old.inputs[:first], old.results)
    )
    if "arg_attrs" in function.attributes:
        del function.attributes["arg_attrs"]


def _is_flatbuffer(vmfb: bytes) -> str | None:
    return None if len(vmfb) > 64 else "the compiler wrote an empty module"


LINALG_TO_VMFB = Stage("linalg-to-vmfb", "vmfb", linalg_to_vmfb, _is_flatbuffer)
