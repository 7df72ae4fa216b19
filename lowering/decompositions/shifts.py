"""Shifts of bits by any number, as PyTorch's kernels make them.

By a number below 0, or of at least as many as an integer has bits, nothing is left of it but its
sign, and that only to the right; what the device gives for such a number is not defined.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes

from lowering.decompositions.narrow import lowest_bits
from lowering.decompositions.recursion import Ours

aten = torch.ops.aten
_WIDE = {torch.uint8: torch.int32, torch.int8: torch.int32}
_ours = Ours()


def _shifted(is_left: bool) -> Callable[[Any, Any], Any]:
    """Return a decomposition of what shifts one operand, a tensor or a number, by the other.

    Before: %2 = aten.__rshift__.Tensor(%0, %1)                        with %0 and %1 of i64
    After:  %2 = bitwise_right_shift(%0, where((%1 >= 0) & (%1 < 64), %1, 63))
    """
    by_tensor = aten.bitwise_left_shift.Tensor if is_left else aten.bitwise_right_shift.Tensor
    by_number = aten.__lshift__.Scalar if is_left else aten.__rshift__.Scalar

    def decomposed(x: Any, amount: Any) -> Any:
        kind = ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT
        _, dtype = elementwise_dtypes(x, amount, type_promotion_kind=kind)
        if _ours.is_done or dtype.is_floating_point or dtype is torch.bool:
            return NotImplemented
        bits, wide = torch.iinfo(dtype).bits, _WIDE.get(dtype, dtype)
        most = bits if dtype in _WIDE else bits - 1  # to the right, the sign is left
        x = _as_tensor(x, amount, dtype).to(wide)
        if type(amount) is int:
            amount = lowest_bits(amount, dtype)
            is_inside = 0 <= amount < bits
            if is_left and not is_inside:
                return torch.zeros_like(x, dtype=dtype)
            with _ours:
                return by_number(x, amount if is_inside else most).to(dtype)
        amount = _as_tensor(amount, x, dtype).to(wide)
        is_inside = (amount >= 0) & (amount < bits)
        with _ours:
            y = by_tensor(x, torch.where(is_inside, amount, 0 if is_left else most))
        return (torch.where(is_inside, y, 0) if is_left else y).to(dtype)

    return decomposed


def _as_tensor(value: Any, like: Any, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.to(dtype)
    if type(value) is int:
        return torch.full((), lowest_bits(value, dtype), dtype=dtype, device=like.device)
    return torch.full((), value, dtype=torch.int64, device=like.device).to(dtype)


DECOMPOSITIONS: dict[torch._ops.OpOverload, Callable[[Any, Any], Any]] = {
    aten.__lshift__.Scalar: _shifted(is_left=True),
    aten.__lshift__.Tensor: _shifted(is_left=True),
    aten.__rshift__.Scalar: _shifted(is_left=False),
    aten.__rshift__.Tensor: _shifted(is_left=False),
    aten.bitwise_left_shift.Scalar_Tensor: _shifted(is_left=True),
    aten.bitwise_left_shift.Tensor: _shifted(is_left=True),
    aten.bitwise_left_shift.Tensor_Scalar: _shifted(is_left=True),
    aten.bitwise_right_shift.Scalar_Tensor: _shifted(is_left=False),
    aten.bitwise_right_shift.Tensor: _shifted(is_left=False),
    aten.bitwise_right_shift.Tensor_Scalar: _shifted(is_left=False),
}
