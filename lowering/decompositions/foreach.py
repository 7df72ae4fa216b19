"""Ops on lists of tensors, which optimizers and gradient clipping use, as an op for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from lowering.decompositions.halves import HALVES

aten = torch.ops.aten
_PREFIX = "_foreach_"


def _plus_scaled(
    combine: Callable[[Any, torch.Tensor], torch.Tensor],
) -> Callable[..., torch.Tensor]:
    """Give `addcdiv` or `addcmul` by a value that may be a tensor, in eager's order.

    Halves are rounded once.
    """

    def op(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, value: Any = 1) -> torch.Tensor:
        if x.dtype in HALVES and x.dtype is a.dtype is b.dtype:
            return op(x.float(), a.float(), b.float(), value).to(x.dtype)
        return x + combine(value * a, b)

    return op


def _bound(by_tensor: Any, by_number: Any) -> Callable[..., torch.Tensor]:
    def op(x: torch.Tensor, bound: Any) -> torch.Tensor:
        by = by_tensor if isinstance(bound, torch.Tensor) else by_number
        result: torch.Tensor = by(x, bound)
        return result

    return op


def _copy(x: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return source.to(x.dtype).expand_as(x).clone()


def _norm(x: torch.Tensor, order: float = 2, dtype: torch.dtype | None = None) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(x, order, dtype=dtype)
    return norm


# Those that `torch` does not have by the same name, or not for numbers and tensors alike.
_SINGLE: dict[str, Callable[..., torch.Tensor]] = {
    "addcdiv": _plus_scaled(torch.div),
    "addcmul": _plus_scaled(torch.mul),
    "copy": _copy,
    "maximum": _bound(torch.maximum, torch.clamp_min),
    "minimum": _bound(torch.minimum, torch.clamp_max),
    "norm": _norm,
    "zero": torch.zeros_like,
}


def _functional_ops() -> Iterator[tuple[str, torch._ops.OpOverload]]:
    for qualified in torch._C._dispatch_get_all_op_names():
        name, _, overload = qualified.removeprefix("aten::").partition(".")
        if name.startswith(_PREFIX) and not name.endswith("_"):
            op = getattr(getattr(aten, name), overload or "default")
            if not any(argument.is_out for argument in op._schema.arguments):
                yield name.removeprefix(_PREFIX), op


def _of_each(op: torch._ops.OpOverload, single: Callable[..., torch.Tensor]) -> Any:
    """Decompose an op on lists: `single` on the first of each, on the second of each, and so on.

    Before: %0 = _foreach_add([%a, %b], [%c, %d], alpha=2)
    After:  %0 = [add(%a, %c, alpha=2), add(%b, %d, alpha=2)]
    """
    names = [argument.name for argument in op._schema.arguments]
    kinds = [argument.type for argument in op._schema.arguments]
    lists = [i for i, kind in enumerate(kinds) if isinstance(kind, torch.ListType)]
    if "scalars" in names:  # numbers, or a tensor of them
        lists = sorted({*lists, names.index("scalars")})

    def decomposed(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        columns = [[*args[i]] for i in lists if i < len(args)]
        results = []
        for row in zip(*columns, strict=True):
            each = list(args)
            for i, value in zip(lists, row, strict=True):
                each[i] = value
            results.append(single(*each, **kwargs))
        return results

    return decomposed


DECOMPOSITIONS = {
    op: _of_each(op, single)
    for name, op in _functional_ops()
    if (single := _SINGLE.get(name, getattr(torch, name, None))) is not None
}
