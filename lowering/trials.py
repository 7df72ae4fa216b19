"""Sizes of 0 and 1: PyTorch traces for 2 and more, so what was traced is tried with these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils._sympy.value_ranges import ValueRanges

from lowering.ranges import LEAST_TRACED, numbers_of

_Sizes = Mapping[Any, int]


def tried_ranges(
    program: ExportedProgram, decomposed: ExportedProgram, least_size: int = LEAST_TRACED
) -> dict[Any, Any]:
    """Return the ranges of an exported program's sizes, from the least that its graph is right for.

    Whoever says nothing of a size to `Dim`, or that 1 is the least, gets a graph of sizes of 2 and
    more: `squeeze()` keeps them, and nothing is broadcast along them. So the graph is run once
    more, on fake tensors, and must give the shapes that it says it gives. What the model's own code
    asked of sizes is not in it: so no size is tried that nobody asked for.

    Args:
        program: as it was exported.
        decomposed: the same, which may compute with what is not for smaller sizes: `1 / (size - 1)`
            of `linspace`, say.
        least_size: what is asked for where PyTorch says 2; it cannot say less for `Dim.DYNAMIC`.
    """
    programs, ranges, least = (program, decomposed), program.range_constraints, dict[Any, int]()
    for size in _sizes_of(program):
        known = ranges[size].lower
        asked = min(least_size, int(known)) if known <= LEAST_TRACED else LEAST_TRACED
        if asked < LEAST_TRACED:
            least[size] = _least(programs, size, max(0, asked))
    together = [{s: max(n, low) for s, low in least.items()} for n in range(LEAST_TRACED)]
    if len(least) > 1 and not all(_are_right(programs, chosen) for chosen in together):
        least = dict.fromkeys(least, LEAST_TRACED)
    return {size: ValueRanges(low, ranges[size].upper) for size, low in least.items()}


def _least(programs: Sequence[ExportedProgram], size: Any, low: int) -> int:
    least = LEAST_TRACED
    while least > low and _are_right(programs, {size: least - 1}):
        least -= 1
    return least


def _are_right(programs: Sequence[ExportedProgram], chosen: _Sizes) -> bool:
    """Say whether graphs give, for these sizes, the shapes that they say they give."""
    return all(_is_right(program, chosen) for program in programs)


def _is_right(program: ExportedProgram, chosen: _Sizes) -> bool:
    trial = _Trial(program.graph_module, chosen)
    placeholders = program.graph.find_nodes(op="placeholder")
    try:
        with torch.no_grad(), trial.mode:
            trial.run(*(trial.like(node.meta.get("val")) for node in placeholders))
    except Exception:  # whatever ops say of sizes that they are not for
        return False
    return True


class _Trial(fx.Interpreter):
    """Runs a graph on fake tensors of chosen sizes; the others are as in the example."""

    def __init__(self, graph_module: fx.GraphModule, chosen: _Sizes) -> None:
        super().__init__(graph_module)
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._chosen = chosen

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        given, wanted = (
            [[*t.shape] for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
            for value in (result, self.like(n.meta.get("val")))
        )
        if n.op == "call_function" and given != wanted:
            raise ValueError(f"{n} is of {given}, not of {wanted}")
        return result

    def like(self, value: Any) -> Any:
        """Give what is of a (fake) value, with the chosen sizes."""
        value = tree_map_only(torch.SymInt, self._number, value)
        return tree_map_only(torch.Tensor, self._tensor, value)

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        sizes, strides = (
            [self._number(n) for n in numbers] for numbers in (tensor.shape, tensor.stride())
        )
        with self.mode:
            return torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=tensor.device)

    def _number(self, number: Any) -> int:
        if not isinstance(number, torch.SymInt):
            return int(number)
        node = number.node
        values = node.shape_env.backed_var_to_val.items()  # with expressions, if it was saved
        examples = {size: value for size, value in values if size.is_Symbol}
        return int(node.expr.xreplace({**examples, **self._chosen}))


def _sizes_of(program: ExportedProgram) -> list[Any]:
    """Return the symbols of the arguments' sizes, but for those that are arguments themselves."""
    values = [n.meta.get("val") for n in program.graph.find_nodes(op="placeholder")]
    sizes: list[Any] = [s for v in values if isinstance(v, torch.Tensor) for s in v.shape]
    symbolic = [s.node.expr.free_symbols for s in sizes if isinstance(s, torch.SymInt)]
    found = set[Any]().union(*symbolic) - numbers_of(program)
    return [symbol for symbol in program.range_constraints if symbol in found]
