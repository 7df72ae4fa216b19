"""Give each op that writes into a tensor one that nothing else reads."""

from __future__ import annotations

from typing import Any

from lowering.stages.ir.barrier import behind_barrier
from lowering.stages.ir.structured import VIEWS, inputs_of, is_elementwise, is_of_nothing
from lowering.stages.ir.symbols import maker_of, ops_of
from lowering.stages.ir.templates import put
from lowering.stages.ir.tensors import computed
from lowering.stages.ir.types import is_tensor, sizes_of
from lowering.stages.linalg.keep_arguments import only_reads

# Each number goes through bits that the compiler does not know to be zeros: a copy that stays.
_MIX_INTEGERS = "%y = arith.xori %x, %zero : {bits}"
_MIX_FLOATS = """
    %0 = arith.bitcast %x : {element} to {bits}
    %1 = arith.xori %0, %zero : {bits}
    %y = arith.bitcast %1 : {bits} to {element}
"""
_MIX_COMPLEX = """
    %re = complex.re %x : {element}
    %im = complex.im %x : {element}
    %0 = arith.bitcast %re : {part} to {bits}
    %1 = arith.xori %0, %zero : {bits}
    %2 = arith.bitcast %1 : {bits} to {part}
    %y = complex.create %2, %im : {element}
"""
_MIXED = """
func.func private @mixed(%x: {element}, %zero: {bits}) -> {element} {{
  {body}
  return %y : {element}
}}
"""
_MOVES = VIEWS | {"linalg.transpose"}
_INSERT = "tensor.insert_slice"


def separate_writes(function: Any) -> None:
    """Copy a tensor before an op overwrites it, where somebody still reads what was there.

    IREE writes in place, and does not see all who read: a slice that is put into another place of
    its own tensor is read while it is written; and of what two ops write into, or other ops read
    (the numbers from 0 on that two sorts begin with, a `zeros` that two scatters fill), both get
    the same buffer. So do those of what is made of nothing twice, once IREE knows that the sizes
    are equal, and merges the two.

    Before: %0 = tensor.extract_slice %x[0, 0] [3, 5]; %1 = tensor.insert_slice %0 into %x[0, 1]
    After:  %c = linalg.generic {copy} ins(%x); %1 = tensor.insert_slice %0 into %c[0, 1]
    """
    from iree.compiler import ir

    for op in ops_of(function):
        if op.name != _INSERT and not op.name.startswith("tm_tensor."):
            continue
        for i, target in enumerate(list(op.operands)):
            if not is_tensor(target) or only_reads(op, i):
                continue
            others = [o for k, o in enumerate(op.operands) if k != i and is_tensor(o)]
            is_own = any(_root(other) == _root(target) for other in others)
            if is_own or _is_read_elsewhere(target, op) or _is_made_again(target, function):
                with op.location, ir.InsertionPoint(op):
                    op.operands[i] = _copied(target)


def _root(value: Any) -> Any:
    """Return what a value is a part of, or the same numbers in another order."""
    while maker_of(value) and _moves(value.owner):
        value = value.owner.operands[0]
    return value


def _moves(op: Any) -> bool:
    if op.name in _MOVES:
        return True
    if not is_elementwise(op) or len(inputs_of(op)) != 1:
        return False
    block = op.regions[0].blocks[0]
    return len(block.operations) == 1 and block.operations[0].operands[0] == block.arguments[0]


def _is_read_elsewhere(value: Any, reader: Any) -> bool:
    """Say whether an op other than one reads a value, or what the value is a part of."""
    while True:
        users = [use.owner.operation for use in value.uses]
        if any(user != reader.operation and user.name != "tensor.dim" for user in users):
            return True
        if not maker_of(value) or not _moves(value.owner):
            return False
        reader, value = value.owner, value.owner.operands[0]


def _is_made_again(value: Any, function: Any) -> bool:
    """Say whether a value of dynamic sizes is made of no tensor, and may be made so once more."""
    made = _root(value)
    if not maker_of(made) or not is_of_nothing(made.owner):
        return False
    if None not in sizes_of(made.type):
        return False  # merged already
    name, kind = made.owner.name, str(made.type)
    others = [op for op in ops_of(function) if op != made.owner]
    alike = [op for op in others if op.name == name and is_of_nothing(op)]
    return any(str(result.type) == kind for op in alike for result in op.results)


def _copied(value: Any) -> Any:
    """Copy a tensor at the insertion point."""
    from iree.compiler import ir

    kind = ir.RankedTensorType(value.type)
    element = kind.element_type
    is_complex = isinstance(element, ir.ComplexType)
    part = ir.ComplexType(element).element_type if is_complex else element
    bits = ir.IntegerType.get_signless(part.width)
    zero = ir.Operation.create(
        "arith.constant", results=[bits], attributes={"value": ir.IntegerAttr.get(bits, 0)}
    )
    mix = _MIX_COMPLEX if is_complex else _MIX_INTEGERS if part == bits else _MIX_FLOATS
    zeros = behind_barrier(zero.result, stays=True)
    body = mix.format(element=element, part=part, bits=bits)
    if maker_of(value) != "linalg.fill":
        return behind_barrier(computed(value, str(element), body, zero=zeros))
    fill = value.owner.clone()
    with ir.InsertionPoint(fill):
        number = _MIXED.format(element=element, bits=bits, body=body)
        (fill.operands[0],) = put(number, [fill.operands[0], zeros])
    return behind_barrier(fill.results[0])
