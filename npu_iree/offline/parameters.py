"""Parameters of an artifact: written with checksums, read by mmap, checked by name."""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from iree.runtime import _binding as hal

from lowering.digest import is_same_value, tensor_digest
from lowering.dtypes import DTYPES, dtype_name
from lowering.errors import ArtifactError
from lowering.manifest import Manifest, Parameter

SUFFIXES = (".irpa", ".safetensors")
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


@dataclass(frozen=True)
class _Stored:
    """A tensor of a file: dtype and shape are None where the file does not say (.irpa)."""

    dtype: str | None
    shape: tuple[int, ...] | None
    nbytes: int
    digest: str | None = None


def save_parameters(tensors: Mapping[str, torch.Tensor], path: str | os.PathLike[str]) -> None:
    """Write parameters to a file that `npu_iree.load(..., params=path)` binds.

    Args:
        tensors: by name, e.g. a model's `state_dict()`; of several names of one tensor, the first
            is written.
        path: ends in `.safetensors` (with a checksum of each tensor) or `.irpa`. It is there as a
            whole or, if this fails, as it was.

    Raises:
        ArtifactError: it cannot be written, or has another ending.
    """
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise ArtifactError(path, f"parameters are written as {' or '.join(SUFFIXES)}")
    dense = {name: t.detach().cpu().contiguous() for name, t in _once(tensors).items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".npu-iree-", dir=path.parent) as folder:
            scratch = Path(folder) / f"parameters{path.suffix}"
            scratch.touch()
            permissions = scratch.stat().st_mode  # as for any file; the writers give fewer
            _WRITERS[path.suffix](dense, scratch)
            scratch.chmod(permissions)
            os.replace(scratch, path)
    except OSError as error:
        raise ArtifactError(path, f"it cannot be written: {error}") from error


