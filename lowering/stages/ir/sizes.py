"""Sizes of tensors as products, of a known number and of numbers that come with the tensors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lowering.stages.ir.device_programs import LOAD, segments_of
from lowering.stages.ir.structured import inputs_of
from lowering.stages.ir.symbols import constant_of, maker_of
from lowering.stages.ir.templates import put
from lowering.stages.ir.types import sizes_of

ORDINAL = "iree_tensor_ext.dispatch.workload.ordinal"
_PRODUCT = "arith.muli"
_MULTIPLY = """
func.func @multiply({arguments}) -> index {{
  %known = arith.constant {known} : index
{steps}
  return {last} : index
}}
"""


@dataclass(frozen=True)
class Size:
    """A product; two that are equal are one number.

    Attributes:
        known: a number.
        factors: values of the host, in the order in which they are multiplied.
    """

    known: int = 1
    factors: tuple[Any, ...] = field(default=(), compare=False)
    _counts: frozenset[tuple[Any, int]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_counts", frozenset(Counter(self.factors).items()))

    @classmethod
    def of(cls, value: Any) -> Size:
        """Take a value of the host apart, into what it is the product of."""
        if (number := constant_of(value)) is not None:
            return cls(number)
        if maker_of(value) == _PRODUCT:
            return product(map(cls.of, value.owner.operands))
        return cls(1, (value,))

    @property
    def number(self) -> int | None:
        """The size, if it is known."""
        return self.known if not self.factors else None

    def put(self) -> Any:
        """Put it at the insertion point; return the value."""
        arguments = ", ".join(f"%f{i}: index" for i, _ in enumerate(self.factors))
        last, steps = "%known", list[str]()
        for i, _ in enumerate(self.factors):
            steps.append(f"  %p{i} = {_PRODUCT} {last}, %f{i} : index")
            last = f"%p{i}"
        text = _MULTIPLY.format(
            arguments=arguments, known=self.known, steps="\n".join(steps), last=last
        )
        (value,) = put(text, self.factors)
        return value


def product(sizes: Iterable[Size]) -> Size:
    """Return the product of some sizes."""
    parts = list(sizes)
    factors = tuple(value for size in parts for value in size.factors)
    return Size(math.prod(size.known for size in parts), factors)


def sizes_in(value: Any, given: Sequence[Any]) -> list[Size] | None:
    """Return the sizes of a tensor in the function of a device program.

    Args:
        value: the tensor.
        given: what the program is dispatched with, for each argument of the function.

    Returns:
        A size for each dimension; None if one is not known where it is dispatched.
    """
    from iree.compiler import ir

    known = sizes_of(value.type)
    if None not in known:
        return [Size(size) for size in known if size is not None]
    maker, op = maker_of(value), value.owner
    if maker == LOAD:
        rest = iter(segments_of(op)[3])
    elif maker == "tensor.empty":
        rest = iter(op.operands)
    elif maker.startswith("linalg."):
        return sizes_in(op.operands[len(inputs_of(op)) + ir.OpResult(value).result_number], given)
    else:
        return None
    sizes = [_size_in(next(rest), given) if size is None else Size(size) for size in known]
    return None if None in sizes else [size for size in sizes if size is not None]


def _size_in(value: Any, given: Sequence[Any]) -> Size | None:
    """Return the size that a value of the function is; None if it is computed there."""
    if maker_of(value) == ORDINAL:
        value = value.owner.operands[0]
    if (number := constant_of(value)) is not None:
        return Size(number)
    return None if maker_of(value) else Size.of(given[value.arg_number])
