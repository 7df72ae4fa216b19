"""Every environment variable that the project reads, one typed line each; nobody else reads any."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Settings:
    """Debug settings; they never change what is computed and never enter a key.

    Attributes:
        dump: `NPU_IREE_DUMP`: folder for the product of every lowering stage, with a `repro.sh`.
    """

    dump: Path | None = None

    @classmethod
    def read(cls) -> Settings:
        """Read the environment."""
        dump = os.environ.get("NPU_IREE_DUMP")
        return cls(dump=Path(dump) if dump else None)

    def rows(self) -> list[tuple[str, str, str]]:
        """Return (variable, value, meaning) of every setting, for the command line."""
        return [("NPU_IREE_DUMP", str(self.dump or ""), "folder for every stage, with a repro.sh")]
