"""A content-addressed store of compiled regions, safe between processes; no pickle.

An entry is one file: a line with the SHA-256 of the rest, a line of JSON (format, labelled key,
chosen flags), the compressed source, and the .vmfb. It is written to a temporary name and renamed,
so a reader sees all of it or nothing. What does not check is removed and rebuilt, never run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from lowering.digest import bytes_digest
from lowering.errors import CancelledError
from lowering.files import write_atomically
from lowering.key import CacheKey
from lowering.stages import CompileOptions

log = logging.getLogger(__name__)

FORMAT = 3
SUFFIX = ".npua"
_DIGEST = "[0-9a-f]" * 16  # as a pattern: how a name of ours begins
_HALF_WRITTEN = f"artifacts/.{_DIGEST}*"
_OURS = (f"artifacts/*{SUFFIX}", _HALF_WRITTEN, f"failures/{_DIGEST}", f"locks/{_DIGEST}*.lock")
_ABANDONED_S = 3600
_UNTOLD_S = 60.0  # how long another process is waited for without a word
_EXPANSION = 200  # what text of a compiler's compresses by stays far below this


@dataclass(frozen=True)
class Entry:
    """What is stored of a region.

    Attributes:
        parts: the labelled key.
        flags: the `iree-compile` flags that were chosen.
        vmfb: the module.
        source: the program in the torch dialect, to compile it again.
        cpu_features: what a CPU must have to run it.
        tuning: how the flags were chosen, if they were measured (`lowering.tuning`).
        is_lasting: whether a cache keeps it; another try may well give better flags.
    """

    parts: Mapping[str, str]
    flags: tuple[str, ...]
    vmfb: bytes
    source: str
    cpu_features: tuple[str, ...] = ()
    tuning: Mapping[str, Any] | None = None
    is_lasting: bool = True

    @property
    def options(self) -> CompileOptions:
        """What it was compiled with."""
        names = ("parameters", "given", "rebind", "kernels")
        parts = {name: json.loads(self.parts[name]) for name in names}
        return CompileOptions.from_json({"flags": self.flags, **parts})

    @property
    def key(self) -> CacheKey:
        """The key."""
        return CacheKey(self.parts)

    def to_bytes(self) -> bytes:
        """Write the entry as a file's content."""
        source = zlib.compress(self.source.encode())
        head = {
            "format": FORMAT,
            "key": dict(self.parts),
            "flags": self.flags,
            "cpu_features": self.cpu_features,
            "source_bytes": len(source),
            "tuning": self.tuning,
        }
        body = json.dumps(head, sort_keys=True).encode() + b"\n" + source + self.vmfb
        return bytes_digest(body).encode() + b"\n" + body

    @classmethod
    def from_bytes(cls, data: bytes) -> Entry:
        """Read a file's content.

        Raises:
            ValueError: it is damaged or of another format.
        """
        checksum, _, body = data.partition(b"\n")
        if bytes_digest(body).encode() != checksum:
            raise ValueError("its checksum does not match")
        line, _, data = body.partition(b"\n")
        try:
            head = json.loads(line)
            if head["format"] != FORMAT:
                raise ValueError(f"it has format {head['format']}, not {FORMAT}")
            size = head["source_bytes"]
            source = _decompressed(data[:size]).decode()
            features = tuple(head["cpu_features"])
            tuning = dict(head["tuning"]) if head.get("tuning") is not None else None
            key, flags = dict(head["key"]), tuple(head["flags"])
            return cls(key, flags, data[size:], source, features, tuning)
        except (KeyError, TypeError, zlib.error) as error:
            raise ValueError(f"it makes no sense: {error}") from error


