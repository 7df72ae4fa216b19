"""Arguments of a call, by position or by name, checked against what was compiled for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from lowering.dtypes import DTYPES, dtype_name
from lowering.manifest import Argument
from lowering.signature import NUMBERS, ScalarSpec, TensorSpec, inverse
from npu_iree.aliasing import may_overlap, near_each_other, overlaps_itself
from npu_iree.array import DeviceArray
from npu_iree.errors import ArgumentError
from npu_iree.host_memory import check_memory
from npu_iree.offline.sizes import Size, match_shape, match_size

_INT_END = 1 << 63


def by_name(
    entry: str, names: Sequence[str], count: int, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Put arguments where they were at the export, whether given by position or by name."""
    if len(args) > len(names):
        raise ArgumentError(
            f"{entry} takes {len(names)} arguments, not {len(args)}: {', '.join(names)}"
        )
    given = dict(zip(names, args, strict=False))
    if twice := given.keys() & kwargs.keys():
        raise ArgumentError(f"{entry}: {', '.join(sorted(twice))} is given twice")
    given |= kwargs
    missing, extra = [n for n in names if n not in given], [n for n in given if n not in names]
    if missing or extra:
        what = [f"missing {', '.join(missing)}"] if missing else []
        what += [f"no argument {', '.join(extra)}"] if extra else []
        raise ArgumentError(f"{entry}: {'; '.join(what)}. It takes {', '.join(names)}")
    return tuple(given[n] for n in names[:count]), {n: given[n] for n in names[count:]}


def is_same_constant(one: object, other: object) -> bool:
    """Say whether two values, of which one is no tensor, are the same; NaN is what NaN is."""
    return type(one) is type(other) and repr(one) == repr(other)


def check_argument(
    argument: Argument, value: Any, sizes: dict[str, int], later: list[Size]
) -> None:
    """Check that a value is what an argument was compiled for.

    Args:
        argument: what it was compiled for.
        value: of the call.
        sizes: takes the symbolic sizes that it shows.
        later: takes the sizes that cannot be checked before others are known.

    Raises:
        ValueError: it is something else.
    """
    spec, name = argument.spec, argument.name
    if spec is None:
        if not is_same_constant(value, argument.value):
            raise ValueError(
                f"{name} was compiled in as {argument.value!r}, and cannot be {value!r}"
            )
        return
    if isinstance(spec, ScalarSpec):
        kind: type[Any] = NUMBERS[spec.dtype]
        if type(value) is not kind:
            raise ValueError(f"{name} is {kind.__name__}, not {type(value).__name__}")
        if kind is int and not -_INT_END <= value < _INT_END:
            raise ValueError(f"{name} is a number of 64 bits, which do not hold {value}")
        if argument.symbol:
            match_size((name, None, value, argument.symbol), sizes, later)
        return
    _check_tensor(name, value, spec)
    match_shape(name, _shape_of(value, spec), spec.shape, sizes, later)


def check_written(
    arguments: Sequence[Argument], values: Sequence[Any], written: Collection[int]
) -> None:
    """Check that a call can write to arguments, and that nothing else is changed by that.

    Args:
        arguments: what was compiled for.
        values: of the call; each is what its argument was compiled for.
        written: the positions of those that the call writes to.

    Raises:
        ValueError: it cannot.
    """
    tensors = {i: v for i, v in enumerate(values) if isinstance(v, torch.Tensor)}
    near = near_each_other(tensors) if written else set()
    for i in written:
        name, value = arguments[i].name, values[i]
        if isinstance(value, DeviceArray):
            raise ValueError(f"{name} is a handle, and the call writes to it; give a CPU tensor")
        if value.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name} requires a gradient, and the call writes to it, which no gradient sees; "
                "call it under torch.no_grad()"
            )
        if overlaps_itself(value):
            raise ValueError(
                f"{name} has several elements in one place, and the call writes to it; clone it"
            )
        for j in near - {i} if i in near else ():
            if may_overlap(value, tensors[j]):
                raise ValueError(
                    f"{name} shares memory with {arguments[j].name}, and the call writes to it; "
                    "clone one of them"
                )


def _check_tensor(name: str, value: Any, spec: TensorSpec) -> None:
    if not isinstance(value, (torch.Tensor, DeviceArray)):
        raise ValueError(f"{name} is a tensor, not {type(value).__name__}")
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise ValueError(f"{name} is on {value.device}; give a CPU tensor or a handle")
        check_memory(value, name)
    if value.dtype != DTYPES[spec.dtype]:
        raise ValueError(f"{name} is {dtype_name(value.dtype)}, and was compiled for {spec.dtype}")


def _shape_of(value: torch.Tensor | DeviceArray, spec: TensorSpec) -> tuple[int, ...]:
    shape = tuple(value.shape)
    is_stored = isinstance(value, DeviceArray) and not spec.is_contiguous  # a handle has that order
    if not is_stored or len(shape) != len(spec.order):
        return shape
    return tuple(shape[d] for d in inverse(spec.order))
