"""Eager ops on "npu": each call finds its kernel by dtypes, shapes and constants, and is submitted.

The way of a call that has been made before: its key is looked up, the handles of its tensors are
put together, the kernel is submitted, and its results are wrapped. Nothing waits. A call that has
no kernel runs as PyTorch's CPU kernel (`host`).
"""

from __future__ import annotations

import itertools
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from lowering.eager import Argument
from npu_iree.array import DeviceArray
from npu_iree.torch_device.current import frames
from npu_iree.torch_device.forms import FORMS, STATIC, Form
from npu_iree.torch_device.host import run_on_host
from npu_iree.torch_device.kernels import Bound, NoKernelError, family
from npu_iree.torch_device.launches import launched
from npu_iree.torch_device.moves import invoke, order_for_writing, read, write
from npu_iree.torch_device.put import put_dense
from npu_iree.torch_device.storage import (
    dense_order,
    dense_strides,
    handle_of,
    new_tensor,
    resize,
    shaped,
)

OpOverload = torch._ops.OpOverload
_INDEXING = re.compile(r"aten\._?(unsafe_)?index")  # takes indices that are on the CPU, too
_SCALARS: OrderedDict[tuple[str, torch.dtype], DeviceArray] = OrderedDict()
_KEPT_SCALARS = 4096


@dataclass(frozen=True)
class _Leaf:
    """The place of a tensor in a call's arguments."""

    index: int


def _scan(value: Any, is_number: bool, key: list[Any], leaves: list[Any]) -> None:
    """Take one argument apart: tensors, and numbers that travel as such, are leaves."""
    if isinstance(value, torch.Tensor):
        key += (value.dtype, value.shape, value.stride(), value.storage_offset(), value.is_cpu)
        leaves.append(value)
        return
    kind = type(value)
    key.append(kind)
    if kind is list or kind is tuple:
        key.append(len(value))
        for item in value:
            _scan(item, False, key, leaves)
    elif is_number and _travels(value):
        leaves.append(value)
    else:
        key.append(value if kind is not float else repr(value))


def _template(value: Any, is_number: bool, count: Iterator[int]) -> Any:
    """Return an argument with `_Leaf` in the place of its leaves, numbered as `_scan` does."""
    if isinstance(value, torch.Tensor):
        return _Leaf(next(count))
    if isinstance(value, (list, tuple)):
        return [_template(item, False, count) for item in value]
    return _Leaf(next(count)) if is_number and _travels(value) else value


def _travels(value: Any) -> bool:
    """Say whether a number can be a tensor of no dimension."""
    kind = type(value)
    return kind is float or (kind is int and -(1 << 63) <= value < 1 << 63)


