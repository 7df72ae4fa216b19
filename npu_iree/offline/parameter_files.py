"""Files of parameters, `.safetensors` and `.irpa`: written as a whole, mapped, and never trusted.

Each tensor's place is checked against the file before a byte of it is read: IREE's own reader of
archives crashes on a header whose numbers overflow.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from iree.runtime import _binding as hal

from lowering.dtypes import DTYPES, dtype_name
from lowering.files import is_written_through, replacement
from lowering.tensor_digest import memory_of, tensor_digest
from npu_iree.errors import ArtifactError

_DIGESTS = "npu_iree.sha256"
_HEADER_BYTES = 100 << 20
# dtype as safetensors writes it -> as we do.
_SAFETENSORS_DTYPES = {
    "F16": "f16",
    "BF16": "bf16",
    "F32": "f32",
    "F64": "f64",
    "I8": "i8",
    "I16": "i16",
    "I32": "i32",
    "I64": "i64",
    "U8": "u8",
    "BOOL": "bool",
    "C64": "c64",
}
# IREE's `schemas/parameter_archive.h`, version 0; packed, little-endian. Ranges are (offset,
# length) pairs. Header: magic, version (major, minor), own size, next header, flags, number of
# entries, and the ranges of entries, names and storage.
_ARCHIVE = struct.Struct("<4sHHQQQQ6Q")
_MAGIC = b"IRPA"
# Entry: own size, kind, flags, the ranges of its name and metadata, alignment; then, of data, the
# range of its bytes.
_ENTRY = struct.Struct("<QIQ4QQ")
_RANGE = struct.Struct("<QQ")
_SKIPPED, _DATA = 0, 2
_ENTRY_ALIGNMENT = 16


@dataclass(frozen=True)
class Stored:
    """A tensor of a file, or one at hand.

    Attributes:
        dtype: its name in `lowering.dtypes`; None where the file does not say (`.irpa`).
        shape: its sizes; None where the file does not say.
        nbytes: how long it is.
        begin: where in the file its bytes begin.
        digest: the checksum that the file has of it, if any.
    """

    dtype: str | None
    shape: tuple[int, ...] | None
    nbytes: int
    begin: int = 0
    digest: str | None = None


def save_parameters(tensors: Mapping[str, torch.Tensor], path: str | os.PathLike[str]) -> None:
    """Write parameters to a file that `npu_iree.load(..., params=path)` binds.

    Args:
        tensors: by name, e.g. a model's `state_dict()`; of several names of one tensor, the first
            is written.
        path: ends in `.safetensors` (with a checksum of each tensor) or `.irpa`. It is there as a
            whole or, if this fails, as it was.

    Raises:
        ArtifactError: it cannot be written, has another ending, or one of them is no tensor.
    """
    path = Path(path)
    if path.suffix not in _FORMATS:
        raise ArtifactError(path, f"parameters are written as {' or '.join(_FORMATS)}")
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise ArtifactError(path, f"{name!r} is no tensor but of {type(tensor).__name__}")
    dense = {name: _dense(tensor) for name, tensor in _once(tensors).items()}
    if is_written_through(path):
        raise ArtifactError(path, "parameters are written to a file, and it is none")
    try:
        with replacement(path) as scratch:
            permissions = scratch.stat().st_mode  # as for any file; the writers give fewer
            _FORMATS[path.suffix].write(dense, scratch)
            scratch.chmod(permissions)
    except OSError as error:
        raise ArtifactError(path, f"it cannot be written: {error}") from error


def read_parameters(path: Path) -> tuple[dict[str, Stored], torch.Tensor]:
    """Say what a `.safetensors` or `.irpa` file holds, and map its bytes.

    Returns:
        each tensor by its name, all within the file; and the file, [its length] u8, read-only.

    Raises:
        ArtifactError: it cannot be read, has another ending, or makes no sense.
    """
    if path.suffix not in _FORMATS:
        raise ArtifactError(path, f"parameters are read from {' or '.join(_FORMATS)} files")
    try:
        with path.open("rb") as file:
            if not os.fstat(file.fileno()).st_size:
                raise ArtifactError(path, "it is empty")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        found = _FORMATS[path.suffix].read(path, data)
    except OSError as error:
        raise ArtifactError(path, f"it cannot be read: {error.strerror}") from error
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise ArtifactError(path, f"its header makes no sense: {error}") from error
    with warnings.catch_warnings():  # the file is mapped for reading, and nobody writes to it
        warnings.filterwarnings("ignore", message=".*not writable")
        return found, torch.frombuffer(data, dtype=torch.uint8)


def holds(path: Path, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Say whether a file of parameters holds these and no others.

    Raises:
        ArtifactError: as of `read_parameters`.
    """
    stored, data = read_parameters(path)
    written = _once(tensors)
    return stored.keys() == written.keys() and all(
        torch.equal(data[s.begin : s.begin + s.nbytes], _bytes_of(_dense(written[name])))
        for name, s in stored.items()
    )


