"""One ATen op on real arguments, as a value that can be sent to another process."""

from __future__ import annotations

import operator
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from lowering.dtypes import DTYPE_NAMES, DTYPES
from lowering.segments import DEVICE, Segment

# What is special about the tensors of a call: some elements are NaN, there are none, or no tensor
# has a dimension.
PLAIN, NAN, EMPTY, SCALAR = "plain", "nan", "empty", "scalar"
MEASURED = ("aten.", "prims.")
# A test of one op is about what it computes, so its tensors may be small.
MAX_ELEMENTS = 1 << 18


@dataclass(frozen=True)
class SingleOp:
    """One call of an op.

    Attributes:
        op: its name with overload, e.g. `aten.add.Tensor`.
        key: the call as text, tensors by dtype and rank; equal keys need one test.
        dtypes: of every tensor that goes in or comes out, by importance.
        kind: `plain`, or what is special about its tensors.
        source: the program that the call was found in.
        call: the pickled arguments, keyword arguments and results in use.
    """

    op: str
    key: str
    dtypes: tuple[str, ...]
    kind: str
    source: str
    call: bytes

    @cached_property
    def target(self) -> torch._ops.OpOverload:
        """The op itself."""
        space, name, overload = self.op.split(".")
        op: torch._ops.OpOverload = getattr(getattr(getattr(torch.ops, space), name), overload)
        return op


def record(node: fx.Node, args: object, kwargs: object, result: object, source: str) -> SingleOp:
    """Make a `SingleOp` of a node and the values it ran on.

    Args:
        node: a `call_function` of an op overload.
        args: its positional arguments, real.
        kwargs: its keyword arguments, real.
        result: what it returned.
        source: name of the program it is from.
    """
    tensors = _tensors((args, kwargs, result))
    items = [u.args[1] for u in node.users if u.target is operator.getitem]
    used = tuple(sorted(i for i in items if isinstance(i, int)))
    inputs = _tensors((args, kwargs))
    text = [f"{node.target} {_text(args)}", _text(kwargs) if kwargs else ""]
    text += [
        "same" if len({id(t) for t in inputs}) < len(inputs) else "",
        f"-> {used}" * bool(used),
    ]
    return SingleOp(
        op=str(node.target),
        key=" ".join(filter(None, text)),
        dtypes=tuple(n for n, d in DTYPES.items() if any(t.dtype == d for t in tensors)),
        kind=_kind(tensors),
        source=source,
        call=pickle.dumps((args, kwargs, used)),
    )


def is_recordable(node: fx.Node, args: object, kwargs: object, result: object) -> bool:
    """Say whether a node is a small ATen op on tensors that a device can hold.

    Random ops are not: they always run on the host. Neither is `as_strided` of a view: it reads
    memory that its argument does not show.
    """
    target, tensors = node.target, _tensors((args, kwargs, result))
    if not isinstance(target, torch._ops.OpOverload) or not str(target).startswith(MEASURED):
        return False
    if torch.Tag.nondeterministic_seeded in target.tags or not _tensors(result):
        return False
    if "as_strided" in str(target) and any(_is_part(t) for t in _tensors(args)):
        return False
    return sum(t.numel() for t in tensors) <= MAX_ELEMENTS and all(
        t.dtype in DTYPE_NAMES and t.layout is torch.strided for t in tensors
    )


@dataclass(frozen=True)
class SingleOpProgram:
    """A `SingleOp` as a device segment, with what eager PyTorch makes of it.

    Attributes:
        segment: the op's node (and `getitem` nodes), in a graph of their own.
        inputs: the real tensor behind each placeholder.
        expected: eager's results, in the order of `segment.outputs`.
    """

    segment: Segment
    inputs: dict[fx.Node, torch.Tensor]
    expected: tuple[torch.Tensor, ...]


def program(single: SingleOp) -> SingleOpProgram:
    """Build the graph of one op, with placeholders and fake tensors as capture leaves them."""
    args, kwargs, used = pickle.loads(single.call)
    leaves, spec = tree_flatten((args, kwargs))
    graph = fx.Graph()
    inputs = dict(_placeholders(graph, leaves))
    nodes = {id(t): n for n, t in inputs.items()}
    node_args, node_kwargs = tree_unflatten([nodes.get(id(v), v) for v in leaves], spec)
    node = graph.call_function(single.target, node_args, node_kwargs)
    with torch.no_grad():
        result = single.target(*tree_map_only(torch.Tensor, torch.clone, args), **kwargs)
    node.meta["val"] = tree_map_only(torch.Tensor, _fake, result)
    if isinstance(result, torch.Tensor):
        outputs, expected = [node], (result,)
    else:
        outputs = [_getitem(graph, node, i) for i in used]
        expected = tuple(result[i] for i in used)
    graph.output(tuple(outputs))
    own = [node] if outputs == [node] else [node, *outputs]
    fx.GraphModule({}, graph)
    return SingleOpProgram(Segment(DEVICE, own, "region0"), inputs, expected)


def in_floats(single: SingleOp) -> tuple[torch.Tensor, ...]:
    """Return what eager makes of an op that has floats for its halves."""
    args, kwargs, used = pickle.loads(single.call)
    args, kwargs = tree_map_only(torch.Tensor, _in_floats, (args, kwargs))
    with torch.no_grad():
        result = single.target(*args, **kwargs)
    return (result,) if isinstance(result, torch.Tensor) else tuple(result[i] for i in used)


def _in_floats(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor.clone()


def _placeholders(graph: fx.Graph, leaves: list[object]) -> Iterator[tuple[fx.Node, torch.Tensor]]:
    distinct = {id(v): v for v in leaves if isinstance(v, torch.Tensor)}
    for i, tensor in enumerate(distinct.values()):
        node = graph.placeholder(f"x{i}")
        node.meta["val"] = _fake(tensor)
        yield node, tensor


def _getitem(graph: fx.Graph, node: fx.Node, index: int) -> fx.Node:
    item = graph.call_function(operator.getitem, (node, index))
    item.meta["val"] = node.meta["val"][index]
    return item


_FAKE = FakeTensorMode()


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    with _FAKE:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


def _tensors(values: object) -> list[torch.Tensor]:
    return [v for v in tree_flatten(values)[0] if isinstance(v, torch.Tensor)]


def _text(values: object) -> str:
    """Write arguments down: `(f32:2, alpha=1)`; a tensor by dtype, rank and what is in it."""
    return str(tree_map_only(torch.Tensor, _TensorText, values))


class _TensorText:
    def __init__(self, tensor: torch.Tensor) -> None:
        marks = {
            EMPTY: tensor.numel() == 0,
            NAN: _has_nan(tensor),
            "inf": bool(tensor.isinf().any()),
        }
        special = "".join(f":{mark}" for mark, there in marks.items() if there)
        self._text = f"{DTYPE_NAMES[tensor.dtype]}:{tensor.dim()}{special}"

    def __repr__(self) -> str:
        return self._text


def _kind(tensors: list[torch.Tensor]) -> str:
    if any(t.numel() == 0 for t in tensors):
        return EMPTY
    if all(t.dim() == 0 for t in tensors):
        return SCALAR
    return NAN if any(_has_nan(t) for t in tensors) else PLAIN


def _has_nan(tensor: torch.Tensor) -> bool:
    return bool(tensor.isnan().any())


def _is_part(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() != tensor.nbytes