def _once(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    seen: set[tuple[Any, ...]] = set()
    found = {}
    for name, tensor in tensors.items():
        same = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if tensor.numel() == 0 or same not in seen:
            seen.add(same)
            found[name] = tensor
    return found


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
            file.write(_bytes_of(tensor))


def _write_irpa(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    index = hal.ParameterIndex()
    for name, tensor in tensors.items():
        index.add_buffer(name, _bytes_of(tensor))
    index.create_archive_file(str(path))


def _bytes_of(tensor: torch.Tensor) -> Any:
    return tensor.reshape(-1).view(torch.uint8).numpy()


_WRITERS = {".safetensors": _write_safetensors, ".irpa": _write_irpa}


class Parameters:
    """The parameters of an artifact, found and checked, ready to be bound.

    Attributes:
        tensors: by the name that the artifact knows them by.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors

    @classmethod
    def beside(cls, artifact: Path, manifest: Manifest) -> Parameters:
        """Take them from the file that was written with the artifact, and check it whole.

        Raises:
            ArtifactError: the file is not there, or it is not the one that was written.
        """
        if not manifest.parameter_file or not manifest.parameters:
            return cls({})
        name = manifest.parameter_file
        if Path(name).name != name or name in (".", "..") or not name.isprintable():
            raise ArtifactError(artifact, f"its parameter file {name[:200]!r} is not beside it")
        found = cls.from_file(artifact.parent / name, manifest)
        wrong = [
            p.name for p in manifest.parameters if tensor_digest(found.tensors[p.name]) != p.sha256
        ]
        if wrong:
            raise ArtifactError(
                artifact.parent / name,
                f"corrupted, or of another model (the checksum differs): {_listed(wrong)}. To bind "
                "other weights than those compiled with, pass the file as params=...",
            )
        return found

    @classmethod
    def from_file(cls, path: Path, manifest: Manifest) -> Parameters:
        """Take them from a `.safetensors` or `.irpa` file; its bytes are mapped, not read.

        Raises:
            ArtifactError: it cannot be read, or a tensor is missing, extra, misshapen or
                corrupted; names them all.
        """
        if path.suffix not in SUFFIXES:
            raise ArtifactError(path, f"parameters are read from {' or '.join(SUFFIXES)} files")
        stored = _safetensors_header(path) if path.suffix == ".safetensors" else None
        index = hal.ParameterIndex()
        try:
            index.load(str(path), format=path.suffix[1:])
            views = {name: entry.file_view for name, entry in index.items()}
        except (ValueError, IndexError, RuntimeError) as error:
            raise ArtifactError(path, f"it is damaged: {_last(error)}") from error
        stored = stored or {name: _Stored(None, None, len(v)) for name, v in views.items()}
        chosen = _choose(path, stored, manifest)
        tensors = {p.name: _tensor(views[chosen[p.name]], p) for p in manifest.parameters}
        wrong = [
            n
            for n, t in tensors.items()
            if (d := stored[chosen[n]].digest) and d != tensor_digest(t)
        ]
        if wrong:
            raise ArtifactError(path, f"corrupted (the checksum differs): {_listed(wrong)}")
        _check_ties(path, manifest, {n: _tensor(views[n], p) for n, p in _tied(manifest, views)})
        return cls(tensors)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor], manifest: Manifest) -> Parameters:
        """Take a copy of tensors, e.g. of a `state_dict`.

        Raises:
            ArtifactError: a tensor is missing, extra or misshapen; names them all.
        """
        for name, tensor in tensors.items():
            if not isinstance(tensor, torch.Tensor):
                raise ArtifactError("params", f"{name} is no tensor but {type(tensor).__name__}")
        stored = {
            n: _Stored(dtype_name(t.dtype), tuple(t.shape), t.nbytes) for n, t in tensors.items()
        }
        chosen = _choose("params", stored, manifest)
        _check_ties("params", manifest, {n: tensors[n] for n, _ in _tied(manifest, tensors)})
        dense = torch.contiguous_format
        return cls(
            {
                p.name: tensors[chosen[p.name]].detach().cpu().clone(memory_format=dense)
                for p in manifest.parameters
            }
        )


def _choose(path: Path | str, stored: Mapping[str, _Stored], manifest: Manifest) -> dict[str, str]:
    """Find each parameter under one of its names; say all that is wrong at once."""
    problems: list[str] = []
    chosen: dict[str, str] = {}
    for parameter in manifest.parameters:
        names = [n for n in (parameter.name, *parameter.aliases) if n in stored]
        if not names:
            problems.append(f"missing: {parameter.name} ({_kind(parameter)})")
            continue
        chosen[parameter.name] = names[0]
        if problem := _misfit(stored[names[0]], parameter):
            problems.append(f"{problem[0]}: {names[0]} {problem[1]}, not {_kind(parameter)}")
    known = {n for p in manifest.parameters for n in (p.name, *p.aliases)}
    problems += [f"extra: {name}" for name in stored if name not in known]
    if problems:
        raise ArtifactError(path, "its tensors are not the artifact's:\n  " + "\n  ".join(problems))
    return chosen


def _tied(manifest: Manifest, known: Collection[str]) -> list[tuple[str, Parameter]]:
    """Return those names that are known of parameters that have several."""
    parameters = [p for p in manifest.parameters if p.aliases]
    return [(n, p) for p in parameters for n in (p.name, *p.aliases) if n in known]


def _check_ties(path: Path | str, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse tensors that differ where the artifact has one: it would not be what was trained."""
    for parameter in manifest.parameters:
        same = [n for n in (parameter.name, *parameter.aliases) if n in tensors]
        if any(not is_same_value(tensors[same[0]], tensors[n]) for n in same[1:]):
            raise ArtifactError(
                path, f"{', '.join(same)} are one tensor in the artifact, and differ here"
            )


def _misfit(stored: _Stored, parameter: Parameter) -> tuple[str, str] | None:
    if stored.dtype is not None and stored.dtype != parameter.dtype:
        return "of another dtype", f"is {stored.dtype}"
    if stored.shape is not None and stored.shape != parameter.shape:
        return "misshapen", f"is {list(stored.shape)}"
    if stored.nbytes != _nbytes(parameter.dtype, parameter.shape):
        return "misshapen", f"has {stored.nbytes} bytes"
    return None


def _kind(parameter: Parameter) -> str:
    return f"{list(parameter.shape)} {parameter.dtype}"


def _nbytes(dtype: str, shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count * DTYPES[dtype].itemsize


def _tensor(view: memoryview, parameter: Parameter) -> torch.Tensor:
    dtype = DTYPES[parameter.dtype]
    if len(view) == 0:
        return torch.empty(parameter.shape, dtype=dtype)
    with warnings.catch_warnings():  # the file is mapped for reading, and nobody writes to it
        warnings.filterwarnings("ignore", message=".*not writable")
        data = torch.frombuffer(view, dtype=torch.uint8)
    if data.data_ptr() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype).reshape(parameter.shape)


def _safetensors_header(path: Path) -> dict[str, _Stored]:
    """Read what a .safetensors file says it holds, and check that it does.

    Source: the format's own description: 8 bytes of length, little-endian, then JSON.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _HEADER_BYTES):
                raise ArtifactError(path, "it is truncated or no .safetensors file")
            header = json.loads(file.read(length))
        metadata = header.pop("__metadata__", {})
        digests = json.loads(metadata.get(_DIGESTS, "{}"))
        return {
            name: _stored_tensor(path, name, row, size - 8 - length, digests.get(name))
            for name, row in header.items()
        }
    except OSError as error:
        raise ArtifactError(path, f"it cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ArtifactError(path, f"its header makes no sense: {error}") from error


def _stored_tensor(path: Path, name: str, row: Any, size: int, digest: str | None) -> _Stored:
    dtype = _SAFETENSORS_DTYPES.get(row["dtype"], str(row["dtype"]))
    begin, end = map(int, row["data_offsets"])
    shape = tuple(map(int, row["shape"]))
    if min((*shape, begin), default=0) < 0 or not begin <= end <= size:
        raise ArtifactError(path, f"corrupted: {name} lies outside of the file (truncated?)")
    if dtype in DTYPES and end - begin != _nbytes(dtype, shape):
        raise ArtifactError(
            path, f"corrupted: {name} is {list(shape)} {dtype} in {end - begin} bytes"
        )
    return _Stored(dtype, shape, end - begin, digest)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return ", ".join(names[:10]) + more


def _last(error: Exception) -> str:
    return str(error).splitlines()[0].rpartition("; ")[2]
