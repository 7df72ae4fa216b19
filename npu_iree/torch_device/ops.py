"""Eager ops on "npu": each call finds its kernel by dtypes, shapes and constants, and is submitted.

The way of a call that has been made before: its key is looked up, the handles of its tensors are
put together, the kernel is submitted, and its results are wrapped. Nothing waits. A call that has
no kernel runs as PyTorch's CPU kernel (`host`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from lowering.partition import DRAWS_RANDOM_NUMBERS
from lowering.unfit import what_is_wrong
from npu_iree.array import DeviceArray
from npu_iree.torch_device.calls import (
    Computation,
    Results,
    Template,
    Written,
    argument_of,
    functional_of,
    half_scalars,
    kind_of,
    number_dtypes,
    order_for_reading,
    scan,
)
from npu_iree.torch_device.current import NAME, different_devices, frames, index_of, is_on_npu
from npu_iree.torch_device.forms import FORMS, STATIC, Form, Probe, Travels, may_be_tensor
from npu_iree.torch_device.host import run_on_host
from npu_iree.torch_device.kept import Kept
from npu_iree.torch_device.kernels import Bound, NoKernelError, family
from npu_iree.torch_device.launches import launched
from npu_iree.torch_device.moves import invoke, order_for_writing, read_in_order, write
from npu_iree.torch_device.overlaps import overlaps_of, refuse_shared
from npu_iree.torch_device.put import put_dense
from npu_iree.torch_device.scalars import scalar
from npu_iree.torch_device.storage import (
    dense_order,
    handle_of,
    is_lazy,
    new_tensor,
    resize,
    shaped,
)

OpOverload = torch._ops.OpOverload
_INDICES = "List[Optional[Tensor]]"  # the type of indices: they may be on the CPU, too
_KEPT_CALLS = 4096  # of one op; a call that is forgotten finds its kernel again
_NONE = Results((), False)


class EagerOp:
    """One op overload as a kernel of the dispatch key of "npu"."""

    def __init__(self, op: OpOverload) -> None:
        self.op = op
        self._calls: Kept[tuple[Any, ...], _Ready] = Kept(_KEPT_CALLS)
        arguments = op._schema.arguments
        self._outs = [a.name for a in arguments if a.is_out]
        self._names = [a.name for a in arguments]
        writes = [a for a in arguments if a.alias_info is not None and a.alias_info.is_write]
        self._is_in_place = bool(writes) and not self._outs
        self._writes_self = len(writes) == 1 and writes[0] is arguments[0]
        # Others get what is lazily conjugated, or negative, computed by PyTorch.
        self._takes_lazy = any(
            torch._C._dispatch_has_kernel_for_dispatch_key(op._name, key)
            for key in ("Conjugate", "Negative")
        )
        self.__name__ = str(op)

    @cached_property
    def _functional(self) -> OpOverload | None:
        """The overload that computes the same and writes to nothing."""
        if not self.op._schema.returns:
            return None
        if not self._outs and not self._is_in_place:
            return None if self._is_view else self.op
        if self._is_in_place and not self._writes_self:
            return None
        return functional_of(self.op)

    @cached_property
    def _is_view(self) -> bool:
        return any(r.alias_info is not None for r in self.op._schema.returns)

    @cached_property
    def _is_pointwise(self) -> bool:
        """As its functional form says: not all others have the tag."""
        functional = self._functional
        return functional is not None and torch.Tag.pointwise in functional.tags

    @cached_property
    def _form(self) -> Form:
        functional = self._functional
        return FORMS.get(functional) or Form(functional or self.op)

    @cached_property
    def _is_number(self) -> dict[str, Travels | None]:
        form, arguments = self._form, self.op._schema.arguments
        of_tensors = [a.name for a in arguments if str(a.type) in ("Tensor", "Optional[Tensor]")]
        numbers = dict.fromkeys(of_tensors, may_be_tensor) | dict.fromkeys(
            form.numbers, form.travels
        )
        return {a.name: numbers.get(a.name) for a in arguments}

    @cached_property
    def _are_numbers(self) -> list[Travels | None]:
        return [self._is_number[name] for name in self._names]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call."""
        if self._takes_lazy and any(map(is_lazy, (*args, *kwargs.values()))):
            return run_on_host(
                self.op, args, kwargs, "an argument is lazily conjugated or negative"
            )
        key: list[Any] = [torch.get_default_dtype()]  # of what integers become
        leaves: list[Any] = []
        outs = self._outs
        scan(args, self._are_numbers, key, leaves)
        for name, value in kwargs.items():
            key.append(name)
            if name in outs:
                key += (value.dtype, value.shape, value.stride(), value.storage_offset())
                key.append(value.is_cpu)
            else:
                scan((value,), (self._is_number[name],), key, leaves)
        try:
            ready = self._calls.get(tuple(key))
        except TypeError:  # a constant without a hash
            return run_on_host(self.op, args, kwargs, "an argument of it cannot be a constant")
        if ready is None:
            ready = self._calls[tuple(key)] = self._prepare(leaves, args, kwargs)
        if ready.bound is None:
            return run_on_host(self.op, args, kwargs, ready.reason)
        return ready.run(leaves, args, [kwargs[name] for name in outs])

    # Of what it calls, Dynamo would compile whatever has tensors, between graphs of a function.
    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def _prepare(
        self, leaves: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> _Ready:
        """Find or make the kernel of a call that is made for the first time."""
        if (place := kwargs.get("device")) is not None and place.type == NAME:
            index_of(place)
        targets = self._targets(args, kwargs)
        for target in targets:
            if isinstance(target, torch.Tensor) and not is_on_npu(target):
                _refuse_devices([target, *leaves], self.op)
        if self._functional is None:
            return _Ready(reason=_no_kernel(self.op))
        given = [*targets, *leaves]
        if reason := self._why_host(given, args) or what_is_wrong(self._functional, args, kwargs):
            return _Ready(reason=reason)
        if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
            return _Ready(reason="")  # it is made from nothing: nothing is lost
        try:
            return self._bind(leaves, args, kwargs)
        except NoKernelError as error:
            return _Ready(reason=str(error))

    def _why_host(self, given: Sequence[Any], args: Sequence[Any]) -> str:
        if torch.Tag.nondeterministic_seeded in self.op.tags:
            return f"it {DRAWS_RANDOM_NUMBERS}"
        indices = {id(index) for index in self._indices(args)}
        for value in given:
            if isinstance(value, torch.Tensor):
                if not is_on_npu(value) and value.dim() and id(value) not in indices:
                    _refuse_devices(given, self.op)
                if value.layout is not torch.strided:
                    return f"no device buffer holds the layout {value.layout}"
        return ""

    def _indices(self, args: Sequence[Any]) -> Iterator[Any]:
        for argument, value in zip(self.op._schema.arguments, args, strict=False):
            if str(argument.type) == _INDICES:
                yield from value

    def _bind(
        self, leaves: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> _Ready:
        targets = self._targets(args, kwargs)
        overlaps = overlaps_of(str(self.op), targets, leaves)
        template = self._template(args, kwargs)
        widened = half_scalars(leaves) if self._is_pointwise else frozenset()
        dtypes = number_dtypes(
            leaves, keeps_digits=self._form.keeps_digits, is_widened=bool(widened)
        )
        arguments = [argument_of(leaf, dtypes) for leaf in leaves]
        written: Written = tuple(
            (t.dtype, order_for_writing(t) if t.numel() else None) for t in targets
        )
        computation = Computation(
            self._form.function, template, written, casts=self._is_pointwise, widened=widened
        )
        kinds = tuple(map(kind_of, arguments))
        default = torch.get_default_dtype()
        key = (self.op, default, template.constants(leaves), kinds, written)
        is_dynamic = STATIC.match(str(self.op)) is None
        kernels = family(key, str(self.op))
        bound = kernels.bind(computation, arguments, is_dynamic)
        assert kernels.results is not None
        _check_targets(targets, bound, self._is_in_place)
        probe = partial(self._form.probe, leaves, bound.outputs[0])
        return _Ready(
            bound=bound,
            sources=tuple(
                _source(taken, stored, leaves, dtypes, probe)
                for taken, stored in zip(bound.takes, bound.stored, strict=True)
            ),
            results=kernels.results,
            in_place=self._is_in_place,
            is_out=bool(self._outs),
            write_orders=tuple(order for _, order in written),
            overlaps=overlaps,
        )

    def _targets(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return what a call writes its results to."""
        return [args[0]] if self._is_in_place else [kwargs[name] for name in self._outs]

    def _template(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Template:
        is_number, outs = self._is_number, self._outs
        return Template.of(
            [(v, is_number[name]) for name, v in zip(self._names, args, strict=False)],
            [(name, v, is_number[name]) for name, v in kwargs.items() if name not in outs],
        )


def _check_targets(targets: Sequence[torch.Tensor], bound: Bound, is_in_place: bool) -> None:
    """Check that results can be written to what they are written to.

    Raises:
        NoKernelError: they cannot, by a kernel.
    """
    for target, output in zip(targets, bound.outputs, strict=False):
        if tuple(target.shape) == output.shape:
            continue
        if is_in_place:
            raise NoKernelError("its result has another shape than what it is written to")
        if target.numel():
            raise NoKernelError("what it is written to is resized, and not empty")


@dataclass(frozen=True)
class _Ready:
    """What is known of a call that has been made before."""

    bound: Bound | None = None
    reason: str = ""
    sources: tuple[_Source, ...] = ()
    results: Results = _NONE
    in_place: bool = False
    is_out: bool = False
    write_orders: tuple[Any, ...] = ()
    overlaps: tuple[tuple[int, int], ...] = ()

    def run(self, leaves: Sequence[Any], args: Sequence[Any], outs: Sequence[torch.Tensor]) -> Any:
        """Submit the call."""
        bound = self.bound
        assert bound is not None
        for place, leaf in self.overlaps:
            refuse_shared((outs or args)[place], leaves[leaf])
        handles = launched(invoke(bound, [_take(s, leaves) for s in self.sources]), frames())
        if self.in_place:
            write(args[0], handles[0], self.write_orders[0])
            return args[0]
        if self.is_out:
            return self._write(bound, handles, outs)
        tensors = [
            new_tensor(o.shape, o.strides, o.dtype, array)
            for o, array in zip(bound.outputs, handles, strict=True)
        ]
        if not self.results.is_list:
            return tensors[0]
        rest = iter(tensors)
        return [next(rest) if kept else None for kept in self.results.kept]

    def _write(
        self, bound: Bound, handles: Sequence[DeviceArray], outs: Sequence[torch.Tensor]
    ) -> Any:
        for out, array, output, order in zip(
            outs, handles, bound.outputs, self.write_orders, strict=True
        ):
            if tuple(out.shape) != output.shape:
                resize(out, output.shape, output.strides)
                order = order_for_writing(out)
            write(out, array, order)
        return outs[0] if len(outs) == 1 else tuple(outs)


_DIRECT, _READ, _PUT, _NUMBER, _VALUE = range(5)
# How one argument of a kernel is found: the way, the leaf, its shape in memory, and what else is
# known: its dtype, order or value.
_Source = tuple[int, int, tuple[int, ...], Any]


def _source(
    taken: Any,
    stored: tuple[int, ...] | None,
    leaves: Sequence[Any],
    dtypes: Mapping[type, torch.dtype],
    probe: Callable[[int], Probe | None],
) -> _Source:
    """Decide how an argument of a kernel is found in the calls of one key."""
    if stored is None:
        return _VALUE, 0, (), taken
    leaf = leaves[taken]
    if not isinstance(leaf, torch.Tensor):
        return _NUMBER, taken, (), (dtypes[type(leaf)], probe(taken))
    order = order_for_reading(leaf)
    if not is_on_npu(leaf):
        return _PUT, taken, stored, order
    is_dense = dense_order(tuple(leaf.shape), leaf.stride()) is not None
    if is_dense and not leaf.storage_offset():
        return _DIRECT, taken, stored, leaf.dtype
    return _READ, taken, stored, order


def _take(source: _Source, leaves: Sequence[Any]) -> Any:
    """Return an argument of a kernel: a handle, or a number that it takes by value."""
    way, index, shape, known = source
    if way == _DIRECT:
        return shaped(handle_of(leaves[index]), shape, known)
    if way == _NUMBER:
        return scalar(leaves[index], *known)
    if way == _VALUE:
        return known
    if way == _PUT:
        return _put(leaves[index], known)
    leaf = leaves[index]
    return shaped(read_in_order(leaf, known), shape, leaf.dtype)


def _put(tensor: torch.Tensor, order: tuple[int, ...]) -> DeviceArray:
    stored = tensor.detach().permute(order)
    return put_dense(
        stored.clone(memory_format=torch.contiguous_format), "a CPU argument", is_ours=True
    )


# What to take instead of an op that only changes its arguments, by how its name begins.
_INSTEAD = {
    "aten._fused_": "; let the optimizer take foreach=True instead of fused=True",
    "aten._amp_": "; bfloat16 needs no GradScaler",
}


def _no_kernel(op: OpOverload) -> str:
    if torch.Tag.nondeterministic_seeded in op.tags:
        return f"it {DRAWS_RANDOM_NUMBERS}"
    if not op._schema.is_mutable:
        if not op._schema.returns:
            return "it gives nothing"
        return "it gives a view of its argument, and kernels give values"
    instead = (hint for begin, hint in _INSTEAD.items() if str(op).startswith(begin))
    return f"it changes its arguments, and kernels only give results{next(instead, '')}"


def _refuse_devices(leaves: Sequence[Any], op: OpOverload) -> None:
    """Raise what PyTorch raises for tensors of several devices."""
    found = list(dict.fromkeys(t.device for t in leaves if isinstance(t, torch.Tensor)))
    if len(found) > 1:
        raise different_devices(found, op)