def _once(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    first: dict[object, str] = {}
    places = {n: memory_of(t) if t.numel() else n for n, t in tensors.items()}
    return {n: t for n, t in tensors.items() if first.setdefault(places[n], n) == n}


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _write_safetensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write the format as its own description has it: a length, JSON, and the bytes without gaps.

    The bytes begin, and so each tensor lies, where no element is out of its alignment.
    """
    names = {ours: theirs for theirs, ours in _SAFETENSORS_DTYPES.items()}
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header: dict[str, Any] = {
        "__metadata__": {_DIGESTS: json.dumps({n: tensor_digest(t) for n, t in ordered})}
    }
    end = 0
    for name, tensor in ordered:
        dtype = dtype_name(tensor.dtype)
        if dtype not in names:
            raise ArtifactError(path.name, f"a .safetensors file holds no {dtype}: {name}")
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": names[dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            file.write(_bytes_of(tensor).numpy().data)


def _read_safetensors(path: Path, data: mmap.mmap) -> dict[str, Stored]:
    """Read what a `.safetensors` file says it holds, and check that it does.

    Source: the format's own description: 8 bytes of length, little-endian, then JSON.
    """
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(len(data) - 8, _HEADER_BYTES):
        raise ArtifactError(path, "it is truncated or no .safetensors file")
    header = json.loads(data[8 : 8 + length])
    digests = json.loads(header.pop("__metadata__", {}).get(_DIGESTS, "{}"))
    found = {}
    for name, row in header.items():
        dtype = _SAFETENSORS_DTYPES.get(row["dtype"], str(row["dtype"]))
        begin, end = (8 + length + int(offset) for offset in row["data_offsets"])
        shape = tuple(map(int, row["shape"]))
        if min(shape, default=0) < 0 or not 8 + length <= begin <= end <= len(data):
            raise ArtifactError(path, f"corrupted: {name} lies outside of the file (truncated?)")
        if dtype in DTYPES and end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
            raise ArtifactError(
                path, f"corrupted: {name} is {list(shape)} {dtype} in {end - begin} bytes"
            )
        found[name] = Stored(dtype, shape, end - begin, begin, digests.get(name))
    return found


def _write_irpa(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    index = hal.ParameterIndex()
    for name, tensor in tensors.items():
        index.add_buffer(name, _bytes_of(tensor).numpy())
    try:
        index.create_archive_file(str(path))
    except (RuntimeError, IndexError) as error:  # how IREE tells that a disk is full
        raise OSError(str(error)) from error


def _read_irpa(path: Path, data: mmap.mmap) -> dict[str, Stored]:
    """Read what all archives of an `.irpa` file hold."""
    found: dict[str, Stored] = {}
    base, following = 0, 1
    while following:
        _within(path, (base, len(data)), 0, _ARCHIVE.size)
        magic, major, minor, size, following, _, count, *ranges = _ARCHIVE.unpack_from(data, base)
        if (magic, major, minor, size) != (_MAGIC, 0, 0, _ARCHIVE.size):
            raise ArtifactError(path, "it is no IREE parameter archive, or of another version")
        pairs = zip(ranges[::2], ranges[1::2], strict=True)
        entries, names, storage = (_within(path, (base, len(data)), *pair) for pair in pairs)
        for name, stored in _read_entries(path, data, count, entries, names, storage):
            if name in found:
                raise ArtifactError(path, f"it holds {name} twice")
            found[name] = stored
        base += following
    return found


def _read_entries(
    path: Path,
    data: mmap.mmap,
    count: int,
    entries: tuple[int, int],
    names: tuple[int, int],
    storage: tuple[int, int],
) -> Iterator[tuple[str, Stored]]:
    at, end = entries
    for _ in range(count):
        _within(path, (at, end), 0, _ENTRY.size)
        size, kind, _, *ranges, _ = _ENTRY.unpack_from(data, at)
        size = max(size, _ENTRY.size)
        _within(path, (at, end), 0, size)
        begin, stop = _within(path, names, *ranges[:2])
        name = data[begin:stop].decode()
        if kind == _DATA:
            _within(path, (at, at + size), _ENTRY.size, _RANGE.size)
            begin, stop = _within(path, storage, *_RANGE.unpack_from(data, at + _ENTRY.size))
            yield name, Stored(None, None, stop - begin, begin)
        elif kind != _SKIPPED:
            raise ArtifactError(path, f"the bytes of {name} are not in the file")
        at += -(-size // _ENTRY_ALIGNMENT) * _ENTRY_ALIGNMENT


def _within(path: Path, outer: tuple[int, int], offset: int, length: int) -> tuple[int, int]:
    """Return where a range begins and ends that is given by its offset in another."""
    begin, end = outer[0] + offset, outer[0] + offset + length
    if end > outer[1] and length:
        raise ArtifactError(path, "corrupted: it tells of bytes outside of the file (truncated?)")
    return (begin, end) if length else (outer[0], outer[0])


@dataclass(frozen=True)
class _Format:
    """How files of one ending are written and read."""

    write: Callable[[Mapping[str, torch.Tensor], Path], None]
    read: Callable[[Path, mmap.mmap], dict[str, Stored]]


_FORMATS = {
    ".irpa": _Format(_write_irpa, _read_irpa),
    ".safetensors": _Format(_write_safetensors, _read_safetensors),
}
