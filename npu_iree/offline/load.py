"""`npu_iree.load`: an offline artifact, opened on a device, as a callable."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lowering.artifact import Artifact
from lowering.cpu import missing_features
from lowering.errors import first_line
from lowering.manifest import Call, Manifest
from lowering.vmfb import unpack
from npu_iree.device import Device, open_device
from npu_iree.errors import ArgumentError, ArtifactError, DeviceError, TargetError
from npu_iree.executable import Executable
from npu_iree.offline.declarations import check_declarations, check_manifest
from npu_iree.offline.entry import LoadedEntry
from npu_iree.offline.parameters import Parameters
from npu_iree.offline.states import States
from npu_iree.targets import Target, find_target
from npu_iree.transfers import Transfer, is_watched, record
from npu_iree.untraced import untraced

ParameterSource = str | os.PathLike[str] | Mapping[str, torch.Tensor]


def load(
    path: str | os.PathLike[str],
    device: Device | Target | str | None = None,
    *,
    params: ParameterSource | None = None,
) -> LoadedProgram:
    """Load what `npu-iree compile` wrote.

    Needs torch and iree-base-runtime, and no compiler. An artifact is a program: like any program,
    it is to be loaded only if you trust whoever wrote it. It has no gradients: inputs that require
    them are taken, and the results do not. Its parameter file is mapped: replace it by a copy
    beside it that is renamed, not by writing to it.

    Args:
        path: the artifact, a `.vmfb`.
        device: a device or target to run it on; by default the target it was compiled for.
        params: other weights than those it was compiled with: a `.safetensors` or `.irpa` file, or
            a `state_dict`. By default, the file that was written beside the artifact; that is also
            where buffers come from that no `state_dict` has.

    Returns:
        A callable: `model(*args, **kwargs)` for an artifact with one entry point, `model["name"]`
        or `model.name` for one with several.

    Raises:
        ArtifactError: the artifact or its parameters are missing, damaged, of another format or not
            for each other.
        TargetError: it is for another target or CPU than there is here.
    """
    path = Path(path)
    manifest, module = read_artifact(path)
    opened = _device_for(path, manifest, device)
    if params is None:
        parameters = Parameters.beside(path, manifest)
    elif not manifest.parameter_file:
        raise ArtifactError(path, "its parameters are compiled in (--params embed)")
    elif isinstance(params, Mapping):
        parameters = Parameters.from_tensors(params, manifest).completed(path, manifest)
    else:
        parameters = Parameters.from_file(Path(params), manifest).completed(path, manifest)
    return LoadedProgram(path, manifest, module, opened, parameters)


def read_artifact(path: Path) -> tuple[Manifest, bytes]:
    """Return what an artifact says of itself, checked, and its module.

    Raises:
        ArtifactError: it is missing, damaged, or of another format.
    """
    manifest, module = unpack(path)
    try:
        check_manifest(manifest)
    except ValueError as error:
        raise ArtifactError(path, str(error)) from error
    return manifest, module


def _device_for(path: Path, manifest: Manifest, device: Device | Target | str | None) -> Device:
    """Open the device that an artifact runs on, if this is the machine for it."""
    if lacking := missing_features(manifest.cpu_features):
        raise TargetError(
            f"{path} was compiled for a CPU with {', '.join(lacking)}, which this one does not "
            "have. Compile it for an older one: npu-iree compile --cpu x86-64-v3 ..."
        )
    if isinstance(device, Device):
        target = device.target
    else:
        wanted = manifest.target if device is None else device
        target = wanted if isinstance(wanted, Target) else find_target(wanted)
    if target.driver.partition("://")[0] != manifest.driver.partition("://")[0]:
        raise TargetError(
            f"{path} was compiled for target {manifest.target!r} (driver {manifest.driver}); "
            f"{target.name!r} has the driver {target.driver}"
        )
    return device if isinstance(device, Device) else open_device(target)


class LoadedProgram:
    """An artifact on a device. Thread-safe.

    Attributes:
        path: its file.
        manifest: what it says of itself.
        device: where it runs.
        entries: its entry points, by name.
    """

    def __init__(
        self, path: Path, manifest: Manifest, module: bytes, device: Device, parameters: Parameters
    ) -> None:
        self.path, self.manifest, self.device = path, manifest, device
        entries = {name: call.entry_point for name, call in manifest.entries.items()}
        try:
            artifact = Artifact(path.name, module, entries, manifest.flags)
            executable = Executable(device, artifact)
            check_declarations(executable, manifest)
            if any(e.signature.parameters for e in entries.values()):
                executable.load(_memories(device, manifest, parameters, path.name))
        except (ValueError, RuntimeError, KeyError, DeviceError) as error:
            said = first_line(error.__cause__ or error)
            raise ArtifactError(path, f"IREE cannot load it: {said}") from error
        try:
            if unknown := [n for n in manifest.states if n not in parameters.tensors]:
                raise ValueError(f"there is no state {unknown[0][:80]!r}")
            states = States({n: parameters.tensors[n] for n in manifest.states})
            self.entries = {
                name: LoadedEntry(name, call, executable, device, parameters.tensors, states)
                for name, call in manifest.entries.items()
            }
        except ValueError as error:
            raise ArtifactError(path, f"its manifest makes no sense: {error}") from error

    @untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the entry point, if there is one only; see `LoadedEntry.__call__`."""
        return self.only()(*args, **kwargs)

    @untraced
    def submit(self, *args: Any, **kwargs: Any) -> Any:
        """Call the entry point without waiting, if there is one only; see `LoadedEntry.submit`."""
        return self.only().submit(*args, **kwargs)

    def __getitem__(self, name: str) -> LoadedEntry:
        if name not in self.entries:
            raise ArgumentError(
                f"{self.path} has no entry point {name!r}; there are: {self._names()}"
            )
        return self.entries[name]

    def __getattr__(self, name: str) -> LoadedEntry:
        entries = self.__dict__.get("entries", {})
        if name not in entries:
            there = ", ".join(entries) or "none"
            raise AttributeError(f"a loaded program has no {name!r}; its entry points are: {there}")
        found: LoadedEntry = entries[name]
        return found

    def only(self) -> LoadedEntry:
        """Return the entry point, if there is one only.

        Raises:
            ArgumentError: there are several.
        """
        if len(self.entries) > 1:
            raise ArgumentError(
                f"{self.path} has several entry points ({self._names()}); call one by its name"
            )
        return next(iter(self.entries.values()))

    def _names(self) -> str:
        return ", ".join(self.entries)

    def __repr__(self) -> str:
        return f"<{self.path.name} on {self.device.target.name}: {self._names()}>"


def _memories(
    device: Device, manifest: Manifest, parameters: Parameters, owner: str
) -> dict[str, Any]:
    """Hand the parameters over to IREE, and enter them into the ledger."""
    bound = {n for call in manifest.entries.values() for n in _bound_names(call, manifest)}
    memories = {}
    for name, tensor in parameters.tensors.items():
        if name in bound:
            if is_watched():
                mode = device.crossing_mode
                record(Transfer("h2d", mode, tensor.nbytes, name, owner, "", "bound at load"))
            memories[name] = device.memory.parameter(tensor)
    return memories


def _bound_names(call: Call, manifest: Manifest) -> Sequence[str]:
    states = set(manifest.states)
    return (
        [p.name for p in manifest.parameters if p.name not in states]
        if call.function.parameters
        else []
    )
