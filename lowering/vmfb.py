"""A .vmfb with a manifest inside: one file that stock IREE tools run and `npu_iree.load` loads."""

from __future__ import annotations

import io
import zipfile
from dataclasses import replace
from pathlib import Path

from lowering.archive import ArchiveLimits, open_archive
from lowering.digest import bytes_digest
from lowering.errors import ArtifactError
from lowering.manifest import MEMBER, Manifest

# The module's own members hold the weights where these are embedded; they are not read as members.
_LIMITS = ArchiveLimits(members=100_000, member_bytes=1 << 40)
_MANIFEST_BYTES = 64 << 20


def pack(module: bytes, manifest: Manifest) -> bytes:
    """Put a manifest into a module.

    IREE writes a .vmfb as a zip file; the manifest takes the place of the zip directory, and the
    new directory follows it.

    Args:
        module: what IREE wrote.
        manifest: without `module_bytes` and `module_sha256`, which are filled in.
    """
    file = io.BytesIO(module)
    with zipfile.ZipFile(file, "a") as archive:
        size = archive.start_dir
        manifest = replace(
            manifest,
            module_bytes=size,
            module_sha256=bytes_digest(memoryview(module)[:size]),
        )
        info = zipfile.ZipInfo(MEMBER, date_time=(1980, 1, 1, 0, 0, 0))
        archive.writestr(info, manifest.to_json(), zipfile.ZIP_DEFLATED)
    return file.getvalue()


def unpack(path: Path) -> tuple[Manifest, bytes]:
    """Read an artifact: its manifest, and its module, which is checked.

    Raises:
        ArtifactError: there is no such file, it is none of ours, it is damaged, or it is of
            another format.
    """
    manifest = read_manifest(path)
    with path.open("rb") as file:
        module = file.read(manifest.module_bytes)
    if bytes_digest(module) != manifest.module_sha256:
        raise ArtifactError(path, "its module is damaged: the checksum does not match")
    return manifest, module


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of an artifact.

    Raises:
        ArtifactError: as `unpack`, but for the checksum of the module.
    """
    if path.is_file() and not zipfile.is_zipfile(path):
        raise ArtifactError(path, "it is no artifact of `npu-iree compile`, or a part of one")
    with open_archive(path, _LIMITS) as archive:
        if MEMBER not in archive.names():
            raise ArtifactError(
                path, f"it has no {MEMBER}, so npu-iree compile did not write it (any .vmfb can be "
                "run with iree-run-module)"
            )  # fmt: skip
        text = archive.read(MEMBER, _MANIFEST_BYTES)
    try:
        manifest = Manifest.from_json(text.decode())
    except RecursionError as error:
        raise ArtifactError(path, "its manifest nests too deep") from error
    except ValueError as error:
        raise ArtifactError(path, str(error)) from error
    if not 0 < manifest.module_bytes <= path.stat().st_size:
        raise ArtifactError(
            path, f"its manifest speaks of a module of {manifest.module_bytes} bytes"
        )
    return manifest
