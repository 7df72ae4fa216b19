"""What the entry points of an artifact store: weights and states, each tensor under one name."""

from __future__ import annotations

from collections.abc import Mapping, Set

import torch
from torch._C._dynamo.guards import compute_overlapping_tensors
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind

from lowering.errors import ExportError
from lowering.tensor_digest import memory_of

RESULTS = (OutputKind.USER_OUTPUT, OutputKind.LOSS_OUTPUT)
_WRITES = (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION, OutputKind.TOKEN)


class StoredNames:
    """The names of tensors that several programs share, by memory or by name.

    Programs of one process share memory, whatever each calls it; programs that were saved one by
    one share names alone.
    """

    def __init__(self, programs: Mapping[str, ExportedProgram]) -> None:
        """Look at what the programs write to.

        Args:
            programs: what `functional` made, by their entry points.

        Raises:
            ExportError: one writes to something else than buffers and arguments, or gives
                gradients.
        """
        self._first: dict[object, str] = {}  # memory -> the name that it is stored under
        self._written: set[object] = set()  # names and memory
        for entry, program in programs.items():
            for name in _written_buffers(entry, program):
                self._written |= {name, _place(name, value_of(program, name))}

    def is_written(self, name: str, value: torch.Tensor) -> bool:
        """Say whether a call of any of the programs writes to a tensor."""
        return name in self._written or _place(name, value) in self._written

    def name_of(self, name: str, value: torch.Tensor) -> str:
        """Return the name that a tensor is stored under: the first that it was asked for with."""
        return self._first.setdefault(_place(name, value), name)


def check_apart(tensors: Mapping[str, torch.Tensor], written: Set[str]) -> None:
    """Check that what calls write to is no part of another tensor, which would not see it.

    Args:
        tensors: what is stored, by name.
        written: the names of what calls write to.

    Raises:
        ExportError: it is.
    """
    extents = {name: _extent(tensor) for name, tensor in tensors.items() if tensor.numel()}
    for name in written & extents.keys():
        begin, end = extents[name]
        for other, (other_begin, other_end) in extents.items():
            is_near = other != name and begin < other_end and other_begin < end
            if is_near and _overlap(tensors[name], tensors[other]):
                raise ExportError(
                    f"a call writes to buffer {name}, which shares memory with {other}: no "
                    "artifact holds views of one tensor; let the model take them in forward"
                )


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    is_alike = one.dtype == other.dtype and _storage(one) == _storage(other)
    return not is_alike or bool(compute_overlapping_tensors([one, other], symbolic=False))


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where a tensor's first element begins and its last one ends."""
    last = sum(n * (size - 1) for n, size in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def value_of(program: ExportedProgram, name: str) -> torch.Tensor:
    """Return the value of a weight, a buffer or a constant.

    Raises:
        ExportError: it is no tensor.
    """
    value = program.state_dict.get(name)
    if value is None:
        value = program.constants[name]
    if not isinstance(value, torch.Tensor):
        raise ExportError(f"constant {name} is no tensor but {type(value).__name__}")
    return value.detach()


def _written_buffers(entry: str, program: ExportedProgram) -> list[str]:
    specs = program.graph_signature.output_specs
    for spec in specs:
        if spec.kind not in (*RESULTS, *_WRITES):
            raise ExportError(
                f"{entry}: a result is a {spec.kind.name}; export the model in inference"
            )
    return [str(s.target) for s in specs if s.kind is OutputKind.BUFFER_MUTATION]


def _place(name: str, value: torch.Tensor) -> object:
    return memory_of(value) if value.numel() else name  # empty ones may share an address
