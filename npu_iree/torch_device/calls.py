"""A call of an eager op, taken apart: what travels as a tensor, and what is a constant of it.

Tensors, and numbers that change from call to call, are the leaves of a call. The rest is its
template: the same in all calls of one key, and compiled in.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lowering.eager import Argument
from npu_iree.torch_device.forms import Travels
from npu_iree.torch_device.storage import dense_order, dense_strides

_CPU = torch.device("cpu")
# Ops that write to their first argument by Python's names, and those that do not.
_OF_OPERATORS = {"__ilshift__": "__lshift__", "__irshift__": "__rshift__"}
# The dtype and memory order of each tensor that is written to; an empty one gets its result's.
Written = tuple[tuple[torch.dtype, tuple[int, ...] | None], ...]


@dataclass(frozen=True)
class _Leaf:
    """The place of a tensor in a call's arguments."""

    index: int


def scan(
    values: Iterable[Any], are_numbers: Iterable[Travels | None], key: list[Any], leaves: list[Any]
) -> None:
    """Take arguments apart: tensors, and numbers that travel as such, are leaves.

    Args:
        values: the arguments.
        are_numbers: of each, which numbers travel as tensors; None: none.
        key: takes what calls of one kernel have in common.
        leaves: takes the leaves.
    """
    for value, is_number in zip(values, are_numbers, strict=False):
        if isinstance(value, torch.Tensor):
            key += (value.dtype, value.shape, value.stride(), value.storage_offset(), value.is_cpu)
            leaves.append(value)
            continue
        kind = type(value)
        key.append(kind)
        if kind is list or kind is tuple:
            key.append(len(value))
            scan(value, itertools.repeat(None), key, leaves)
        elif is_number is not None and is_number(value):
            leaves.append(value)
        else:
            key.append(repr(value) if kind in (float, complex) else value)  # 0.0 == -0.0


