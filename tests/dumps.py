"""What device programs take and give, as a dump has them."""

from __future__ import annotations

from pathlib import Path


def signatures(dump: Path) -> str:
    """Return the signatures of the device programs of the one region in a dump, a line each."""
    (file,) = dump.rglob("03-*.mlir")
    found = [line for line in file.read_text().splitlines() if " func.func @" in line]
    assert found
    return "\n".join(found)
