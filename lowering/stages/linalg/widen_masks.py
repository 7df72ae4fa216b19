"""Give IREE masks as bytes, where it would pack them beside the result of a product."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

from lowering.stages.ir.barrier import behind_barrier
from lowering.stages.ir.structured import PRODUCTS, RESHAPES, inputs_of, is_elementwise
from lowering.stages.ir.symbols import maker_of, ops_of
from lowering.stages.ir.tensors import computed
from lowering.stages.ir.types import is_tensor

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
    for op in ops_of(function):
        if op.name in PRODUCTS:
            computed.update(op.results)
        elif any(operand in computed for operand in op.operands):
            if is_elementwise(op):
                for reader, place in _masks_read(op, computed):
                    _widen(reader, place, bytes_of)
            if is_elementwise(op) or op.name in RESHAPES:
                computed.update(op.results)


def _masks_read(op: Any, computed: set[Any]) -> list[tuple[Any, int]]:
    """Find the masks that an op reads itself, or by what it is fused with: the op, and the place.

    Fused is what nothing else reads but the op and what is fused with it. Masks that are computed
    in the same loops are none: they are never in memory.
    """
    fused, masks, reads = [op], dict[Any, list[tuple[Any, int]]](), Counter[Any]()
    for reader in fused:
        for place, operand in enumerate(_read_by(reader)):
            if operand in computed or not is_tensor(operand):
                continue
            reads[operand] += 1
            is_left = reads[operand] < sum(1 for _ in operand.uses)
            if not is_left and _is_fusible(operand):
                masks.pop(operand, None)
                fused.append(operand.owner)
            elif str(operand.type.element_type) == "i1":
                masks.setdefault(operand, []).append((reader, place))
    return list(itertools.chain.from_iterable(masks.values()))


def _read_by(op: Any) -> list[Any]:
    return list(op.operands) if op.name in RESHAPES else inputs_of(op)


def _is_fusible(value: Any) -> bool:
    maker = maker_of(value)
    return maker in RESHAPES or (maker != "" and is_elementwise(value.owner))


def _widen(reader: Any, place: int, bytes_of: dict[Any, Any]) -> None:
    from iree.compiler import ir

    mask = reader.operands[place]
    if mask not in bytes_of:
        behind = ir.InsertionPoint.after if maker_of(mask) else ir.InsertionPoint.at_block_begin
        with behind(mask.owner), reader.location:
            bytes_of[mask] = behind_barrier(computed(mask, "i8", _TO_BYTE))
    with ir.InsertionPoint(reader), reader.location:
        reader.operands[place] = computed(bytes_of[mask], "i1", _FROM_BYTE)
