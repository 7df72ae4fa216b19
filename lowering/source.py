"""Where in the user's code an FX node comes from."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import fx

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>[^\n]+)')


@dataclass(frozen=True)
class SourceLine:
    """A line of the user's code: `where` is `file:line in function`, `code` its text."""

    where: str = ""
    code: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.code}" if self.code else self.where


def user_line(node: fx.Node) -> SourceLine:
    """Return the innermost frame that Dynamo recorded for `node` (empty if it recorded none)."""
    lines = (node.meta.get("stack_trace") or "").rstrip().splitlines()
    for i in range(len(lines) - 1, -1, -1):
        if match := _FRAME.search(lines[i]):
            # A call chain may share the frame's line: "File "m.py", line 3, in f, code: y = g(x)".
            function, _, inline = match["function"].partition(", code: ")
            code = inline or (lines[i + 1].strip() if i + 1 < len(lines) else "")
            return SourceLine(f"{match['file']}:{match['line']} in {function}", code)
    return SourceLine()
