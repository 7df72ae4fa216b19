"""Why Dynamo asked for a graph: a first call, or the guard of an earlier compile that failed."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import Literal

from torch._dynamo.utils import get_metrics_context
from torch._guards import CompileContext

Kind = Literal["first call", "new shape", "new constant", "guard", "again", "direct"]

_SHAPE = re.compile(r"(size|stride|rank) mismatch|\.(size|stride|storage_offset)\(\)")
_COMMENT = re.compile(r"\s+# .*", re.DOTALL)  # Dynamo puts the user's line behind a guard
_TEXTS: dict[Kind, str] = {
    "first call": "first call",
    "again": "again: no earlier compile is left to compare with",
    "direct": "called without Dynamo",
}


@dataclass(frozen=True)
class Cause:
    """Why a graph is compiled; prints itself.

    Attributes:
        kind: a size, stride or rank changed (`new shape`); a number, flag or text that the code
            holds did (`new constant`); something else that was assumed did not hold (`guard`);
            what was compiled before has failed or belongs to other objects (`again`).
        guard: what failed, e.g. `k == 1`; empty if nothing did.
        frame: Dynamo's number of the function and of its compile, as in `TORCH_LOGS` and tlparse.
    """

    kind: Kind
    guard: str = ""
    frame: str = ""

    @classmethod
    def now(cls) -> Cause:
        """Ask Dynamo, while it compiles; what compiles later (a backward graph) is told."""
        identity = CompileContext.current_compile_id()
        if identity is None:
            return cls("direct")
        if not identity.frame_compile_id:
            return cls("first call", frame=str(identity))
        prefix, _, reason = _recompile_reason().partition(": ")
        if prefix.partition("/")[0] != str(identity.frame_id):  # of a compile around this one
            return cls("again", frame=str(identity))
        guard = _COMMENT.sub("", reason.partition("\nUser stack trace:")[0]).strip()
        return cls(_kind(guard), guard, str(identity))

    def __str__(self) -> str:
        return _TEXTS.get(self.kind, f"{self.kind}: {self.guard}")


def _recompile_reason() -> str:
    """Return `0/1: the guard that failed  # ...`, for the newest earlier compile.

    Source: `torch._dynamo.convert_frame` enters it into the metrics of the compile under way, which
    have no other reader than the one at its end.
    """
    context = get_metrics_context()
    reason = context._metrics.get("recompile_reason") if context.in_progress() else None
    return reason or ""


def _kind(guard: str) -> Kind:
    if _SHAPE.search(guard):
        return "new shape"
    try:
        expression = ast.parse(guard, mode="eval").body
    except SyntaxError:  # a sentence
        return "guard"
    return "new constant" if _is_value(expression) else "guard"


def _is_value(expression: ast.expr) -> bool:
    """Say whether an expression compares a variable with a literal; `len(xs) == 1` does not."""
    if not isinstance(expression, ast.Compare) or isinstance(expression.left, ast.Call):
        return False
    if not isinstance(expression.ops[0], ast.Eq | ast.Is):
        return False
    try:
        ast.literal_eval(expression.comparators[0])
    except ValueError:
        return False
    return True
