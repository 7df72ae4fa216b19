"""Files that are written as a whole or not at all, and what is written as it is: pipes, devices."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def is_written_through(path: Path) -> bool:
    """Say whether something is there that no file may take the place of: a device, a pipe.

    So is a file that this process has open, by the name of the descriptor: it goes on in there.
    """
    is_other = path.exists() and not os.path.isfile(os.path.realpath(path))
    return is_other or _descriptor(path) is not None


def _descriptor(path: Path) -> int | None:
    """Return which of our own descriptors a path leads to, as `/dev/stdout` does on Linux."""
    ours = os.path.realpath("/proc/self/fd")
    while path.is_symlink() and path.exists():  # a link to itself does not
        if os.path.realpath(path.parent) == ours:
            return int(path.name)
        path = path.parent / path.readlink()
    return None


def place_behind(path: Path) -> Path:
    """Return the file that a link leads to, which is what is written; the link stays."""
    is_followed = path.is_symlink() and not is_written_through(path)
    return Path(os.path.realpath(path)) if is_followed else path


def _place(path: Path) -> Path:
    """Return the file that is to be replaced.

    Raises:
        OSError: it is a link that leads to itself.
    """
    place = place_behind(path)
    if place.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return place


def try_to_write(path: Path) -> None:
    """Find out whether a file, and the folders above it, can be made; nothing is left of the try.

    Raises:
        OSError: it cannot.
    """
    if is_written_through(path):
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return
    folder = next(folder for folder in _place(path).absolute().parents if folder.exists())
    with tempfile.TemporaryFile(dir=folder):
        pass


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees all of it or nothing, and a failure leaves nothing.

    Raises:
        OSError: it cannot be written.
    """
    with opened_atomically(path) as file:
        file.write(data)


@contextlib.contextmanager
def opened_atomically(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing that is there, as a whole, when the block has ended without error.

    What is no file, such as a pipe, is written as it is; a descriptor of ours, from where it is.

    Raises:
        OSError: it cannot be written.
    """
    if is_written_through(path):
        descriptor = _descriptor(path)  # to open it anew would empty its file
        with open(path if descriptor is None else os.dup(descriptor), "wb") as file:
            yield file
        return
    with replacement(path) as name, name.open("wb") as file:
        yield file


@contextlib.contextmanager
def replacement(path: Path) -> Iterator[Path]:
    """Give an empty file that takes the place of another when the block has ended without error.

    The folders above it are made.

    Raises:
        OSError: it cannot be made, or not take that place.
    """
    place = _place(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    name = place.with_name(f".{place.name}.{os.getpid()}.{secrets.token_hex(4)}")
    os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))  # less the umask
    try:
        yield name
        os.replace(name, place)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
