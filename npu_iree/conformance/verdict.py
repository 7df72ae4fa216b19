"""What came of a case."""

from __future__ import annotations

from dataclasses import dataclass

# What came of a case, from best to worst; one that ran on the device is more than idle.
OUTCOMES = ("idle", "device", "host", "skipped", "error", "wrong", "hang", "crash")
BAD = ("error", "wrong", "hang", "crash")


@dataclass(frozen=True)
class Verdict:
    """What came of a case.

    Attributes:
        key: of the case.
        outcome: `idle` (right, and by choice on the host as a whole: what views, moves or makes
            constants alone is worth no transfer, so that the device was not tried), `device` (the
            target can run all of it), `host` (right, and some of it had to run on the host),
            `skipped` (eager itself cannot do it), `error` (we raised), `wrong`, `hang`, `crash`.
        detail: the host ops, or what was wrong, in a few lines.
    """

    key: str
    outcome: str
    detail: str = ""
