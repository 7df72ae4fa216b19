"""Find single ops: trace programs as the backend would, and record every op that they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.aot_autograd import aot_function
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from lowering.capture import capture_aot
from lowering.decompositions import decomposition_table
from lowering.dtypes import DTYPES
from measuring.programs import programs
from measuring.single_op import SingleOp, is_recordable, record

OURS = "programs"
Program = tuple[Callable[..., Any], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Source:
    """Where programs come from: an entry of PyTorch's own table of ops, or our list.

    Attributes:
        name: e.g. `cumsum[f32]`.
        position: place in `op_db`, or -1 for `measuring.programs`.
        dtype: name of the dtype of the inputs.
        samples: how many sample inputs to take from `op_db`.
        backward: whether to trace the backward graph too.
    """

    name: str
    position: int
    dtype: str
    samples: int
    backward: bool


def sources(dtype: str, samples: int, backward: bool) -> Iterator[Source]:
    """List every source of programs in one dtype."""
    yield Source(f"{OURS}[{dtype}]", -1, dtype, samples, DTYPES[dtype].is_floating_point)
    for position, info in enumerate(op_db):
        if info.supports_dtype(DTYPES[dtype], "cpu"):
            name = f"{info.name}.{info.variant_test_name}".rstrip(".")
            yield Source(f"{name}[{dtype}]", position, dtype, samples, backward)


def find(source: Source) -> list[SingleOp]:
    """Trace the programs of a source and return the distinct ops that they run."""
    torch.manual_seed(0)
    found: dict[str, SingleOp] = {}
    for function, tensors in _programs(source):
        for backward in (False, True)[: 1 + source.backward]:
            calls: list[SingleOp] = []
            try:
                _trace(function, tensors, backward, source.name, calls)
            except Exception:  # what PyTorch cannot trace never reaches a backend
                continue
            found |= {c.key: c for c in calls if c.key not in found}
    return list(found.values())


def _programs(source: Source) -> Iterator[Program]:
    dtype = DTYPES[source.dtype]
    if source.position < 0:
        for function, args in programs(dtype):
            yield _flat(function, args, {})
        return
    info = op_db[source.position]
    grad = source.backward and info.supports_autograd
    samples = list(info.sample_inputs("cpu", dtype, requires_grad=grad))  # type: ignore[no-untyped-call]
    for sample in samples[:: -(-len(samples) // source.samples) or 1]:
        yield _flat(info, (sample.input, *sample.args), sample.kwargs)


def _flat(function: Callable[..., Any], args: Any, kwargs: Any) -> Program:
    """Close a function over all of its arguments but the tensors."""
    leaves, spec = tree_flatten((args, kwargs))
    places = [i for i, v in enumerate(leaves) if isinstance(v, torch.Tensor)]

    def on_tensors(*tensors: torch.Tensor) -> list[torch.Tensor]:
        full = dict(enumerate(leaves)) | dict(zip(places, tensors, strict=True))
        args, kwargs = tree_unflatten(list(full.values()), spec)
        results = tree_leaves(function(*args, **kwargs))
        # AOTAutograd keeps views of inputs out of the graph if nothing reads them there.
        return [v.clone() for v in results if isinstance(v, torch.Tensor)]

    return on_tensors, [leaves[i] for i in places]


def _trace(
    function: Callable[..., Any],
    tensors: Sequence[torch.Tensor],
    backward: bool,
    name: str,
    calls: list[SingleOp],
) -> None:
    """Compile a function with AOTAutograd and run it, and its backward graph if asked to."""

    def compiler(gm: fx.GraphModule, example_inputs: Sequence[object]) -> Any:
        capture_aot(gm)  # drops dead code, as the backend does
        return make_boxed_func(_Recorder(gm, name, calls).run)

    with torch.set_grad_enabled(backward):
        outputs = aot_function(function, compiler, decompositions=decomposition_table())(*tensors)
    if roots := [o for o in outputs if o.requires_grad]:
        torch.autograd.backward(roots, [torch.randn_like(o) for o in roots])


class _Recorder(fx.Interpreter):
    """Runs a graph and appends each op with its real arguments to `calls`."""

    def __init__(self, module: fx.GraphModule, name: str, calls: list[SingleOp]) -> None:
        super().__init__(module)
        self._name = name
        self._calls = calls

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        result = super().run_node(n)
        if n.op == "call_function" and is_recordable(n, args, kwargs, result):
            self._calls.append(record(n, args, kwargs, result, self._name))
        return result
