"""Stage 3: linalg on tensors to IREE's flow dialect: dispatches formed, parameters as globals."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from lowering.abi import MOST_TENSORS, MOST_WORDS, PARAMETER_SCOPE
from lowering.stages import CompileOptions, Stage
from lowering.stages.call_kernels import link_kernels
from lowering.stages.flow.convert_by_floats import convert_by_floats
from lowering.stages.flow.keep_rounding import keep_rounding
from lowering.stages.flow.know_sizes import know_sizes
from lowering.stages.flow.pack_in_shape import pack_in_shape
from lowering.stages.flow.put_rows import put_rows
from lowering.stages.flow.read_by_rows import mark_few_rows, read_by_rows
from lowering.stages.flow.read_first import read_first
from lowering.stages.flow.read_in_place import read_in_place
from lowering.stages.flow.rows.join import join_rows
from lowering.stages.flow.separate_packing import separate_packing
from lowering.stages.flow.skip_padding import skip_padding
from lowering.stages.flow.sum_places import sum_places
from lowering.stages.flow.sum_products import hide_products, sum_products
from lowering.stages.flow.tell_sizes_apart import tell_sizes_apart
from lowering.stages.ir.barrier import drop_barriers
from lowering.stages.ir.device_programs import made_by
from lowering.stages.ir.symbols import drop_unread, inside, symbol_of, walk
from lowering.stages.iree_session import CHANNELS_LAST, DATA_TILING, IreeSession
from lowering.stages.linalg.index_inside import index_inside
from lowering.stages.linalg.keep_arguments import keep_arguments
from lowering.stages.linalg.keep_off_stack import keep_off_stack
from lowering.stages.linalg.keep_signs import keep_signs
from lowering.stages.linalg.mark_convolutions import mark_convolutions
from lowering.stages.linalg.mark_weight_gradients import mark_weight_gradients
from lowering.stages.linalg.multiply_halves import keep_widened, multiply_halves
from lowering.stages.linalg.put_channels_last import put_channels_last
from lowering.stages.linalg.read_chosen import read_chosen
from lowering.stages.linalg.read_in_panels import read_in_panels
from lowering.stages.linalg.scatter_rows import scatter_rows
from lowering.stages.linalg.separate_broadcasts import separate_broadcasts
from lowering.stages.linalg.separate_chains import separate_chains
from lowering.stages.linalg.separate_concats import separate_concats
from lowering.stages.linalg.separate_merges import separate_merges
from lowering.stages.linalg.separate_pieces import separate_pieces
from lowering.stages.linalg.separate_reads import separate_reads
from lowering.stages.linalg.separate_scalars import separate_scalars
from lowering.stages.linalg.separate_slices import separate_slices
from lowering.stages.linalg.separate_writes import separate_writes
from lowering.stages.linalg.sort_nans import sort_nans
from lowering.stages.linalg.transpose_last import transpose_last
from lowering.stages.linalg.widen_masks import widen_masks

_WIDE = ("index", "i64", "f64")


def linalg_to_flow(linalg_asm: str, options: CompileOptions) -> str:
    """Form dispatches; the arguments that `options.parameters` names become parameter globals.

    Before: func.func @main(%arg0: tensor<1x8xf32>, %arg1: tensor<8x8xf32>)
    After:  util.global private @param.p0 = #flow.parameter.named<"model"::"p0"> : tensor<8x8xf32>
            util.func public @main(%arg0: !hal.buffer_view, %wait: !hal.fence, %signal: !hal.fence)

    A parameter is a global so that IREE packs it once, at load, for the code that reads it.

    Args:
        linalg_asm: one module; its public functions are the entry points.
        options: `flags` go to IREE as they are; `kernels` are linked in.

    Raises:
        RuntimeError: the compiler refused the module; the text is what it said.
    Source: `iree-compile --compile-to=flow`; `#flow.parameter.named` and `util.global`.
    """
    with IreeSession(options) as session:
        module = dispatches_of(session, linalg_asm, options)
        return str(module.operation.get_asm())


def dispatches_of(session: IreeSession, linalg_asm: str, options: CompileOptions) -> Any:
    """Parse a module in linalg, and bring it to flow; chains that are too long for it are cut.

    Raises:
        RuntimeError: the compiler refused the module; the text is what it said.
    """
    module = session.parse(linalg_asm)
    form_dispatches(session, module, options)
    if not options.is_for_cpu:
        return module
    counts = _operands(module)
    if any(tensors > MOST_TENSORS or words > MOST_WORDS for tensors, words in counts):
        module = session.parse(linalg_asm)
        with session.context:
            for function in _entry_points(module):
                separate_chains(function)
        form_dispatches(session, module, options)
        counts = _operands(module)
    tensors = max((tensors for tensors, _ in counts), default=0)
    if tensors > MOST_TENSORS:  # of the words, the compiler may know more than is seen here
        raise RuntimeError(
            f"a device program would take {tensors} tensors; IREE's runtime loads none with more "
            f"than {MOST_TENSORS}"
        )
    return module


def form_dispatches(session: IreeSession, module: Any, options: CompileOptions) -> None:
    """Bring a module in linalg to flow, in place.

    Raises:
        RuntimeError: the compiler refused the module; the text is what it said.
    """
    from iree.compiler import ir

    prepare(session, module, options)
    session.compile(module, end="flow")
    with session.context, ir.Location.unknown(session.context):
        drop_barriers(module)
        know_sizes(module)
        read_in_place(module)
        pack_in_shape(module)
        separate_packing(module)
        tell_sizes_apart(module)
        if options.is_for_cpu:
            read_by_rows(module, session.features)
            skip_padding(module)
            sum_places(module)
            put_rows(module)
            join_rows(module, session.features)
            sum_products(module)
            keep_rounding(module)
            convert_by_floats(module)
            read_first(module)


def prepare(session: IreeSession, module: Any, options: CompileOptions) -> None:
    """Make a module in linalg, in place, what IREE is to compile."""
    from iree.compiler import ir

    is_tiled = DATA_TILING in options.flags
    features = session.features if is_tiled else ()
    with session.context:
        link_kernels(session, module, options.kernels)
        bound: dict[str, Any] = {}
        for function in _entry_points(module):
            names = options.parameters.get(symbol_of(function), ())
            _bind_parameters(module, function, names, bound)
            with ir.Location.unknown():
                keep_arguments(function, options.given.get(symbol_of(function), ()))
                sort_nans(function)
                index_inside(function)
                scatter_rows(function)
                separate_writes(function)
                keep_off_stack(function)
                keep_signs(function)
                separate_reads(function)
                separate_slices(function)
                separate_broadcasts(function)
                separate_scalars(function)
                separate_pieces(function)
                separate_concats(function)
                mark_convolutions(function, features)
                mark_weight_gradients(function, features)
                if any(CHANNELS_LAST in flag for flag in options.flags):
                    put_channels_last(function)
                drop_unread(function)
                if is_tiled:
                    transpose_last(function)
                    separate_merges(function)
                    widen_masks(function)
                    hide_products(function)
                multiply_halves(function, session.features if options.is_for_cpu else None)
                read_chosen(function, features)
                if options.is_for_cpu:
                    mark_few_rows(function)
                read_in_panels(function, features)
                if options.is_for_cpu:
                    keep_widened(function)


def _operands(module: Any) -> list[tuple[int, int]]:
    """Count what each device program takes: tensors, and words of sizes and numbers."""
    counts = []
    for op in itertools.chain.from_iterable(map(walk, inside(module, "util.func"))):
        if op.name == "flow.dispatch":
            kinds = [str(operand.type) for operand in op.operands]
            tensors = sum("tensor<" in kind for kind in kinds)
            words = sum(2 if kind in _WIDE else 1 for kind in kinds if "tensor<" not in kind)
            counts.append((tensors + len(made_by(op)), words))
    return counts


def _entry_points(module: Any) -> list[Any]:
    functions = [op for op in module.body.operations if op.operation.name == "func.func"]
    return [op for op in functions if not _is_private(op)]


def _is_private(function: Any) -> bool:
    attributes = function.attributes
    return "sym_visibility" in attributes and attributes["sym_visibility"].value == "private"


def _bind_parameters(
    module: Any, function: Any, names: Sequence[str], bound: dict[str, Any]
) -> None:
    """Turn the last arguments of an entry point into loads of globals.

    Args:
        module: gets the globals.
        function: the entry point.
        names: of the parameters that its last arguments are.
        bound: the types of the globals there are, by parameter; those made are added.
    """
    from iree.compiler import ir

    block = function.regions[0].blocks[0]
    first = len(block.arguments) - len(names)
    with ir.Location.unknown():
        for index, name in enumerate(names):
            argument = block.arguments[first + index]
            if name not in bound:
                bound[name] = argument.type
                with ir.InsertionPoint.at_block_begin(module.body):
                    _create_global(name, argument.type)
            elif bound[name] != argument.type:
                raise RuntimeError(
                    f"parameter {name} is {bound[name]} in one entry point and {argument.type} in "
                    "another"
                )
            with ir.InsertionPoint.at_block_begin(block):
                load = ir.Operation.create(
                    "util.global.load",
                    results=[argument.type],
                    attributes={"global": ir.FlatSymbolRefAttr.get(_global_symbol(name))},
                )
            argument.replace_all_uses_with(load.result)
        for index in reversed(range(first, first + len(names))):
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
            "sym_name": ir.StringAttr.get(_global_symbol(name)),
            "sym_visibility": ir.StringAttr.get("private"),
            "type": ir.TypeAttr.get(kind),
            "initial_value": ir.Attribute.parse(value),
        },
    )


def _global_symbol(parameter: str) -> str:
    """Name a parameter's global: not as an entry point could be named."""
    return f"param.{parameter}"


def _has_entry(asm: str) -> str | None:
    return None if "util.func public @" in asm else "the module has no entry point"


LINALG_TO_FLOW = Stage("linalg-to-flow", "flow.mlir", linalg_to_flow, _has_entry)
