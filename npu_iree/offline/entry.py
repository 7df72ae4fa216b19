"""An entry point of a loaded artifact, called like the model that was exported."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from lowering.arithmetic import evaluate
from lowering.errors import first_line
from lowering.manifest import Call, Source
from lowering.signature import TensorSpec
from npu_iree.array import DeviceArray, KeptArray
from npu_iree.border import Crossing, fetch, put_in_place
from npu_iree.device import Device
from npu_iree.errors import ArgumentError, ArtifactError
from npu_iree.executable import Executable
from npu_iree.frozen import overlapping, spans
from npu_iree.offline.arguments import by_name, check_argument, check_written
from npu_iree.offline.declarations import check_call
from npu_iree.offline.sizes import Size, check_guards, check_ranges, places_of, settle
from npu_iree.offline.states import State, States
from npu_iree.offline.trees import read_tree
from npu_iree.untraced import untraced


class LoadedEntry:
    """An entry point of a loaded artifact, called like the model that was exported.

    Attributes:
        name: its name.
        call: what it takes and gives.
    """

    def __init__(
        self,
        name: str,
        call: Call,
        executable: Executable,
        device: Device,
        parameters: Mapping[str, torch.Tensor],
        states: States,
    ) -> None:
        self.name, self.call = name, call
        self._function = executable.functions[name]
        self._device = device
        self._parameters = parameters
        self._states = states
        self._in_tree, self._out_tree = read_tree(call.in_tree), read_tree(call.out_tree)
        self._crossings = [
            Crossing.of(f"result {i}", s.order) for i, s in enumerate(call.function.outputs)
        ]
        read = [*call.outputs, *(s for target, s in call.writes if target.kind == "argument")]
        self._fetched = sorted({s.index for s in read if s.kind == "result"})
        self._written_arguments = [t.index for t, _ in call.writes if t.kind == "argument"]
        self._places = places_of(
            {a.name: a.spec.shape for a in call.arguments if isinstance(a.spec, TensorSpec)}
        ) | {a.symbol: a.name for a in call.arguments if a.symbol}
        self._written = {t.name: s.index for t, s in call.writes if t.kind == "state"}
        taken = {s.name for s in call.takes if s.kind == "state"}
        self._only_read = sorted(taken - self._written.keys())
        used = [*call.takes, *call.outputs]
        self._is_stateful = bool(self._written) or any(s.kind == "state" for s in used)
        self._check()

    @property
    def work_name(self) -> str:
        """What a call is called in a timeline."""
        return self._function.work.name

    def _check(self) -> None:
        """Check that the parts of the manifest are of one another.

        Raises:
            ValueError: they are not.
        """
        check_call(self.name, self.call, self._parameters, self._states.current())
        if len(self._in_tree.children) != 2 or self._in_tree.leaves != len(self.call.arguments):
            raise ValueError(f"{self.name}: in_tree and arguments do not match")
        if self._out_tree.leaves != len(self.call.outputs):
            raise ValueError(f"{self.name}: out_tree and outputs do not match")

    @untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it, wait, and return the result in the model's own structure, as CPU tensors.

        Args:
            args, kwargs: as the model takes them: CPU tensors, or handles of this device.

        Raises:
            ArgumentError: an argument is missing, extra, or of another dtype or shape than was
                compiled for; nothing has run.
            DeviceError: the work failed.
        """
        return self._out_tree.unflatten(iter(self.call_flat(self._leaves(args, kwargs))))

    def call_flat(self, leaves: Sequence[Any]) -> list[Any]:
        """Do what a call does, with the leaves of the arguments, for the leaves of the result."""
        sizes = self._checked(leaves)
        imported: list[torch.Tensor] = []
        with self._turn():
            results: list[Any] = self._run(leaves, imported, in_place=True)
            arrays = [results[i] for i in self._fetched]
            crossings = [self._crossings[i] for i in self._fetched]
            kept = [results[i] for i in self._written.values()]
            given = list(imported)
            lent = [value for value in leaves if isinstance(value, DeviceArray)]
            others = [*kept, *lent, *self._read_states()]
            tensors = fetch(self._device, arrays, crossings, "the caller", imported, others)
            self._advance(self._own(results, kept, given, lent))
            states = self._returned_states()
        for i, tensor in zip(self._fetched, tensors, strict=True):
            results[i] = tensor
        for target, source in self.call.writes:
            if target.kind == "argument":
                leaves[target.index].copy_(results[source.index])
        states = {n: _host_copy(value) for n, value in states.items()}
        return self._outputs(results, leaves, sizes, states)

    @untraced
    def submit(self, *args: Any, **kwargs: Any) -> Any:
        """Run it without waiting: results are handles (`DeviceArray`), in the model's structure.

        Tensors are copied before this returns; handles are passed on as they are.

        Raises:
            ArgumentError: as `__call__`; also, if it writes to an argument.
        """
        return self._out_tree.unflatten(iter(self.submit_flat(self._leaves(args, kwargs))))

    def submit_flat(self, leaves: Sequence[Any]) -> list[Any]:
        """Do what `submit` does, with the leaves of the arguments, for the leaves of the result."""
        if self._written_arguments:
            raise ArgumentError(f"{self.name} writes to an argument, so somebody has to wait")
        sizes = self._checked(leaves)
        with self._turn():
            results = self._run(leaves, [], in_place=False)
            self._advance(results)
            states = {n: self._handle(value) for n, value in self._returned_states().items()}
        if self._is_stateful:  # each may be in the memory of a state
            results = [KeptArray.of(result) for result in results]
        return self._outputs(results, leaves, sizes, states)

    def taken(self, leaves: Sequence[Any]) -> list[Any]:
        """Return what the function takes in a call: numbers, and CPU tensors in its memory order.

        Raises:
            ArgumentError: as `__call__`.
        """
        self._checked(leaves)
        states = self._states.current()
        found = []
        for source, spec in zip(self.call.takes, self.call.function.inputs, strict=True):
            value = states[source.name] if source.kind == "state" else leaves[source.index]
            if isinstance(value, DeviceArray):
                value = value.to_host()
            elif isinstance(value, torch.Tensor) and isinstance(spec, TensorSpec):
                value = value.detach().permute(spec.order).contiguous()
            found.append(value)
        return found

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Let calls that read and write states run one after the other."""
        with self._states.lock if self._is_stateful else contextlib.nullcontext():
            yield

    def _advance(self, results: Sequence[DeviceArray]) -> None:
        """Let the states be what a call has made of them."""
        if self._written:
            self._states.advance({n: results[i] for n, i in self._written.items()})

    def _own(
        self,
        results: Sequence[Any],
        kept: Sequence[DeviceArray],
        given: Sequence[torch.Tensor],
        lent: Sequence[DeviceArray],
    ) -> Sequence[Any]:
        """Copy a state that is in the caller's memory: the compiler gives back what it was given.

        Args:
            results: of the call.
            kept: those of them that are states.
            given: memory of the arguments.
            lent: those of the arguments that are handles.
        """
        if self._device.target.memory != "unified" or not kept or not (given or lent):
            return results
        tensors = self._device.fetch(kept)
        every = spans(tensors) + spans([*given, *self._device.fetch(lent)], are_others=True)
        copies = {id(kept[i]): self._device.put(tensors[i]) for i in overlapping(every)}
        return [copies.get(id(result), result) for result in results]

    def _read_states(self) -> list[DeviceArray]:
        """Return the states that a call reads and leaves as they are."""
        states = self._states.current() if self._only_read else {}
        read = [states[name] for name in self._only_read]
        return [value for value in read if isinstance(value, DeviceArray)]

    def _handle(self, state: State) -> DeviceArray:
        """Return the value of a state for a caller who does not wait."""
        return KeptArray.of(state) if isinstance(state, DeviceArray) else self._device.put(state)

    def _returned_states(self) -> dict[str, Any]:
        names = {s.name for s in self.call.outputs if s.kind == "state"}
        return {n: value for n, value in self._states.current().items() if n in names}

    def _leaves(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Flatten the arguments in the order compiled for; they may be named or not."""
        names, count = self.call.names, len(self._in_tree.children[0].children)
        if names:
            args, kwargs = by_name(self.name, names, count, args, kwargs)
        try:
            positional, named = self._in_tree.children
            positional = replace(positional, keys=tuple(names[:count]) or None)  # for its errors
            return [*positional.flatten(tuple(args)), *named.flatten(dict(kwargs))]
        except TypeError as error:
            raise ArgumentError(f"{self.name}: {error}") from error

    def _run(
        self, leaves: Sequence[Any], imported: list[torch.Tensor], *, in_place: bool
    ) -> list[DeviceArray]:
        args: list[Any] = []
        states = self._states.current() if self._is_stateful else {}
        for source, spec in zip(self.call.takes, self.call.function.inputs, strict=True):
            is_state = source.kind == "state"
            value = states[source.name] if is_state else leaves[source.index]
            if isinstance(value, torch.Tensor) and isinstance(spec, TensorSpec):
                name = source.name or self.call.arguments[source.index].name
                value = self._put(
                    value, Crossing.of(name, spec.order), imported, in_place and not is_state
                )
            args.append(value)
        try:
            return self._function(*args)
        except (ValueError, RuntimeError, TypeError) as error:  # what IREE says before it starts
            raise ArtifactError(self.name, f"IREE refuses the call: {first_line(error)}") from error

    def _put(
        self, tensor: torch.Tensor, crossing: Crossing, imported: list[torch.Tensor], in_place: bool
    ) -> DeviceArray:
        if in_place:
            return put_in_place(self._device, tensor, crossing, imported)
        return self._device.put(tensor.detach().permute(crossing.order))

    def _checked(self, leaves: Sequence[Any]) -> dict[str, int]:
        """Check the arguments against what was compiled for; return the symbolic sizes."""
        sizes: dict[str, int] = {}
        later: list[Size] = []
        try:
            for argument, value in zip(self.call.arguments, leaves, strict=True):
                check_argument(argument, value, sizes, later)
            settle(later, sizes)
            check_ranges(sizes, self.call.symbols, self._places)
            check_guards(self.call.guards, sizes)
            check_written(self.call.arguments, leaves, self._written_arguments)
            for source in self.call.outputs:
                if source.kind == "size":
                    evaluate(source.name, sizes)
        except ValueError as error:
            raise ArgumentError(f"{self.name}: {error}") from error
        for argument, value in zip(self.call.arguments, leaves, strict=True):
            if isinstance(value, DeviceArray) and value.device is not self._device:
                raise ArgumentError(
                    f"{self.name}: {argument.name} is on {value.device}, not on {self._device}"
                )
        return sizes

    def _outputs(
        self,
        results: Sequence[Any],
        leaves: Sequence[Any],
        sizes: Mapping[str, int],
        states: Mapping[str, Any],
    ) -> list[Any]:
        return [
            self._output(source, results, leaves, sizes, states) for source in self.call.outputs
        ]

    def _output(
        self,
        source: Source,
        results: Sequence[Any],
        leaves: Sequence[Any],
        sizes: Mapping[str, int],
        states: Mapping[str, Any],
    ) -> Any:
        match source.kind:
            case "result":
                return results[source.index]
            case "argument":
                return leaves[source.index]
            case "parameter":
                return self._parameters[source.name].clone()  # a mapped file is not for writing
            case "state":
                return states[source.name]
            case "size":
                return evaluate(source.name, sizes)
        return source.value


def _host_copy(state: State) -> torch.Tensor:
    """Return the value of a state; what a caller does to it does not reach the state."""
    return (state.to_host() if isinstance(state, DeviceArray) else state).clone()
