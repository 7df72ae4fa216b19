"""Give IREE masks as bytes, where it would pack them beside the result of a product."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lowering.stages.ir.barrier import behind_barrier
from lowering.stages.ir.structured import PRODUCTS, RESHAPES, inputs_of, is_elementwise, is_tensor
from lowering.stages.ir.symbols import maker_of
from lowering.stages.ir.tensors import computed

_TO_BYTE = "%y = arith.extui %x : i1 to i8"
_FROM_BYTE = "%none = arith.constant 0 : i8\n%y = arith.cmpi ne, %x, %none : i8"


def widen_masks(function: Any) -> None:
    """Read the masks beside a product's result as bytes, which a device program of its own makes.

    What is computed of a result that is packed is computed in the packed order, so that a mask is
    packed, too, and IREE refuses to pack bits ("'linalg.pack' op expected padding_value has 'i8'
    but got: 'i1'"): attention with one mask for all heads.

    Before: %s = linalg.matmul(%q, %k); %0 = linalg.generic {select} ins(%mask, %s)
    After:  %b = util.optimization_barrier(linalg.generic {extui} ins(%mask))    of tensor<SxSxi8>
            %m = linalg.generic {cmpi ne 0} ins(%b)
            %s = linalg.matmul(%q, %k); %0 = linalg.generic {select} ins(%m, %s)
    """
    computed = set[Any]()  # by products, or of what they compute
    bytes_of = dict[Any, Any]()
    for op in [op.operation for op in function.regions[0].blocks[0].operations]:
        if op.name in PRODUCTS:
            computed.update(op.results)
        elif any(operand in computed for operand in op.operands):
            if is_elementwise(op):
                for reader, place in list(_masks_read(op, computed)):
                    _widen(reader, place, bytes_of)
            if is_elementwise(op) or op.name in RESHAPES:
                computed.update(op.results)


def _masks_read(op: Any, computed: set[Any]) -> Iterator[tuple[Any, int]]:
    """Find the masks that an op reads itself, or by what it is fused with: the op, and the place.

    Those that are computed in the same loops are none: they are never in memory.
    """
    reads = op.operands if op.name in RESHAPES else inputs_of(op)
    for place, operand in enumerate(reads):
        if operand in computed or not is_tensor(operand):
            continue
        maker = maker_of(operand)
        is_fused = maker in RESHAPES or (maker != "" and is_elementwise(operand.owner))
        if is_fused and sum(1 for _ in operand.uses) == 1:
            yield from _masks_read(operand.owner, computed)
        elif str(operand.type.element_type) == "i1":
            yield op, place


def _widen(reader: Any, place: int, bytes_of: dict[Any, Any]) -> None:
    from iree.compiler import ir

    mask = reader.operands[place]
    if mask not in bytes_of:
        behind = ir.InsertionPoint.after if maker_of(mask) else ir.InsertionPoint.at_block_begin
        with behind(mask.owner), reader.location:
            bytes_of[mask] = behind_barrier(computed(mask, "i8", _TO_BYTE))
    with ir.InsertionPoint(reader), reader.location:
        reader.operands[place] = computed(bytes_of[mask], "i1", _FROM_BYTE)
