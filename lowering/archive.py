"""Zip files from anywhere, read as data: nothing is extracted, memory is bounded, one error type.

Written ones are the same bytes for the same content, whenever and wherever they are written.
"""

from __future__ import annotations

import contextlib
import io
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lowering.errors import ArtifactError

# What `zipfile` raises at files that are none, are damaged, or were made to do harm.
_MALFORMED = (
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
    zlib.error,
    struct.error,
    EOFError,
    MemoryError,
    OSError,
    OverflowError,
    RuntimeError,
    ValueError,
)
_DIRECTORY_BYTES_PER_MEMBER = 256
_ENCRYPTED = 0x1
# Deflate reaches 1000; what compilers and people write stays far below this.
_EXPANSION = 200
_SMALL_BYTES = _PIECE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ArchiveLimits:
    """What a zip file may hold; more is refused before it is read.

    Attributes:
        members: how many members.
        member_bytes: how large one of them, decompressed.
    """

    members: int = 10_000
    member_bytes: int = 2 << 30


class Archive:
    """An open zip file whose directory has been checked."""

    def __init__(self, path: Path, file: zipfile.ZipFile) -> None:
        self._path = path
        self._file = file
        self._members = {info.filename: info for info in file.infolist() if not info.is_dir()}

    def names(self) -> list[str]:
        """Return the names of the members, in their order."""
        return list(self._members)

    def read(self, name: str, limit_bytes: int | None = None) -> bytes:
        """Return a member's content, which is of the size that the directory declares.

        Args:
            name: of the member.
            limit_bytes: what it may have at most, if that is less than the archive's limit.

        Raises:
            ArtifactError: there is no such member, or it is damaged, or too large.
        """
        info = self._members.get(name)
        if info is None:
            raise ArtifactError(self._path, f"it has no member {name!r}")
        if limit_bytes is not None and info.file_size > limit_bytes:
            size = f"{info.file_size} bytes, and at most {limit_bytes} are read"
            raise ArtifactError(self._path, f"its member {name!r} has {size}")
        try:
            with self._file.open(info) as member:  # gives no more than the directory declares
                data = b"".join(iter(lambda: member.read(_PIECE_BYTES), b""))
        except _MALFORMED as error:
            raise ArtifactError(self._path, f"its member {name!r} is damaged: {error}") from error
        if len(data) != info.file_size:
            raise ArtifactError(self._path, f"its member {name!r} is not of the declared size")
        return data


@contextlib.contextmanager
def open_archive(path: Path, limits: ArchiveLimits = ArchiveLimits()) -> Iterator[Archive]:
    """Open a zip file of unknown origin.

    Args:
        path: the file. Bytes before the zip, as in a .vmfb, are allowed.
        limits: what it may hold.

    Raises:
        ArtifactError: it cannot be read, is no zip file, is damaged, has a member whose name leads
            out of it or occurs twice, or declares more than the limits allow.
    """
    with contextlib.ExitStack() as stack:
        try:
            source = stack.enter_context(_BoundedFile(path, limits))
            file = stack.enter_context(zipfile.ZipFile(source))
        except FileNotFoundError as error:
            raise ArtifactError(path, "there is no such file") from error
        except IsADirectoryError as error:
            raise ArtifactError(path, "it is a folder") from error
        except _MALFORMED as error:
            raise ArtifactError(path, f"it is no readable zip file: {error}") from error
        if problem := _problem(file.infolist(), source.size, limits):
            raise ArtifactError(path, problem)
        yield Archive(path, file)


def archive_bytes(members: Mapping[str, bytes]) -> bytes:
    """Write a zip file, not compressed: equal members, in equal order, give equal bytes."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as file:
        for name, data in members.items():
            info = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            info.create_system = 3  # Unix, whatever this is
            info.external_attr = 0o644 << 16
            file.writestr(info, data)
    return out.getvalue()


class _BoundedFile(io.FileIO):
    """A file that refuses a single read of more than a directory within the limits needs.

    `zipfile` reads the directory at once, makes an object of each entry in it, and believes no
    count; members are read through the same file, in pieces.
    """

    def __init__(self, path: Path, limits: ArchiveLimits) -> None:
        super().__init__(path)
        self.size = self.seek(0, io.SEEK_END)
        self._limit = max(_PIECE_BYTES, limits.members * _DIRECTORY_BYTES_PER_MEMBER)

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(0, self.size - self.tell())
        wanted = left if size is None or size < 0 else min(size, left)
        if wanted > self._limit:
            raise ValueError(f"it has a directory of {wanted} bytes")
        return super().read(wanted) or b""


def _problem(members: list[zipfile.ZipInfo], file_bytes: int, limits: ArchiveLimits) -> str | None:
    """Say what is wrong with a directory, or None."""
    if len(members) > limits.members:
        return f"it has {len(members)} members, and at most {limits.members} are read"
    seen: set[str] = set()
    for info in members:
        if problem := _member_problem(info, limits):
            return f"its member {info.orig_filename[:200]!r} {problem}"
        if info.filename in seen:
            return f"its member {info.filename[:200]!r} is in it twice"
        seen.add(info.filename)
    total = sum(info.file_size for info in members)
    if total > max(_SMALL_BYTES, _EXPANSION * file_bytes):
        return f"its {file_bytes} bytes declare to hold {total}, which no honest file does"
    if sum(info.compress_size for info in members) > file_bytes:
        return "its members overlap"
    return None


def _member_problem(info: zipfile.ZipInfo, limits: ArchiveLimits) -> str | None:
    name = info.orig_filename  # as it is written; `filename` is cut at a zero byte
    parts = name.removesuffix("/").split("/")
    if re.search(r"[\\:\x00-\x1f\x7f]", name) or {"", ".", ".."} & set(parts):
        return "has a name that leads out of it"
    if info.flag_bits & _ENCRYPTED:
        return "is encrypted"
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return f"is compressed by method {info.compress_type}, and only deflate is read"
    if info.file_size > limits.member_bytes:
        return f"declares {info.file_size} bytes, and at most {limits.member_bytes} are read"
    return None
