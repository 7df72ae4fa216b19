"""What came of a case."""

from __future__ import annotations

from dataclasses import dataclass

# What came of a case, from best to worst.
OUTCOMES = ("device", "host", "skipped", "error", "wrong", "hang", "crash")


@dataclass(frozen=True)
class Verdict:
    """What came of a case.

    Attributes:
        key: of the case.
        outcome: `device` (the target can run all of it), `host` (right, and some of it had to run
            on the host),
            `skipped` (eager itself cannot do it), `error` (we raised), `wrong`, `hang`, `crash`.
        detail: the host ops, or what was wrong, in a few lines.
    """

    key: str
    outcome: str
    detail: str = ""