class EagerOp:
    """One op overload as a kernel of the dispatch key of "npu"."""

    def __init__(self, op: OpOverload) -> None:
        self.op = op
        self._calls: dict[tuple[Any, ...], _Ready] = {}
        arguments = op._schema.arguments
        self._outs = [a.name for a in arguments if a.is_out]
        self._names = [a.name for a in arguments]
        writes = [a for a in arguments if a.alias_info is not None and a.alias_info.is_write]
        self._is_in_place = bool(writes) and not self._outs
        self._writes_self = len(writes) == 1 and writes[0] is arguments[0]
        self.__name__ = str(op)

    @cached_property
    def _functional(self) -> OpOverload | None:
        """The overload that computes the same and writes to nothing."""
        if not self._outs and not self._is_in_place:
            return None if self._is_view else self.op
        if self._is_in_place and not self._writes_self:
            return None
        return functional_of(self.op)

    @cached_property
    def _is_view(self) -> bool:
        return any(r.alias_info is not None for r in self.op._schema.returns)

    @cached_property
    def _form(self) -> Form:
        functional = self._functional
        return FORMS.get(functional) or Form(functional or self.op)

    @cached_property
    def _is_number(self) -> dict[str, bool]:
        numbers = self._form.numbers
        return {
            a.name: a.name in numbers or str(a.type) in ("Tensor", "Optional[Tensor]")
            for a in self.op._schema.arguments
        }

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call."""
        key: list[Any] = []
        leaves: list[Any] = []
        is_number, outs = self._is_number, self._outs
        for name, value in zip(self._names, args, strict=False):
            _scan(value, is_number[name], key, leaves)
        for name, value in kwargs.items():
            key.append(name)
            if name in outs:
                key += (value.dtype, value.shape, value.stride(), value.storage_offset())
            else:
                _scan(value, is_number[name], key, leaves)
        try:
            ready = self._calls.get(tuple(key))
        except TypeError:  # a constant without a hash
            return run_on_host(self.op, args, kwargs, "an argument of it cannot be a constant")
        if ready is None:
            ready = self._calls[tuple(key)] = self._prepare(leaves, args, kwargs)
        if ready.bound is None:
            return run_on_host(self.op, args, kwargs, ready.reason)
        return ready.run(leaves, args, [kwargs[name] for name in outs])

    def _prepare(
        self, leaves: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> _Ready:
        """Find or make the kernel of a call that is made for the first time."""
        if self._functional is None:
            return _Ready(reason=_no_kernel(self.op))
        if reason := self._why_host(leaves):
            return _Ready(reason=reason)
        if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
            return _Ready(reason="")  # it is made from nothing: nothing is lost
        try:
            return self._bind(leaves, args, kwargs)
        except NoKernelError as error:
            return _Ready(reason=str(error))

    def _why_host(self, leaves: Sequence[Any]) -> str:
        if torch.Tag.nondeterministic_seeded in self.op.tags:
            return "it draws from PyTorch's random generator, whose state is on the host"
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                if leaf.device.type != "npu" and leaf.dim() and not _INDEXING.match(str(self.op)):
                    _refuse_devices(leaves, self.op)
                if leaf.layout is not torch.strided:
                    return f"no device buffer holds the layout {leaf.layout}"
        return ""

    def _bind(
        self,
        leaves: Sequence[Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> _Ready:
        count, is_number = itertools.count(), self._is_number
        template = [
            _template(value, is_number[name], count)
            for name, value in zip(self._names, args, strict=False)
        ]
        named = {
            name: _template(value, is_number[name], count)
            for name, value in kwargs.items()
            if name not in self._outs
        }
        dtypes = _number_dtypes(leaves)
        arguments = [_argument(leaf, dtypes) for leaf in leaves]
        targets = [args[0]] if self._is_in_place else [kwargs[n] for n in self._outs]
        layouts = [_layout(t) for t in targets]
        kinds = [t.dtype for t in targets]  # the closure holds no tensors: it lives as traces do
        kept: list[bool] = []
        is_list: list[bool] = []
        form, in_place = self._form.function, self._is_in_place

        def function(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            values = form(*_filled(template, tensors), **_filled(named, tensors))
            is_list[:] = [isinstance(values, (list, tuple))]
            results = list(values) if is_list[0] else [values]
            kept[:] = [r is not None for r in results]
            results = [r for r in results if r is not None]
            if not kinds:
                return results
            return [
                _as_target(r, dtype, layout)
                for r, dtype, layout in zip(results, kinds, layouts, strict=True)
            ]

        constants = _constants(template, named, leaves)
        key = (
            self.op,
            constants,
            tuple(_kind(a) for a in arguments),
            tuple(zip(kinds, layouts, strict=True)),
        )
        is_dynamic = STATIC.match(str(self.op)) is None
        kernels = family(key, str(self.op))
        bound = kernels.bind(function, arguments, is_dynamic)
        if kept:
            _SHAPES_OF_RESULTS[key] = (tuple(kept), is_list[0])
        result_kept, result_list = _SHAPES_OF_RESULTS[key]
        for target, output in zip(targets, bound.outputs, strict=False):
            if in_place and tuple(target.shape) != output.shape:
                raise NoKernelError("its result has another shape than what it is written to")
            natural = tuple(range(target.dim()))
            if tuple(target.shape) != output.shape and order_for_writing(target) != natural:
                raise NoKernelError("what it is written to is resized, and not contiguous")
        return _Ready(
            bound=bound,
            sources=tuple(
                _source(taken, stored, leaves, dtypes)
                for taken, stored in zip(bound.takes, bound.stored, strict=True)
            ),
            kept=result_kept,
            is_list=result_list,
            in_place=in_place,
            is_out=bool(self._outs),
            write_orders=tuple(layouts),
        )


@dataclass(frozen=True)
class _Ready:
    """What is known of a call that has been made before."""

    bound: Bound | None = None
    reason: str = ""
    sources: tuple[_Source, ...] = ()
    kept: tuple[bool, ...] = ()
    is_list: bool = False
    in_place: bool = False
    is_out: bool = False
    write_orders: tuple[Any, ...] = ()

    def run(self, leaves: Sequence[Any], args: Sequence[Any], outs: Sequence[torch.Tensor]) -> Any:
        """Submit the call."""
        bound = self.bound
        assert bound is not None
        results = launched(invoke(bound, [_take(s, leaves) for s in self.sources]), frames())
        if self.in_place:
            write(args[0], results[0], self.write_orders[0])
            return args[0]
        if self.is_out:
            for out, array, output, order in zip(
                outs, results, bound.outputs, self.write_orders, strict=True
            ):
                if tuple(out.shape) != output.shape:
                    _resize_out(out, output.shape)
                    write(out, array, tuple(range(len(output.shape))))
                else:
                    write(out, array, order)
            return outs[0] if len(outs) == 1 else tuple(outs)
        tensors = iter(
            [
                new_tensor(o.shape, o.strides, o.dtype, array)
                for o, array in zip(bound.outputs, results, strict=True)
            ]
        )
        values = [next(tensors) if kept else None for kept in self.kept]
        return values if self.is_list else values[0]


_SHAPES_OF_RESULTS: dict[tuple[Any, ...], tuple[tuple[bool, ...], bool]] = {}


def functional_of(op: OpOverload) -> OpOverload | None:
    """Return the overload that returns what an in-place or out overload writes, or None."""
    name = op._schema.name.partition("::")[2]
    is_out = any(a.is_out for a in op._schema.arguments)
    packet = getattr(torch.ops.aten, name if is_out else name.removesuffix("_"), None)
    if packet is None:
        return None
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments if not a.is_out]
    for overload in packet.overloads():
        candidate: OpOverload = getattr(packet, overload)
        if candidate is not op and not candidate._schema.is_mutable:
            found = [(a.name, str(a.type)) for a in candidate._schema.arguments]
            extra = [a for a in candidate._schema.arguments if (a.name, str(a.type)) not in wanted]
            if [f for f in found if f in wanted] == wanted and all(
                a.has_default_value() for a in extra
            ):
                return candidate
    return None


def scalar(value: float, dtype: torch.dtype) -> DeviceArray:
    """Return a number on the device; numbers that were used before are there already."""
    key = (repr(value), dtype)
    array = _SCALARS.get(key)
    if array is None:
        number = torch.tensor(value, dtype=dtype)
        array = put_dense(number, "a number", is_ours=True, is_kept=True)
        _SCALARS[key] = array
        if len(_SCALARS) > _KEPT_SCALARS:
            _SCALARS.popitem(last=False)
    return array


_DIRECT, _READ, _PUT, _NUMBER, _VALUE = range(5)
# How one argument of a kernel is found: the way, the leaf, its shape in memory, its dtype or value.
_Source = tuple[int, int, tuple[int, ...], Any]


def _source(
    taken: Any,
    stored: tuple[int, ...] | None,
    leaves: Sequence[Any],
    dtypes: Mapping[type, torch.dtype],
) -> _Source:
    """Decide how an argument of a kernel is found in the calls of one key."""
    if stored is None:
        return _VALUE, 0, (), taken
    leaf = leaves[taken]
    if not isinstance(leaf, torch.Tensor):
        return _NUMBER, taken, (), dtypes[type(leaf)]
    if leaf.device.type != "npu":
        return _PUT, taken, stored, dense_order(tuple(leaf.shape), leaf.stride())
    is_dense = dense_order(tuple(leaf.shape), leaf.stride()) is not None
    way = _DIRECT if is_dense and not leaf.storage_offset() else _READ
    return way, taken, stored, leaf.dtype


def _take(source: _Source, leaves: Sequence[Any]) -> Any:
    """Return an argument of a kernel: a handle, or a number that it takes by value."""
    way, index, shape, known = source
    if way == _DIRECT:
        return shaped(handle_of(leaves[index]), shape, known)
    if way == _NUMBER:
        return scalar(leaves[index], known)
    if way == _VALUE:
        return known
    if way == _PUT:
        return _put(leaves[index], known)
    return shaped(read(leaves[index]), shape, known)


def _put(tensor: torch.Tensor, order: tuple[int, ...] | None) -> DeviceArray:
    stored = tensor.detach().permute(order or tuple(range(tensor.dim())))
    return put_dense(
        stored.clone(memory_format=torch.contiguous_format), "a CPU argument", is_ours=True
    )


def _filled(template: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(template, _Leaf):
        return tensors[template.index]
    if isinstance(template, list):
        return [_filled(v, tensors) for v in template]
    if isinstance(template, dict):
        return {k: _filled(v, tensors) for k, v in template.items()}
    return _CPU if isinstance(template, torch.device) else template


_CPU = torch.device("cpu")


def _constants(template: Any, named: Any, leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Return what of a call is compiled into its kernel."""

    def text(value: Any) -> Any:
        if isinstance(value, _Leaf):
            leaf = leaves[value.index]
            return ("leaf", value.index, "tensor" if isinstance(leaf, torch.Tensor) else type(leaf))
        if isinstance(value, list):
            return tuple(text(v) for v in value)
        if isinstance(value, dict):
            return tuple((k, text(v)) for k, v in value.items())
        return (type(value), repr(value))

    return (text(list(template)), text(dict(named)))


