"""Where in the user's code an FX node comes from."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import fx

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>[^\n]+)')
_GENERATED = "<eval_with_key>"  # the code of a graph, which calls `torch.cond` again
PYTORCH = f"{Path(torch.__file__).parent}{os.sep}"


@dataclass(frozen=True)
class SourceLine:
    """A line of the user's code: `where` is `file:line in function`, `code` its text."""

    where: str = ""
    code: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.code}" if self.code else self.where


def user_line(node: fx.Node) -> SourceLine:
    """Return the innermost frame that Dynamo recorded for `node` (empty if it recorded none)."""
    return next(iter(_frames(node)), SourceLine())


def model_line(node: fx.Node) -> SourceLine:
    """Return the innermost frame outside PyTorch: what calls `nn.Linear`, not what is in it."""
    frames = _frames(node)
    outside = (line for line in frames if not line.where.startswith(PYTORCH))
    return next(outside, frames[0] if frames else SourceLine())


def _frames(node: fx.Node) -> list[SourceLine]:
    """Return the frames of files that Dynamo recorded, the innermost first; of others, if none."""
    frames = list(_recorded(node))
    return [f for f in frames if not f.where.startswith(_GENERATED)] or frames


def _recorded(node: fx.Node) -> Iterator[SourceLine]:
    lines = (node.meta.get("stack_trace") or "").rstrip().splitlines()
    for i in range(len(lines) - 1, -1, -1):
        if match := _FRAME.search(lines[i]):
            # A call chain may share the frame's line: "File "m.py", line 3, in f, code: y = g(x)".
            function, _, inline = match["function"].partition(", code: ")
            code = inline or (lines[i + 1].strip() if i + 1 < len(lines) else "")
            yield SourceLine(f"{match['file']}:{match['line']} in {function}", code)