@dataclass(frozen=True)
class Template:
    """The arguments of a call, with the places of its leaves.

    Attributes:
        positional: the arguments without names.
        named: those with names.
    """

    positional: list[Any]
    named: dict[str, Any]

    @classmethod
    def of(
        cls,
        positional: Iterable[tuple[Any, Travels | None]],
        named: Iterable[tuple[str, Any, Travels | None]],
    ) -> Template:
        """Make one: of arguments (with names), and which numbers travel in the place of each."""
        count = itertools.count()
        return cls(
            [_placed(value, is_number, count) for value, is_number in positional],
            {name: _placed(value, is_number, count) for name, value, is_number in named},
        )

    def filled(self, tensors: Sequence[torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments with tensors in the places of the leaves."""
        return _filled(self.positional, tensors), _filled(self.named, tensors)

    def constants(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Return what of a call is compiled into its kernel."""
        return _text(self.positional, leaves), _text(self.named, leaves)


def _text(value: Any, leaves: Sequence[Any]) -> Any:
    if isinstance(value, _Leaf):
        leaf = leaves[value.index]
        is_tensor = isinstance(leaf, torch.Tensor)
        return ("leaf", value.index, "tensor" if is_tensor else type(leaf))
    if isinstance(value, list):
        return tuple(_text(v, leaves) for v in value)
    if isinstance(value, dict):
        return tuple((k, _text(v, leaves)) for k, v in value.items())
    return (type(value), repr(value))


def _placed(value: Any, is_number: Travels | None, count: Iterator[int]) -> Any:
    """Return an argument with `_Leaf` in the place of its leaves, numbered as `scan` does."""
    if isinstance(value, torch.Tensor):
        return _Leaf(next(count))
    if isinstance(value, (list, tuple)):
        return [_placed(item, None, count) for item in value]
    return _Leaf(next(count)) if is_number is not None and is_number(value) else value


def _filled(template: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(template, _Leaf):
        return tensors[template.index]
    if isinstance(template, list):
        return [_filled(v, tensors) for v in template]
    if isinstance(template, dict):
        return {k: _filled(v, tensors) for k, v in template.items()}
    return _CPU if isinstance(template, torch.device) else template


class Computation:
    """What a call computes, on its leaves as tensors; holds none itself, as it lives as traces do.

    Attributes:
        results: what comes out; known when it has been called.
    """

    def __init__(
        self,
        form: Callable[..., Any],
        template: Template,
        written: Written,
        *,
        casts: bool,
        widened: frozenset[int],
    ) -> None:
        """Make one.

        Args:
            form: computes it.
            template: of the call.
            written: the tensors that the results are written to.
            casts: whether PyTorch writes results to tensors of other dtypes.
            widened: the leaves that it takes as vectors, see `half_scalars`.
        """
        self._form = form
        self._template = template
        self._written = written
        self._casts = casts
        self._widened = widened
        self.results: Results | None = None

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Compute it."""
        widened = self._widened
        tensors = [t.reshape(1) if i in widened else t for i, t in enumerate(tensors)]
        args, kwargs = self._template.filled(tensors)
        values = self._form(*args, **kwargs)
        is_list = isinstance(values, (list, tuple))
        results = list(values) if is_list else [values]
        self.results = Results(tuple(r is not None for r in results), is_list)
        results = [r.reshape(()) if widened else r for r in results if r is not None]
        if not self._written:
            return results
        pairs = zip(results, self._written, strict=True)
        return [self._as_target(result, dtype, order) for result, (dtype, order) in pairs]

    def _as_target(
        self, result: torch.Tensor, dtype: torch.dtype, order: tuple[int, ...] | None
    ) -> torch.Tensor:
        """Give a result the dtype and memory order of what it is written to."""
        if result.dtype != dtype:
            if not self._casts or not torch.can_cast(result.dtype, dtype):
                raise TypeError(f"{result.dtype} cannot be cast to {dtype}")
            result = result.to(dtype)
        if order is None:
            return result
        back = [order.index(d) for d in range(len(order))]
        return result.permute(order).contiguous().permute(back)


@dataclass(frozen=True)
class Results:
    """How the results of a call come: which are tensors (others are None), whether in a list."""

    kept: tuple[bool, ...]
    is_list: bool


def half_scalars(leaves: Sequence[Any]) -> frozenset[int]:
    """Return which leaves are to be vectors of one element: numbers keep their digits beside these.

    A number is as narrow as what it is computed with, if neither has a dimension.
    """
    tensors = {i: t for i, t in enumerate(leaves) if isinstance(t, torch.Tensor)}
    is_narrow = any(t.dtype in (torch.float16, torch.bfloat16) for t in tensors.values())
    if not is_narrow or len(tensors) == len(leaves) or any(t.dim() for t in tensors.values()):
        return frozenset()
    return frozenset(tensors)


def number_dtypes(
    leaves: Sequence[Any], *, keeps_digits: bool, is_widened: bool
) -> dict[type, torch.dtype]:
    """Return the dtypes that Python's numbers get, so that they promote as Python's numbers do.

    Args:
        leaves: of the call.
        keeps_digits: a number is stored into integers as it is.
        is_widened: the call has vectors in the place of tensors of no dimension.
    """
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    floats = [t for t in tensors if t.dtype.is_floating_point or t.dtype.is_complex]
    integers = [
        t
        for t in tensors
        if not (t.dtype.is_floating_point or t.dtype.is_complex or t.dtype is torch.bool)
    ]
    has_dim = is_widened or any(t.dim() for t in tensors)
    real = torch.float64 if keeps_digits else torch.get_default_dtype()
    if floats:
        wide = any(t.dtype in (torch.float64, torch.complex128) for t in floats)
        real = torch.float64 if wide else torch.float32
        if not has_dim:
            real = max((t.dtype.to_real() for t in floats), key=lambda d: d.itemsize)
    whole = torch.int64
    if integers and not has_dim and not floats:
        whole = max((t.dtype for t in integers), key=lambda d: d.itemsize)
    return {float: real, int: whole, bool: torch.bool}


def argument_of(leaf: Any, dtypes: Mapping[type, torch.dtype]) -> Argument:
    """Return what a kernel gets of a leaf: it is dense, without the gaps that it may have."""
    if not isinstance(leaf, torch.Tensor):
        return Argument(dtypes[type(leaf)], (), ())
    shape = tuple(leaf.shape)
    return Argument(leaf.dtype, shape, dense_strides(shape, order_for_reading(leaf)))


def order_for_reading(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the memory order in which a kernel gets a tensor: that of its strides if it can.

    It makes that of the results. What is expanded comes in the natural one.
    """
    shape, strides = tuple(tensor.shape), tensor.stride()
    order, natural = dense_order(shape, strides), tuple(range(len(shape)))
    if order is not None:
        return order
    wide = [d for d in natural if shape[d] != 1]
    if not all(strides[d] for d in wide):
        return natural
    slowest = iter(sorted(wide, key=lambda d: -strides[d]))
    return tuple(d if shape[d] == 1 else next(slowest) for d in natural)


def kind_of(argument: Argument) -> tuple[Any, ...]:
    """Return what of an argument a kernel is for: which sizes are 0 or 1, not the sizes."""
    order = dense_order(argument.shape, argument.strides) or ()
    return argument.dtype, tuple(min(2, s) for s in argument.shape), order


def functional_of(op: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """Return the overload that returns what an in-place or out overload writes, or None."""
    space, _, name = op._schema.name.partition("::")
    if space != "aten":  # only there such names promise anything
        return None
    is_out = any(a.is_out for a in op._schema.arguments)
    if not is_out:
        name = _OF_OPERATORS.get(name) or name.removesuffix("_")
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return None
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments if not a.is_out]
    for overload in packet.overloads():
        candidate: torch._ops.OpOverload = getattr(packet, overload)
        if candidate is not op and not candidate._schema.is_mutable:
            found = [(a.name, str(a.type)) for a in candidate._schema.arguments]
            extra = [a for a in candidate._schema.arguments if (a.name, str(a.type)) not in wanted]
            if [f for f in found if f in wanted] == wanted and all(
                a.has_default_value() for a in extra
            ):
                return candidate
    return None
