"""What a compiler build has refused before, so that the next process does not ask again."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock

from lowering.files import write_atomically

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Denial:
    """One finding.

    Attributes:
        program: digest of the key of the op, or of the region, alone: program, target, flags and
            compiler build. Another build has another digest, and so is asked again.
        op: name of the op; empty for a region whose parts only compile apart.
        parts: for such a region, how many nodes each part has, in order.
        target: name of the target.
        reason: what the compiler said, in one line.
        where: the user's line.
        repro: folder that repeats the failure.
        limits: of time and memory, under which it failed: under others it is asked again.
    """

    program: str
    op: str
    parts: tuple[int, ...] = ()
    target: str
    reason: str
    where: str = ""
    repro: str = ""
    limits: str = ""

    def __str__(self) -> str:
        where = f"\n      at {self.where}" if self.where else ""
        repeat = f"bash {self.repro}/repro.sh" if self.repro else "set NPU_IREE_DUMP=<folder>"
        return f"{self.op}: {self.reason}{where}\n      to repeat it: {repeat}"


class DenialRecord:
    """The findings, in one JSON file, safe between processes. A damaged file is begun anew."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, Denial]:
        """Return all findings by their program."""
        try:
            return self._table()
        except OSError as error:
            log.warning("the denial record %s cannot be read: %s", self.path, error)
            return {}

    def _table(self) -> dict[str, Denial]:
        """Return all findings.

        Raises:
            OSError: the file is there, and cannot be read.
        """
        try:
            return self.parse(self.path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (ValueError, TypeError, KeyError) as error:
            log.warning("the denial record %s is begun anew: %s", self.path, error)
            return {}

    def under(self, limits: str) -> dict[str, Denial]:
        """Return the findings that hold under these limits, by their program."""
        return {p: denial for p, denial in self.read().items() if denial.limits == limits}

    @staticmethod
    def parse(text: str) -> dict[str, Denial]:
        """Read the content of a record.

        Raises:
            ValueError, TypeError, KeyError: it is none.
        """
        found = [Denial(**{**row, "parts": tuple(row["parts"])}) for row in json.loads(text)]
        return {denial.program: denial for denial in found}

    def add(self, denials: Sequence[Denial]) -> None:
        """Add findings; where nothing can be read or written, they are found again next time."""
        if not denials:
            return
        lock = self.path.with_suffix(".lock")
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(lock):
                try:
                    table = {**self._table(), **{d.program: d for d in denials}}
                    rows = [asdict(denial) for denial in table.values()]
                    write_atomically(self.path, json.dumps(rows, indent=1).encode())
                finally:
                    lock.unlink()
