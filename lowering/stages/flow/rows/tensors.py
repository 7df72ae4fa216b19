"""The tensors that a device program of rows takes, of which it loads and stores parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lowering.stages.flow.rows.graph import Source, Value
from lowering.stages.flow.rows.signature import argument_type, tensors_of
from lowering.stages.flow.rows.text import Text
from lowering.stages.ir.types import tensor


@dataclass(frozen=True)
class Part:
    """Where a part of a tensor is.

    Attributes:
        offsets: along each dimension: a number, or a value.
        sizes: along each dimension: a number, or a value.
        shape: of the part as a tensor, which may have fewer dimensions.
    """

    offsets: tuple[int | str, ...] = ()
    sizes: tuple[int | str, ...] = ()
    shape: tuple[int | None, ...] = ()

    def __str__(self) -> str:
        lists = {"offsets": self.offsets, "sizes": self.sizes, "strides": [1] * len(self.sizes)}
        return ", ".join(f"{name} = [{', '.join(map(str, n))}]" for name, n in lists.items())


@dataclass
class Tensors:
    """The arguments `%a0`, `%a1`, ... of a function, with what unknown sizes they have.

    Attributes:
        text: gets the ops.
        sources: what is loaded.
        outputs: what is stored, to the arguments after these.
    """

    text: Text
    sources: Sequence[Source]
    outputs: Sequence[Value]
    _names: list[str] = field(default_factory=list)
    _types: list[str] = field(default_factory=list)

    def tie(self) -> None:
        """Say what the unknown sizes are."""
        graph, text = self.text.graph, self.text
        for i, (access, source) in enumerate(tensors_of(graph, self.sources, self.outputs)):
            name, kind = f"%a{i}", argument_type(graph, access, source)
            if sizes := graph.unknown(source):
                kind += f"{{{', '.join(f'%{size}' for size in sizes)}}}"
                name = text.say(f"flow.dispatch.tie_shape {name} : {kind}")
            self._names.append(name)
            self._types.append(kind)

    def number(self, argument: int) -> str:
        """Return what the argument is called that is a number."""
        return self._names[argument]

    def load(self, argument: int, part: Part) -> str:
        """Load a part; return its name."""
        kind = tensor(part.shape, self.sources[argument].dtype)
        return self.text.say(
            f"iree_tensor_ext.dispatch.tensor.load {self._names[argument]}, {part} "
            f": {self._types[argument]} -> {kind}"
        )

    def store(self, value: str, output: int, part: Part) -> None:
        """Store a part of an output."""
        place = len(self.sources) + output
        kind = tensor(part.shape, self.text.graph.source_of(self.outputs[output]).dtype)
        self.text.lines.append(
            f"iree_tensor_ext.dispatch.tensor.store {value}, {self._names[place]}, {part} "
            f": {kind} -> {self._types[place]}"
        )
