"""A bundle: the graphs and artifacts that were built for one model, in one zip file (`.npub`).

    bundle.json               what is in it, who wrote it, for which target and CPU
    graphs/<digest>.txt       the canonical text of each captured graph
    artifacts/<digest>.npua   a compiled region each, as an entry of the cache

It is looked into like a cache, by content: a graph by its text, a region by its program, flags and
target. Who compiled it is told, and not compared. It holds machine code: use bundles of
those whom you would let run programs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lowering.archive import archive_bytes, open_archive
from lowering.cache import SUFFIX as ENTRY_SUFFIX
from lowering.cache import Entry
from lowering.capture import CapturedGraph
from lowering.cpu import missing_features
from lowering.digest import bytes_digest, text_digest
from lowering.errors import ArtifactError
from lowering.files import write_atomically
from lowering.key import CacheKey
from lowering.record import GraphRecord, Healed

FORMAT = 1
SUFFIX = ".npub"
MANIFEST = "bundle.json"
_MANIFEST_BYTES = 32 << 20  # as objects, JSON takes up to twenty times its size


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What a bundle was made with and for.

    Attributes:
        versions: package -> version, of those that wrote it.
        target: name of the target.
        cpu_features: what a CPU must have to run its code (`lowering.cpu`).
        capabilities: digest of the target's capability table.
        options: the options of `torch.compile`, as text.
    """

    versions: Mapping[str, str]
    target: str
    cpu_features: tuple[str, ...]
    capabilities: str
    options: Mapping[str, str]


class Bundle:
    """A bundle that was saved before. Its file may be replaced meanwhile, and is then refused.

    Attributes:
        path: the file.
        origin: what it was made with and for.
        graphs: its graphs, by the digest of their text.
    """

    def __init__(self, path: Path) -> None:
        """Read the manifest.

        Raises:
            ArtifactError: it is damaged or of another format.
        """
        self.path = path
        with open_archive(path) as archive:
            manifest = _manifest(path, archive.read(MANIFEST, _MANIFEST_BYTES))
        try:
            self.origin = Origin(
                versions=_texts(manifest["versions"]),
                target=str(manifest["target"]),
                cpu_features=tuple(map(str, manifest["cpu_features"])),
                capabilities=str(manifest["capabilities"]),
                options=_texts(manifest["options"]),
            )
            graphs = [GraphRecord.from_json(row) for row in manifest["graphs"]]
            self.graphs = {record.digest: record for record in graphs}
            self._sums = _texts(manifest["files"])
            keys = {d: CacheKey(_texts(parts)) for d, parts in manifest["artifacts"].items()}
            self.artifacts = {key.identity: digest for digest, key in keys.items()}
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise ArtifactError(path, f"its manifest makes no sense: {error!r}") from error

    def refuse_unless_for(self, target: str) -> None:
        """Check that it is of use for a target on this machine.

        Raises:
            ArtifactError: it was saved for another target, or for a CPU that this is not.
        """
        if self.origin.target != target:
            raise ArtifactError(
                self.path, f"it was saved for target {self.origin.target!r}, and this is {target!r}"
            )
        if lacking := missing_features(self.origin.cpu_features):
            raise ArtifactError(
                self.path,
                f"its code is for a CPU with {', '.join(lacking)}, which this one does not have",
            )

    def healed(self, captured: CapturedGraph, text: str) -> Healed | None:
        """Return what was found out about a graph when it was saved; None: it is not in here.

        Raises:
            ArtifactError: the manifest contradicts the graph.
        """
        record = self.graphs.get(text_digest(text))
        try:
            return record.healed(captured) if record is not None else None
        except ValueError as error:
            raise ArtifactError(self.path, f"its manifest makes no sense: {error}") from error

    def entry(self, key: CacheKey) -> Entry | None:
        """Return the compiled region of a key, whoever compiled it, or None.

        Raises:
            ArtifactError: it is damaged.
        """
        digest = self.artifacts.get(key.identity)
        if digest is None:
            return None
        name = _artifact_name(digest)
        try:
            entry = Entry.from_bytes(self._read(name))
        except ValueError as error:
            raise ArtifactError(self.path, f"its member {name!r} is damaged: {error}") from error
        if entry.key.identity != key.identity:
            raise ArtifactError(self.path, f"its member {name!r} is not what its manifest says")
        return entry

    def text(self, digest: str) -> str:
        """Return the canonical text of one of its graphs.

        Raises:
            ArtifactError: it is damaged.
        """
        return self._read(_graph_name(digest)).decode(errors="replace")

    def _read(self, name: str) -> bytes:
        with open_archive(self.path) as archive:
            data = archive.read(name)
        if bytes_digest(data) != self._sums.get(name):
            raise ArtifactError(self.path, f"its member {name!r} is not what its manifest says")
        return data


@dataclass(frozen=True)
class BuiltGraph:
    """A graph with all that a bundle keeps of it.

    Attributes:
        record: what was decided.
        text: its canonical text.
        entries: its compiled regions, by name.
    """

    record: GraphRecord
    text: str
    entries: Mapping[str, Entry]


def write_bundle(path: Path, origin: Origin, graphs: Sequence[BuiltGraph]) -> None:
    """Write a bundle: all of it or nothing, and the same bytes for the same content.

    Raises:
        ArtifactError: the file cannot be written.
    """
    try:
        write_atomically(path, bundle_bytes(origin, graphs))
    except OSError as error:
        raise ArtifactError(path, f"it cannot be written: {error}") from error


def bundle_bytes(origin: Origin, graphs: Sequence[BuiltGraph]) -> bytes:
    """Return the bytes of a bundle's file."""
    entries = {e.key.digest: e for graph in graphs for e in graph.entries.values()}
    members = {_graph_name(g.record.digest): g.text.encode() for g in graphs}
    members |= {_artifact_name(d): entry.to_bytes() for d, entry in sorted(entries.items())}
    manifest = {
        "format": FORMAT,
        **asdict(origin),
        "graphs": [g.record.to_json() for g in {g.record.digest: g for g in graphs}.values()],
        "artifacts": {digest: dict(entry.parts) for digest, entry in sorted(entries.items())},
        "files": {name: bytes_digest(data) for name, data in members.items()},
    }
    return archive_bytes({MANIFEST: json.dumps(manifest, indent=1).encode(), **members})


def needed_features(graphs: Sequence[BuiltGraph]) -> tuple[str, ...]:
    """Return what a CPU must have to run graphs."""
    entries = [entry for graph in graphs for entry in graph.entries.values()]
    return tuple(sorted({feature for entry in entries for feature in entry.cpu_features}))


def _manifest(path: Path, data: bytes) -> Mapping[str, Any]:
    try:
        manifest = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(path, f"its manifest cannot be read: {error}") from error
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found != FORMAT:
        writer = manifest.get("versions") if isinstance(manifest, dict) else None
        raise ArtifactError(
            path,
            f"it has format {found!r}, and this version of npu_iree reads {FORMAT} "
            f"(it was written by {writer!r}); save it again",
        )
    return dict(manifest)


def _texts(table: Mapping[object, object]) -> dict[str, str]:
    return {str(name): str(text) for name, text in table.items()}


def _graph_name(digest: str) -> str:
    return f"graphs/{digest}.txt"


def _artifact_name(digest: str) -> str:
    return f"artifacts/{digest}{ENTRY_SUFFIX}"
