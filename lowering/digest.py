"""What identifies bytes, texts and files: SHA-256. Without torch, as compile workers are."""

from __future__ import annotations

import hashlib
from pathlib import Path


def bytes_digest(data: bytes | memoryview) -> str:
    """Return the SHA-256 of bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def text_digest(text: str) -> str:
    """Return the SHA-256 of a text, in hexadecimal."""
    return bytes_digest(text.encode())


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal, as `sha256sum` prints it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sources_digest(package: Path) -> str:
    """Return the SHA-256 of the Python files in a folder and below, with their names."""
    files = sorted(package.rglob("*.py"))
    lines = (f"{path.relative_to(package)} {file_digest(path)}\n" for path in files)
    return text_digest("".join(lines))
