"""Parameters of an artifact: found by name in a file or in tensors, checked, ready to be bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import torch

from lowering.dtypes import DTYPES, dtype_name
from lowering.files import place_behind
from lowering.manifest import Manifest, Parameter
from lowering.tensor_digest import is_same_value, tensor_digest
from npu_iree.errors import ArgumentError, ArtifactError
from npu_iree.host_memory import check_memory
from npu_iree.offline.parameter_files import Stored, read_parameters


class Parameters:
    """The parameters of an artifact, found and checked, ready to be bound.

    Attributes:
        tensors: by the name that the artifact knows them by.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors

    @classmethod
    def beside(
        cls, artifact: Path, manifest: Manifest, wanted: Sequence[Parameter] | None = None
    ) -> Parameters:
        """Take them from the file that was written with the artifact, and check it whole.

        Args:
            artifact: its file.
            manifest: what it says of itself.
            wanted: those that are taken and checked; by default all.

        Raises:
            ArtifactError: the file is not there, or it is not the one that was written.
        """
        wanted = manifest.parameters if wanted is None else wanted
        if not manifest.parameter_file or not wanted:
            return cls({})
        name = manifest.parameter_file
        if Path(name).name != name or name in (".", "..") or not name.isprintable():
            raise ArtifactError(artifact, f"its parameter file {name[:200]!r} is not beside it")
        file = file_beside(artifact, name)
        found = cls._read(file, manifest, lambda stored: wanted)
        wrong = [p.name for p in wanted if tensor_digest(found.tensors[p.name]) != p.sha256]
        if wrong:
            raise ArtifactError(
                file,
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
        return cls._read(path, manifest, lambda stored: _wanted(manifest, stored))

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor], manifest: Manifest) -> Parameters:
        """Take a copy of tensors, e.g. of a `state_dict`.

        Raises:
            ArtifactError: a tensor is missing, extra or misshapen (names them all), or has no
                values, or is not dense.
        """
        for name, tensor in tensors.items():
            if not isinstance(tensor, torch.Tensor):
                raise ArtifactError("params", f"{name} is no tensor but {type(tensor).__name__}")
            _check_values(name, tensor)
        stored = {
            n: Stored(dtype_name(t.dtype), tuple(t.shape), t.nbytes) for n, t in tensors.items()
        }
        wanted = _wanted(manifest, stored)
        chosen = _choose("params", stored, manifest, wanted)
        _check_ties("params", wanted, {n: tensors[n] for n, _ in _tied(wanted, tensors)})
        dense = torch.contiguous_format
        return cls(
            {
                p.name: tensors[chosen[p.name]].detach().cpu().clone(memory_format=dense)
                for p in wanted
            }
        )

    @classmethod
    def _read(
        cls,
        path: Path,
        manifest: Manifest,
        choose: Callable[[Mapping[str, Stored]], Sequence[Parameter]],
    ) -> Parameters:
        stored, data = read_parameters(path)
        wanted = choose(stored)
        chosen = _choose(path, stored, manifest, wanted)
        tensors = {p.name: _tensor(data, stored[chosen[p.name]], p) for p in wanted}
        wrong = [
            n
            for n, t in tensors.items()
            if (d := stored[chosen[n]].digest) and d != tensor_digest(t)
        ]
        if wrong:
            raise ArtifactError(path, f"corrupted (the checksum differs): {_listed(wrong)}")
        tied = {n: _tensor(data, stored[n], p) for n, p in _tied(wanted, stored)}
        _check_ties(path, wanted, tied)
        return cls(tensors)

    def completed(self, artifact: Path, manifest: Manifest) -> Parameters:
        """Add what no `state_dict` has, and was not given, from the file beside the artifact.

        Raises:
            ArtifactError: as `beside`.
        """
        left = [p for p in manifest.parameters if p.name not in self.tensors]
        return Parameters({**self.tensors, **self.beside(artifact, manifest, left).tensors})


def _check_values(name: str, tensor: torch.Tensor) -> None:
    if tensor.device.type == "meta":
        raise ArtifactError("params", f"{name} is on meta, where it has no values")
    if tensor.device.type == "cpu" or tensor.layout is not torch.strided:
        try:
            check_memory(tensor, name)
        except ArgumentError as error:
            raise ArtifactError("params", str(error)) from error


def file_beside(artifact: Path, name: str) -> Path:
    """Return the file of a name beside the artifact that a link leads to, or beside the link.

    What is written goes there; beside the link there may be that of another version.
    """
    file = place_behind(artifact).with_name(name)
    return file if file.exists() else artifact.with_name(name)


def _wanted(manifest: Manifest, known: Collection[str]) -> list[Parameter]:
    """Return the parameters that other weights must hold, and those that they hold anyway."""
    return [
        p
        for p in manifest.parameters
        if p.is_saved or any(n in known for n in (p.name, *p.aliases))
    ]


def _choose(
    path: Path | str,
    stored: Mapping[str, Stored],
    manifest: Manifest,
    wanted: Sequence[Parameter],
) -> dict[str, str]:
    """Find each parameter under one of its names; say all that is wrong at once."""
    problems: list[str] = []
    chosen: dict[str, str] = {}
    for parameter in wanted:
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


def _tied(wanted: Sequence[Parameter], known: Collection[str]) -> list[tuple[str, Parameter]]:
    """Return those names that are known of parameters that have several."""
    return [(n, p) for p in wanted if p.aliases for n in (p.name, *p.aliases) if n in known]


def _check_ties(
    path: Path | str, wanted: Sequence[Parameter], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Refuse tensors that differ where the artifact has one: it would not be what was trained."""
    for parameter in wanted:
        same = [n for n in (parameter.name, *parameter.aliases) if n in tensors]
        if any(not is_same_value(tensors[same[0]], tensors[n]) for n in same[1:]):
            raise ArtifactError(
                path, f"{', '.join(same)} are one tensor in the artifact, and differ here"
            )


def _misfit(stored: Stored, parameter: Parameter) -> tuple[str, str] | None:
    if stored.dtype is not None and stored.dtype != parameter.dtype:
        return "of another dtype", f"is {stored.dtype}"
    if stored.shape is not None and stored.shape != parameter.shape:
        return "misshapen", f"is {list(stored.shape)}"
    if stored.nbytes != math.prod(parameter.shape) * DTYPES[parameter.dtype].itemsize:
        return "misshapen", f"has {stored.nbytes} bytes"
    return None


def _kind(parameter: Parameter) -> str:
    return f"{list(parameter.shape)} {parameter.dtype}"


def _tensor(data: torch.Tensor, stored: Stored, parameter: Parameter) -> torch.Tensor:
    dtype = DTYPES[parameter.dtype]
    bytes_ = data[stored.begin : stored.begin + stored.nbytes]
    if bytes_.data_ptr() % dtype.itemsize:
        bytes_ = bytes_.clone()
    return bytes_.view(dtype).reshape(parameter.shape)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return ", ".join(names[:10]) + more