def _number_dtypes(leaves: Sequence[Any]) -> dict[type, torch.dtype]:
    """Return the dtypes that Python's numbers get, so that they promote as Python's numbers do."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    floats = [t for t in tensors if t.dtype.is_floating_point or t.dtype.is_complex]
    integers = [
        t
        for t in tensors
        if not (t.dtype.is_floating_point or t.dtype.is_complex or t.dtype is torch.bool)
    ]
    has_dim = any(t.dim() for t in tensors)
    real = torch.get_default_dtype()
    if floats:
        wide = any(t.dtype in (torch.float64, torch.complex128) for t in floats)
        real = torch.float64 if wide else torch.float32
        if not has_dim:
            real = max((t.dtype.to_real() for t in floats), key=lambda d: d.itemsize)
    whole = torch.int64
    if integers and not has_dim and not floats:
        whole = max((t.dtype for t in integers), key=lambda d: d.itemsize)
    return {float: real, int: whole}


def _argument(leaf: Any, dtypes: Mapping[type, torch.dtype]) -> Argument:
    if not isinstance(leaf, torch.Tensor):
        return Argument(dtypes[type(leaf)], (), ())
    shape = tuple(leaf.shape)
    order = dense_order(shape, leaf.stride()) or tuple(range(len(shape)))
    return Argument(leaf.dtype, shape, dense_strides(shape, order))


def _order(argument: Argument) -> tuple[int, ...]:
    return dense_order(argument.shape, argument.strides) or ()


def _kind(argument: Argument) -> tuple[Any, ...]:
    """Return what of an argument a kernel is for: which sizes are 0 or 1, not the sizes."""
    return argument.dtype, tuple(min(2, s) for s in argument.shape), _order(argument)


def _layout(target: torch.Tensor) -> tuple[int, ...]:
    return order_for_writing(target)


def _as_target(result: torch.Tensor, dtype: torch.dtype, order: tuple[int, ...]) -> torch.Tensor:
    """Give a result the dtype and memory order of what it is written to."""
    if not torch.can_cast(result.dtype, dtype):
        raise TypeError(f"{result.dtype} cannot be cast to {dtype}")
    if result.dtype != dtype:
        result = result.to(dtype)
    if len(order) != result.dim():  # an `out` that is resized
        order = tuple(range(result.dim()))
    back = [order.index(d) for d in range(len(order))]
    return result.permute(order).contiguous().permute(back)


def _resize_out(out: torch.Tensor, shape: tuple[int, ...]) -> None:
    resize(out, shape, dense_strides(shape, range(len(shape))))


def _no_kernel(op: OpOverload) -> str:
    if torch.Tag.nondeterministic_seeded in op.tags:
        return "it draws from PyTorch's random generator, whose state is on the host"
    return "it has no form that writes to nothing"


def _refuse_devices(leaves: Sequence[Any], op: OpOverload) -> None:
    """Raise what PyTorch raises for tensors of several devices."""
    found = list(dict.fromkeys(str(t.device) for t in leaves if isinstance(t, torch.Tensor)))
    if len(found) > 1:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{found[0]} and {found[1]}! (when checking the arguments of {op})"
        )