class ArtifactCache:
    """The store, in one folder. A folder that cannot be written to is a cache that is off.

    Attributes:
        folder: where the entries are.
        limit_bytes: what they may take; the least recently used go first.
    """

    def __init__(self, folder: Path, limit_bytes: int = 4 << 30) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes
        self._is_writable = True

    def load(self, key: CacheKey) -> Entry | None:
        """Return the entry of a key, or None; a damaged entry is removed, with one log line.

        One that cannot be read just now, for want of file descriptors say, stays.
        """
        path = self.path(key.digest)
        try:
            entry = Entry.from_bytes(path.read_bytes())
            if dict(entry.parts) != dict(key.parts):
                raise ValueError("it belongs to another key")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            log.warning("cache entry %s cannot be read: %s", path.name, error)
            return None
        except (ValueError, KeyError, TypeError) as error:
            log.warning("cache entry %s is rebuilt: %s", path.name, error)
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # the order of eviction is that of last use
        return entry

    def store(self, key: CacheKey, entry: Entry) -> None:
        """Keep an entry; if that is not possible, say so once and go on without."""
        data = entry.to_bytes()
        if len(data) > self.limit_bytes:  # it would push out all others, and itself
            return
        try:
            write_atomically(self.path(key.digest), data)
        except OSError as error:
            self._give_up(error)
            return
        self.prune()

    @contextlib.contextmanager
    def lock(self, key: CacheKey, cancelled: threading.Event | None = None) -> Iterator[None]:
        """Let one process at a time compile a key; without a folder to lock in, let all."""
        path = self.folder / "locks" / f"{key.digest}.lock"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(path)
            self._wait_for(lock, cancelled.is_set if cancelled else lambda: False)
        except Timeout as error:
            raise CancelledError from error
        except OSError as error:
            self._give_up(error)
            yield
            return
        try:
            self._remove_half_written(key)
            yield
        finally:
            # Whoever waits for a lock file that is gone makes a new one, finds the entry, and
            # compiles nothing; so the file may go while others wait.
            with contextlib.suppress(OSError):
                path.unlink()
            lock.release()

    def _wait_for(self, lock: FileLock, is_cancelled: Callable[[], bool]) -> None:
        """Take a lock; after a while, say what is waited for.

        Raises:
            Timeout: nobody waits any more.
        """
        try:
            lock.acquire(timeout=_UNTOLD_S, cancel_check=is_cancelled)
        except Timeout:
            if not is_cancelled():
                log.warning(
                    "another process has been compiling the same region for %d s, and is waited "
                    "for; if none is at work, one that is stopped holds %s",
                    _UNTOLD_S,
                    lock.lock_file,
                )
            lock.acquire(cancel_check=is_cancelled)

    def _remove_half_written(self, key: CacheKey) -> None:
        """Remove what a killed process left of an entry: only the holder of its lock writes it."""
        for path in self.path(key.digest).parent.glob(f".{key.digest}*"):
            with contextlib.suppress(OSError):
                path.unlink()

    def entries(self) -> Iterator[tuple[Path, Entry]]:
        """Give the readable entries, the most recently used first."""
        for path in self._by_use():
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                yield path, Entry.from_bytes(path.read_bytes())

    def nearest(self, key: CacheKey) -> list[str] | None:
        """Name the parts in which the entry that is most like `key` differs; None: no entries."""
        differences = (key.differences(entry.parts) for _, entry in self.entries())
        return min(differences, key=len, default=None)

    def prune(self, limit_bytes: int | None = None) -> list[Path]:
        """Remove the least recently used entries until the rest fits the limit.

        Also removes what killed processes have left half-written an hour ago or more.
        """
        for path in self.folder.glob(_HALF_WRITTEN):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _ABANDONED_S:
                    path.unlink()
        limit = self.limit_bytes if limit_bytes is None else limit_bytes
        removed, total = [], 0
        for path in self._by_use():
            with contextlib.suppress(OSError):
                total += path.stat().st_size
                if total > limit:
                    path.unlink()
                    removed.append(path)
        return removed

    def damaged(self) -> list[Path]:
        """Return the files that are no readable entries."""
        readable = {path for path, _ in self.entries()}
        return [path for path in self._by_use() if path not in readable]

    def clear(self) -> int:
        """Remove all that was kept: entries, locks, repros; return how many entries there were."""
        count = len(self._by_use())
        for pattern in _OURS:  # and nothing else: the folder may be one of the user's
            for path in self.folder.glob(pattern):
                with contextlib.suppress(OSError):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        for name in ("artifacts", "failures", "locks"):
            with contextlib.suppress(OSError):
                (self.folder / name).rmdir()
        return count

    def path(self, digest: str) -> Path:
        """Return where the entry of a digest is, or would be."""
        return self.folder / "artifacts" / f"{digest}{SUFFIX}"

    def _by_use(self) -> list[Path]:
        paths = []
        for path in (self.folder / "artifacts").glob(f"*{SUFFIX}"):
            with contextlib.suppress(OSError):
                paths.append((path.stat().st_mtime_ns, path))
        return [path for _, path in sorted(paths, reverse=True)]

    def _give_up(self, error: OSError) -> None:
        if self._is_writable:
            log.warning("nothing is cached: %s cannot be written to (%s)", self.folder, error)
        self._is_writable = False


def _decompressed(data: bytes) -> bytes:
    """Decompress as much as an honest entry may hold: entries also come from elsewhere."""
    engine = zlib.decompressobj()
    text = engine.decompress(data, max(1 << 20, _EXPANSION * len(data)))
    if not engine.eof:
        raise ValueError("its source is cut short, or larger than an honest one")
    return text
