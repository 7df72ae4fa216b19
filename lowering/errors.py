"""The errors a caller can handle, one class per situation; `NpuIreeError` is the root."""

from __future__ import annotations

import errno
import os
import re
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


class NpuIreeError(Exception):
    """Root of every error that this project raises on purpose."""


class InternalError(NpuIreeError):
    """A bug of ours, not of the user's program."""


class ExportError(NpuIreeError):
    """An exported program holds what an artifact cannot."""


class ArtifactError(NpuIreeError):
    """A file that was handed to us is damaged, or is not for us: read as data, never trusted.

    Attributes:
        path: the file.
        reason: what is wrong with it, in one line.
    """

    def __init__(self, path: Path | str, reason: str) -> None:
        self.path = Path(path)
        self.reason = reason
        super().__init__(f"cannot use {path}: {reason}")


class NotCompiledError(NpuIreeError):
    """A graph would have to be compiled, and `compile` says that it may not be.

    Attributes:
        differences: what tells it from the nearest graph that there is, one line each.
        missing: which graph is missing where, and these lines.
    """

    def __init__(self, kind: str, where: str, places: str, differences: Sequence[str]) -> None:
        self.differences = tuple(differences)
        begins = f", which begins at {where}," if where else ""
        listed = "".join(f"\n  {line}" for line in self.differences)
        self.missing = f"this {kind} graph{begins} is not in {places}:{listed}"
        super().__init__(
            f"{self.missing}\nIt may not be compiled here. "
            "Save a bundle after a call like this one, or allow more with "
            'options={"compile": "if_missing"} or options={"compile": "eager"}.'
        )


class WorkerStartError(NpuIreeError):
    """No compile worker comes up: that is no fault of the program, and nothing can be compiled."""


class MeasureError(NpuIreeError):
    """Nothing can be measured: there is no device, or the default does not run; says why."""


class CancelledError(BaseException):
    """The service was closed under a request. No `Exception`: it says nothing of the program."""


@dataclass(frozen=True)
class HostOp:
    """One op that does not run on the device, why, and where the user wrote it.

    Attributes:
        op: name of the op with its overload, e.g. `aten.median.default`.
        kind: `unsupported` (the target cannot), `disabled` (the user asked), `cost` (not worth a
            transfer), `state` (host-side state such as a random generator) or `failed` (the
            compiler refused a region that holds it).
        reason: one line for people.
        where: `file:line in function` of the user's code, or an empty string if unknown.
        code: the text of that line.
    """

    op: str
    kind: str
    reason: str
    where: str = ""
    code: str = ""

    @property
    def is_inability(self) -> bool:
        """Whether the target cannot run it: views and moves may be left to the host although."""
        return self.kind in ("unsupported", "failed", "state")

    def __str__(self) -> str:
        place = f"\n      at {self.where}" if self.where else ""
        code = f": {self.code}" if self.where and self.code else ""
        return f"{self.op}: {self.reason}{place}{code}"


ALLOW_HOST = 'allow the host with options={"fallback": "host"}'


class UnsupportedOpError(NpuIreeError):
    """The graph holds ops that the target cannot run, and the host is not allowed to.

    Attributes:
        target: name of the target.
        ops: every such op of the graph, not only the first.
        hint: what to do, if the ops are to stay.
    """

    def __init__(
        self,
        target: str,
        ops: Sequence[HostOp],
        why: str = 'fallback="error" forbids the host',
        hint: str = ALLOW_HOST,
    ) -> None:
        self.target = target
        self.ops = tuple(ops)
        self.hint = hint
        lines = "\n".join(f"  {i + 1}. {op}" for i, op in enumerate(self.ops))
        count = len(self.ops)
        super().__init__(
            f"target {target!r} cannot run {count} op{'s' * (count != 1)} of this graph, and "
            f"{why}:\n{lines}\nRewrite these lines, or {hint}."
        )


# What the system says where nothing can be written, whatever is compiled.
_NO_SPACE = tuple(map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)))


class StageError(NpuIreeError):
    """A lowering stage failed.

    Attributes:
        stage: name of the stage, e.g. `torch-to-linalg`.
        diagnostics: what the compiler said, without its stack.
        repro: folder with the input of the stage and a `repro.sh`, if dumping was on.
        timed_out: whether it was ended because its time was over.
        was_killed: whether somebody else ended it.
    """

    def __init__(
        self,
        stage: str,
        diagnostics: str,
        repro: Path | None = None,
        *,
        timed_out: bool = False,
        was_killed: bool = False,
    ) -> None:
        self.stage = stage
        self.diagnostics = diagnostics.strip()
        self.repro = repro
        self.timed_out = timed_out
        self.was_killed = was_killed
        hint = (
            f"Repeat it with: bash {repro / 'repro.sh'}"
            if repro
            else "Set NPU_IREE_DUMP=<folder> and run again to get a folder that repeats it."
        )
        super().__init__(f"stage {stage} failed: {self.diagnostics}\n{hint}")

    @property
    def lacks_space(self) -> bool:
        """Whether the compiler could not write its files: other flags would not help."""
        return any(words in self.diagnostics for words in _NO_SPACE)

    @property
    def is_passing(self) -> bool:
        """Whether it says little of the program: another time, it may well not fail."""
        return self.was_killed or self.lacks_space

    @property
    def summary(self) -> str:
        """The stage and the first line of what the compiler said, or two, if one says little."""
        first, *rest = self.diagnostics.splitlines() or ["no reason given"]
        if first.endswith(":") and rest:
            first = f"{first} {rest[0].strip()}"
        return f"stage {self.stage}: {first[:300]}"


class FlagError(StageError, ValueError):
    """`iree-compile` does not take one of the flags: no program is to blame.

    Attributes:
        flags: all that it was given.
    """

    def __init__(self, stage: str, diagnostics: str, flags: Sequence[str]) -> None:
        super().__init__(stage, diagnostics)
        self.flags = tuple(flags)

    @property
    def named(self) -> tuple[str, ...]:
        """Those of the flags that the compiler's words name."""
        refused, _, _ = self.diagnostics.partition("Did you mean")
        words = {word.lstrip("-") for word in re.findall(r"[\w-]+", refused)}
        return tuple(f for f in self.flags if f.lstrip("-").partition("=")[0] in words)

    def __str__(self) -> str:
        return f"iree-compile refuses a flag: {self.diagnostics} (given: {' '.join(self.flags)})"


def first_line(text: str | BaseException) -> str:
    """Return the first line that says something; of an error that says nothing, its class."""
    lines = map(str.strip, str(text).splitlines())
    return next(filter(None, lines), "" if isinstance(text, str) else type(text).__name__)


def shortened(lines: Sequence[str], most: int, rest: str = "... and {} more") -> list[str]:
    """Return at most so many lines, and one that tells how many more there are."""
    more = [rest.format(len(lines) - most)] if len(lines) > most else []
    return [*lines[:most], *more]


def said(error: Exception) -> str:
    """Return what an error of a stage says: the compiler's words, or which error of ours it is."""
    text = str(error)
    if isinstance(error, (NpuIreeError, RuntimeError)) or type(error).__name__ == "MLIRError":
        return text or type(error).__name__
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {text} (at {frame.filename}:{frame.lineno})"
