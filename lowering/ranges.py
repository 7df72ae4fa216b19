"""What an exported program takes for granted of its sizes: their ranges, and how they relate."""

from __future__ import annotations

import traceback
from typing import Any

import sympy
import torch
from torch.export import ExportedProgram
from torch.utils._sympy.functions import IsNonOverlappingAndDenseIndicator

from lowering.arithmetic import can_evaluate
from lowering.errors import ExportError
from lowering.source import PYTORCH

# PyTorch traces for sizes of this and more, and says of none of them that it is.
LEAST_TRACED = 2
# What is so of all sizes that are traced, by the largest number that it is so of.
_OF_ALL = {sympy.Ne: LEAST_TRACED - 1, sympy.Gt: LEAST_TRACED - 1, sympy.Ge: LEAST_TRACED}


def symbol_ranges(program: ExportedProgram) -> dict[str, tuple[int, int | None]]:
    """Return the least and the largest value of each symbol (None: no limit)."""
    limits, numbers = program.range_constraints.items(), numbers_of(program)
    return {str(s): _limits(r, s in numbers) for s, r in limits if isinstance(s, sympy.Symbol)}


def guards_of(program: ExportedProgram) -> tuple[str, ...]:
    """Return what must be true of the symbols beside their ranges, e.g. `Eq(Mod(s0, 2), 0)`.

    Raises:
        ExportError: an artifact cannot check one of these.
    """
    values = [n.meta.get("val") for n in program.graph.find_nodes(op="placeholder")]
    modes = [v.fake_mode for v in values if isinstance(v, torch._subclasses.FakeTensor)]
    environment = modes[0].shape_env if modes else None
    if environment is None:
        return ()
    names, numbers = {str(s) for s in program.range_constraints}, numbers_of(program)
    found: dict[str, None] = {}
    for guard in environment.guards:
        expression = guard.expr.xreplace(environment.replacements)
        if not _is_telling(expression, numbers):
            continue
        if not can_evaluate(str(expression), names):
            raise ExportError(
                f"the program takes for granted that {expression}{_line_of(guard)}, which no "
                "artifact can check"
            )
        found[str(expression)] = None
    return tuple(found)


def numbers_of(program: ExportedProgram) -> set[Any]:
    """Return the symbols that are arguments themselves, not sizes."""
    values = (n.meta.get("val") for n in program.graph.find_nodes(op="placeholder"))
    return {v.node.expr for v in values if isinstance(v, torch.SymInt)}


def _is_telling(guard: Any, numbers: set[Any]) -> bool:
    """Say whether a guard is more than a range says, and of more than how memory lies."""
    if guard == sympy.true or guard.has(IsNonOverlappingAndDenseIndicator):
        return False
    if guard.func not in _OF_ALL or not guard.lhs.is_Symbol or guard.lhs in numbers:
        return True
    return not (guard.rhs.is_Integer and guard.rhs <= _OF_ALL[guard.func])


def _line_of(guard: Any) -> str:
    """Say where the user's code has asked; nothing, where PyTorch has, or nobody knows."""
    frame = guard.sloc.framework_loc if guard.sloc else None
    if not isinstance(frame, traceback.FrameSummary) or frame.filename.startswith(PYTORCH):
        return ""
    return f" (at {frame.filename}:{frame.lineno} in {frame.name})"


def _limits(limits: Any, is_number: bool) -> tuple[int, int | None]:
    """Return a symbol's range; what is as good as unlimited is None."""
    low, high = (int(end) if end.is_Integer else None for end in (limits.lower, limits.upper))
    least = -(1 << 63) if is_number else 0
    return max(least, least if low is None else low), high if high is None or high < 2**62 else None
