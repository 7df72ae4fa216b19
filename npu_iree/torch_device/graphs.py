"""Graphs of `torch.compile` on "npu" tensors: made device-free, and run on the handles in them.

Inside a graph there is no "npu": regions run where the target is, host segments on the CPU. Only
the edge knows: which inputs are handles, and which results stay handles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from lowering.capture import CapturedGraph
from lowering.normalize import attribute
from lowering.region import memory_order
from lowering.signature import inverse
from lowering.sizes import size_hint
from npu_iree.array import DeviceArray
from npu_iree.border import smallest
from npu_iree.donation import Donated, refused
from npu_iree.errors import OptionError
from npu_iree.options import Options, as_dict
from npu_iree.torch_device import account
from npu_iree.torch_device.current import NAME, device, is_on_npu
from npu_iree.torch_device.donations import Donation, call_place
from npu_iree.torch_device.moves import read_in_order
from npu_iree.torch_device.put import to_device
from npu_iree.torch_device.storage import (
    copied,
    dense_strides,
    give_away,
    is_lazy,
    new_tensor,
    set_unread,
    unread,
)

aten = torch.ops.aten
_CPU = torch.device("cpu")


def options_on_npu(options: Mapping[str, Any] | None) -> Options:
    """Check the options of a graph that takes "npu" tensors: it runs where they are.

    Random numbers are the host's, as in eager mode on "npu", unless the user says otherwise.

    Raises:
        OptionError: an option is wrong, or the target is not the one behind "npu".
    """
    target = device().target.name
    parsed = Options.parse({"target": target, "rng": "host", **as_dict(options)})
    if parsed.target != target:
        raise OptionError(f'"npu" is {target}, so its tensors cannot go to {parsed.target!r}')
    return parsed


def is_any_on_npu(graph_module: fx.GraphModule) -> bool:
    """Say whether a graph computes with "npu" tensors."""
    return any(is_on_npu(node.meta.get("val")) for node in graph_module.graph.nodes)


def make_device_free(graph_module: fx.GraphModule) -> None:
    """Let a graph name no device but the CPU, in place.

    Before: %1 = full([4], 1, device=npu:0); %2 = device_put(%1, cpu)
    After:  %1 = full([4], 1, device=cpu); %2 = clone(%1)
    """
    for node in list(graph_module.graph.nodes):
        if node.op == "get_attr":
            value = attribute(graph_module, str(node.target))
            if isinstance(value, fx.GraphModule):  # the body of a loop, say
                make_device_free(value)
            if isinstance(value, torch.Tensor) and is_on_npu(value):
                with unset_fake_temporarily():  # AOTAutograd calls us inside its fake tensor mode
                    setattr(graph_module, str(node.target), value.cpu())
        if node.op != "call_function":
            continue
        if node.target is torch.ops.prims.device_put.default:
            node.target, node.args, node.kwargs = aten.clone.default, (node.args[0],), {}
        node.args = fx.node.map_aggregate(node.args, _off_npu)
        node.kwargs = fx.node.map_aggregate(node.kwargs, _off_npu)
    graph_module.recompile()


def _off_npu(value: Any) -> Any:
    return _CPU if isinstance(value, torch.device) and value.type == NAME else value


def placed(captured: CapturedGraph) -> CapturedGraph:
    """Say of a graph which inputs are handles, and which results stay so.

    What it writes to its inputs is a result, too, which `HandleRunner` gives them.
    """
    handles = frozenset(n for n in captured.inputs if is_on_npu(n.meta.get("val")))
    results = [o for o in captured.outputs if isinstance(o, fx.Node)]
    kept = frozenset(n for n in results if is_on_npu(n.meta.get("val")))
    if not handles and not kept:
        return captured
    make_device_free(captured.graph_module)  # capturing has made tensors like those of the graph
    return replace(captured, handles=handles, kept=kept, written=())


def eager_runner(captured: CapturedGraph) -> Callable[[list[Any]], list[Any]]:
    """Return what runs a graph with PyTorch's CPU kernels.

    It takes its arguments out of their list, as a `Runner` does, and waits for handles.
    """
    run = captured.eager()
    if not captured.handles:
        return run
    backs = [inverse(_order(n)) if n in captured.handles else None for n in captured.inputs]

    def run_on_host(args: list[Any]) -> list[Any]:
        arrays = [arg for arg in args if isinstance(arg, DeviceArray)]
        fetched = iter(device().gather(arrays))
        given = [
            next(fetched).permute(back) if back is not None else arg
            for arg, back in zip(args, backs, strict=True)
        ]
        args.clear()
        return run(given)

    return run_on_host


def _order(node: fx.Node) -> tuple[int, ...]:
    return memory_order(node.meta["val"])


class HandleRunner:
    """A runner for "npu" tensors: takes the handles out of them, and puts results into new ones."""

    def __init__(
        self,
        runner: Callable[[list[Any]], Sequence[Any]],
        captured: CapturedGraph,
        written: Sequence[fx.Node],
        donated: Donated,
        returned: int | None,
    ) -> None:
        """Make one.

        Args:
            runner: runs the graph on handles, which it takes out of their list.
            captured: the graph.
            written: the inputs that it writes to.
            donated: the inputs that a call gives away.
            returned: how many of the first results the user gets; None: all.
        """
        self._runner = runner
        self._donated = donated
        self._written = [captured.inputs.index(node) for node in written]
        self._orders = [_order(n) if n in captured.handles else None for n in captured.inputs]
        # What autograd saves of an argument is the argument: it sees whether somebody writes to it,
        # and whose gradient the gradient depends on.
        self._same = {
            i: captured.inputs.index(o)
            for i, o in enumerate(captured.outputs)
            if o in captured.handles and o not in written
        }
        self._outputs: list[tuple[tuple[int, ...], torch.dtype] | None] = [
            (_order(o), o.meta["val"].dtype)
            if isinstance(o, fx.Node) and o in captured.kept and i not in self._same
            else None
            for i, o in enumerate(captured.outputs)
        ]
        self._apart = _apart(captured, len(written), returned)

    def __call__(self, args: list[Any]) -> list[Any]:
        """Run the graph on arguments that are taken out of their list.

        Nothing waits but its host segments. What nobody else holds (tensors that are donated,
        activations saved for this backward pass) is freed when the last work that reads it ends.
        """
        donated = self._donated
        given = [
            arg if order is None else (_own if i in donated.reused else _read)(arg, order)
            for i, (arg, order) in enumerate(zip(args, self._orders, strict=True))
        ]
        same = {i: args[position] for i, position in self._same.items()}
        given_away = [given[i].hal_view.get_buffer() for i in donated.reused]
        written = [args[position] for position in self._written]
        if donated.names:
            self._give_away(args)
        args.clear()
        results = list(self._runner(given))
        for i in self._apart if not given_away else ():
            if isinstance(results[i], DeviceArray):  # else a host segment has made it
                results[i] = copied(results[i])
        values = [_wrapped(r, o) for r, o in zip(results, self._outputs, strict=True)]
        for i, argument in same.items():
            values[i] = argument
        if given_away:
            _mark_unread(values, results, given_away)
        count = len(values) - len(self._written)
        for argument, value in zip(written, values[count:], strict=True):
            if isinstance(value, torch.Tensor):
                argument.detach().copy_(value)
        return values[:count]

    def _give_away(self, args: Sequence[Any]) -> None:
        """Let the arguments that are donated hold nothing any more.

        Raises:
            OptionError: one shares its memory with another argument; nothing has been given away.
        """
        names, place = self._donated.names, call_place()
        storages = [a.untyped_storage()._cdata if is_on_npu(a) else None for a in args]
        for position, name in names.items():
            if storages.count(storages[position]) > 1:
                raise refused(name, "it shares its memory with another argument of the call")
        for position, name in names.items():
            give_away(args[position], Donation(name, self._donated.function, place))


def _apart(captured: CapturedGraph, writes: int, returned: int | None) -> Sequence[int]:
    """Say which results of a call get memory of their own, since they outlive larger ones.

    Such are losses and logits, if they are kept, and running statistics until the next step.
    """
    values = [o.meta["val"] if o in captured.kept else None for o in captured.outputs]
    sizes = [0 if v is None else v.element_size() * size_hint(v.numel()) for v in values]
    last = len(sizes) - writes
    lasting = (*range(last)[:returned], *range(last, len(sizes)))
    return smallest([(sizes[i], i) for i in lasting if sizes[i]], sum(sizes))


def _read(tensor: torch.Tensor, order: tuple[int, ...]) -> DeviceArray:
    """Return the bytes of a tensor, conjugated or negative if it is so lazily."""
    given = tensor.resolve_conj().resolve_neg() if is_lazy(tensor) else tensor
    return read_in_order(given, order)


def _own(tensor: torch.Tensor, order: tuple[int, ...]) -> DeviceArray:
    """Return the bytes of a tensor for a region that overwrites them: nobody else has them."""
    array = None if is_lazy(tensor) else unread(tensor, order)
    return copied(_read(tensor, order)) if array is None else array


def _mark_unread(values: Sequence[Any], results: Sequence[Any], given_away: Sequence[Any]) -> None:
    """Mark the results that are the memory of an input which was overwritten, and no other is."""
    pairs = zip(values, results, strict=True)
    made = [(value, r, r.hal_view.get_buffer()) for value, r in pairs if isinstance(r, DeviceArray)]
    buffers = [buffer for _, _, buffer in made]
    for value, handle, buffer in made:
        if buffer in given_away and buffers.count(buffer) == 1:
            set_unread(value, handle)


def _wrapped(result: Any, output: tuple[tuple[int, ...], torch.dtype] | None) -> Any:
    if output is None:
        return result
    if isinstance(result, torch.Tensor):  # a host segment made it
        return to_device(result, "a result of the host")
    assert isinstance(result, DeviceArray)
    order, dtype = output
    shape = [0] * len(order)
    for place, d in enumerate(order):
        shape[d] = result.shape[place]
    array = account.keep(result, result.ready.work.name)
    return new_tensor(tuple(shape), dense_strides(shape, order), dtype, array)
