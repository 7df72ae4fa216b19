"""Runs a plan: puts, invokes, gathers, host segments; waits only where the plan gathers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._library.utils import is_builtin
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from lowering.abi import ENTRY
from lowering.dtypes import DTYPES
from lowering.effort import Effort, is_static
from lowering.host import extract_host
from lowering.nodes import SIZE_OPS
from lowering.plan import Free, Gather, Host, Invoke, Plan, Put, Scalar, Step, Value, Write
from lowering.region import Region, memory_order
from lowering.signature import TensorSpec
from lowering.source import user_line
from npu_iree.array import DeviceArray
from npu_iree.border import Crossing, Import, fetch, put_in_place, write_back
from npu_iree.device import Device
from npu_iree.empty_sizes import is_empty, may_be_empty, run_on_host
from npu_iree.errors import DeviceError, InternalError
from npu_iree.executable import Executable
from npu_iree.function import INLINE_EFFORT
from npu_iree.round_trip import RoundTrip, RunStep, find_round_trip
from npu_iree.weights import Weights


class Runner:
    """A plan with its executables: call it like the graph.

    Arguments are CPU tensors, numbers, or (from code that keeps handles) `DeviceArray`s; results
    are CPU tensors and constants, and handles where the plan keeps them on the device. Thread-safe.

    Attributes:
        plan: what is run.
        executables: the loaded regions, by name.
    """

    def __init__(
        self,
        plan: Plan,
        device: Device,
        executables: dict[str, Executable],
        constants: dict[str, torch.Tensor],
    ) -> None:
        self.plan = plan
        self.executables = executables
        self._device = device
        self._constants = constants
        names = plan.names
        self._index = {name: i for i, name in enumerate(names)}
        self._crossings = self._find_crossings()
        self._targets = self._find_targets()
        self._weights = Weights(plan, device, executables, constants)
        self._imports: dict[str, Import] = {}
        self._steps = self._prepare_all()
        self._behind = [
            constants[name] if name in plan.constants else None
            for name in names[len(plan.inputs) :]
        ]
        self._results = [
            (self._index[o.name], o.name in plan.kept) if isinstance(o, Value) else (-1, o)
            for o in plan.outputs
        ]

    @property
    def first_weight(self) -> int | None:
        """The position of the first argument that is bound; None if none is."""
        return min(self._weights.positions, default=None)

    def again(self) -> Runner:
        """Load the same once more, with nothing bound yet."""
        executables = {n: Executable(self._device, e.artifact) for n, e in self.executables.items()}
        return Runner(self.plan, self._device, executables, self._constants)

    def unbind(self) -> None:
        """Let go of the weights, while no call is under way; the next one binds its own."""
        self._weights.unbind()

    def __call__(self, *args: Any) -> list[Any]:
        """Run the plan once.

        Raises:
            DeviceError: device work failed; names the region, its ops and the user's lines.
            HostCopyError: a `copy_budget` forbids a copy or wait.
        """
        return self.run(list(args))

    def run(self, args: list[Any]) -> list[Any]:
        """Run the plan once on arguments that are taken out of their list.

        A handle that nobody else holds is freed after the last step that reads it.
        """
        self._device.refuse_child()
        if len(args) != len(self.plan.inputs):
            raise InternalError(f"the graph takes {len(self.plan.inputs)} inputs, not {len(args)}")
        host = [*args, *self._behind]
        handles: list[Any] = [None] * len(host)
        for i, arg in enumerate(args):
            if isinstance(arg, DeviceArray):
                host[i], handles[i] = None, arg
        arg = None  # or it would hold the last of them
        args.clear()
        imported: list[torch.Tensor] = []
        try:
            for step in self._steps:
                step(host, handles, imported)
        except BaseException:
            self._settle(handles)
            raise
        return [
            value if i < 0 else handles[i] if value and handles[i] is not None else host[i]
            for i, value in self._results
        ]

    def _find_crossings(self) -> dict[str, Crossing]:
        found = {}
        for region in self.plan.regions.values():
            nodes = (*region.inputs, *region.outputs)
            specs = (*region.signature.inputs, *region.signature.outputs)
            for node, spec in zip(nodes, specs, strict=True):
                if isinstance(spec, TensorSpec):
                    found[node.name] = Crossing.of(node.name, spec.order, user_line(node).where)
        for node in self.plan.edges:
            order = memory_order(node.meta["val"])
            found.setdefault(node.name, Crossing.of(node.name, order, user_line(node).where))
        return found

    def _find_targets(self) -> dict[str, int]:
        """Find the values that are written to arguments which regions are given."""
        given = {r.inputs[i].name for r in self.plan.regions.values() for i in r.given}
        pairs = [
            pair
            for step in self.plan.steps
            if isinstance(step, Write)
            for pair in zip(step.inputs, step.values, strict=True)
        ]
        return {value: self._index[name] for name, value in pairs if name in given}

    def _prepare_all(self) -> list[RunStep]:
        """Prepare the steps; what is bound comes first, or goes with a round trip that does."""
        plan = self.plan
        steps = [self._prepare(step) for step in plan.steps]
        last = max((i for i, s in enumerate(plan.steps) if isinstance(s, Invoke)), default=-1)
        if (span := self._find_round_trip()) is None:
            return self._with_weights(steps, last)
        if span.start:
            steps[span] = [self._round_trip_step(plan.steps[span], None, steps[span])]
            return self._with_weights(steps, span.start)
        weights = self._weights if self._weights.are_any else None
        one_by_one = self._with_weights(steps[span], last)
        steps[span] = [self._round_trip_step(plan.steps[span], weights, one_by_one)]
        return steps

    def _with_weights(self, steps: Sequence[RunStep], last: int) -> list[RunStep]:
        """Make one step of the look at the weights, if there are any, and of all that reads them.

        Args:
            steps: all of them.
            last: which of them is the last that submits anything.
        """
        weights, readers = self._weights, steps[: last + 1]
        if not weights.are_any:
            return list(steps)

        def run(host: list[Any], handles: list[Any], imported: list[torch.Tensor]) -> None:
            with weights.lock:
                weights.refresh(host)
                for step in readers:
                    step(host, handles, imported)

        return [run, *steps[last + 1 :]]

    def _prepare(self, step: Step) -> RunStep:
        match step:
            case Put(values):
                return self._put_step(values)
            case Invoke(region, inputs, outputs):
                return self._invoke_step(region, inputs, outputs)
            case Gather(values, reader):
                return self._gather_step(values, reader)
            case Host(segment, inputs, outputs):
                return self._host_step(segment, inputs, outputs)
            case Scalar(output, _):
                return self._scalar_step(self.plan.scalars[output])
            case Write(inputs, values):
                return self._write_step(inputs, values)
            case Free(values):
                return self._free_step([self._index[v] for v in values])

    def _put_step(self, values: Sequence[str]) -> RunStep:
        device = self._device
        given = set(self._targets.values())
        indices = [self._index[v] for v in values]
        crossings = [
            (i, self._crossings[v], i in given) for v, i in zip(values, indices, strict=True)
        ]
        if self.plan.kept:  # a call may end before the device has read what it was given
            return self._put_step_once(crossings)
        self._imports.update(
            (v, Import(device, crossing, given))
            for v, (_, crossing, given) in zip(values, crossings, strict=True)
        )
        imports = [(i, self._imports[v]) for v, i in zip(values, indices, strict=True)]

        def run(host: list[Any], handles: list[Any], imported: list[torch.Tensor]) -> None:
            for i, known in imports:
                if handles[i] is None:
                    handles[i] = known.put(host[i], imported)

        return run

    def _put_step_once(self, crossings: Sequence[tuple[int, Crossing, bool]]) -> RunStep:
        device, count = self._device, len(self.plan.inputs)

        def run(host: list[Any], handles: list[Any], imported: list[torch.Tensor]) -> None:
            for i, crossing, is_given in crossings:
                if handles[i] is None:
                    how = {"is_waited_for": False, "is_callers": i < count}
                    handles[i] = put_in_place(device, host[i], crossing, imported, is_given, **how)

        return run

    def _invoke_step(self, region: str, inputs: Sequence[str], outputs: Sequence[str]) -> RunStep:
        function = self.executables[region].functions[ENTRY]
        specs = self.plan.regions[region].signature.inputs
        sources = [
            (isinstance(spec, TensorSpec), self._index[name])
            for name, spec in zip(inputs, specs, strict=True)
        ]
        targets = [self._index[name] for name in outputs]
        code, device, weights = self.plan.regions[region], self._device, self._weights
        is_dynamic = may_be_empty(code)
        is_small = _is_small(code)

        def run(host: list[Any], handles: list[Any], imported: list[torch.Tensor]) -> None:
            args: list[Any] = [handles[i] if is_tensor else host[i] for is_tensor, i in sources]
            if is_dynamic and any(map(is_empty, args)):
                results = run_on_host(device, code, args, weights.bound(region))
            else:
                results = function(*args, is_small=is_small)
            for i, array in zip(targets, results, strict=True):
                handles[i] = array

        return run

    def _find_round_trip(self) -> slice | None:
        """Find the steps that can be one, if all that goes in may lie where it lay before."""
        can_stay = all(known.can_stay for known in self._imports.values())
        return find_round_trip(self.plan) if can_stay else None

    def _round_trip_step(
        self, steps: Sequence[Step], weights: Weights | None, one_by_one: Sequence[RunStep]
    ) -> RunStep:
        """Make one step of a put, an invoke and a gather, and of the look at the weights."""
        (invoke,) = (step for step in steps if isinstance(step, Invoke))
        (gather,) = (step for step in steps if isinstance(step, Gather))
        region, made = self.plan.regions[invoke.region], invoke.outputs
        dtypes = [DTYPES[spec.dtype] for spec in region.signature.outputs]
        executable = self.executables[region.name]
        if is_small := _is_small(region):
            executable.stay_here()
        return RoundTrip(
            self._device,
            executable.functions[ENTRY],
            is_small,
            sources=[(self._index[name], self._imports.get(name)) for name in invoke.inputs],
            results=[
                (self._index[name], dtype, self._crossings[name])
                for name, dtype in zip(made, dtypes, strict=True)
            ],
            targets=[self._targets.get(name) for name in made],
            reader=gather.reader,
            weights=weights,
            can_repeat=not region.given,
            one_by_one=one_by_one,
        ).run

    def _gather_step(self, values: Sequence[str], reader: str) -> RunStep:
        device = self._device
        crossings = [self._crossings[v] for v in values]
        indices = [self._index[v] for v in values]
        targets = [self._targets.get(v) for v in values]
        has_targets = any(i is not None for i in targets)

        def run(host: list[Any], handles: list[Any], imported: list[torch.Tensor]) -> None:
            arrays: list[Any] = [handles[i] for i in indices]
            places = [None if i is None else host[i] for i in targets] if has_targets else ()
            tensors = fetch(device, arrays, crossings, reader, imported, targets=places)
            for i, tensor in zip(indices, tensors, strict=True):
                host[i] = tensor

        return run

    def _host_step(self, segment: str, inputs: Sequence[str], outputs: Sequence[str]) -> RunStep:
        nodes = self.plan.host_segments[segment].nodes
        function = extract_host(self.plan.host_segments[segment]).forward
        if all(is_builtin(n.target) for n in nodes if isinstance(n.target, OpOverload)):
            function = _outside_of_modes(function)
        sources = [self._index[name] for name in inputs]
        targets = [self._index[name] for name in outputs]

        def run(host: list[Any], handles: list[Any], imported: list[torch.Tensor]) -> None:
            results = function(*[host[i] for i in sources])
            for i, value in zip(targets, results, strict=True):
                host[i] = value

        return run

    def _scalar_step(self, node: fx.Node) -> RunStep:
        output = self._index[node.name]
        places = {n: self._index[n.name] for n in node.all_input_nodes}
        target: Any = node.target
        is_size = target in SIZE_OPS
        source = node.args[0] if is_size else None
        crossing = self._crossings.get(source.name) if isinstance(source, fx.Node) else None

        def run(host: list[Any], handles: list[Any], imported: list[torch.Tensor]) -> None:

            def value(source: fx.Node) -> Any:
                i = places[source]
                if host[i] is None and handles[i] is not None:
                    return _shape_only(handles[i], crossing)
                return host[i]

            args = fx.map_arg(node.args, value)
            host[output] = target(*args, **fx.map_arg(node.kwargs, value))

        return run

    def _write_step(self, inputs: Sequence[str], values: Sequence[str]) -> RunStep:
        device = self._device
        targets, sources = ([self._index[n] for n in names] for names in (inputs, values))

        def run(host: list[Any], handles: list[Any], imported: list[torch.Tensor]) -> None:
            if any(host[i] is None for i in targets):
                raise InternalError("the graph writes to an argument that came as a handle")
            write_back(device, [host[i] for i in targets], [host[i] for i in sources], values)

        return run

    def _free_step(self, indices: Sequence[int]) -> RunStep:
        def run(host: list[Any], handles: list[Any], imported: list[torch.Tensor]) -> None:
            for i in indices:
                host[i] = handles[i] = None

        return run

    def _settle(self, handles: Sequence[DeviceArray | None]) -> None:
        """Wait for all that a failed call has submitted: it reads the caller's memory in place.

        One by one: behind one wait, the first that fails would end it while others still run.
        """
        for handle in handles:
            if handle is not None:
                with contextlib.suppress(DeviceError):
                    handle.ready.wait_for_device()


def _is_small(region: Region) -> bool:
    """Say whether a region may run on the calling thread."""
    return is_static(region) and Effort.of(region).bound({}) <= INLINE_EFFORT


def _shape_only(array: DeviceArray | None, crossing: Crossing | None) -> torch.Tensor:
    """Return a tensor without bytes in the shape of a handle."""
    assert array is not None
    tensor = torch.empty(array.shape, dtype=array.dtype, device="meta")
    return tensor if crossing is None or crossing.back is None else tensor.permute(crossing.back)


def _outside_of_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have PyTorch's own kernels run outside of dispatch modes.

    AOTAutograd runs the first call of a graph under a mode that looks at custom ops, and under any
    mode `torch.linalg.pinv` of complex numbers is wrong in PyTorch 2.13.
    """

    def run(*args: Any) -> Any:
        if not torch._C._len_torch_dispatch_stack():
            return function(*args)
        with _disable_current_modes():
            return function(*args)

    return run
