"""The key of a compiled program: everything that may change its bytes, each part labelled."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from lowering.canonical import canonical_text
from lowering.cpu import host_cpu
from lowering.digest import file_digest, sources_digest, text_digest
from lowering.kernels import Kernel, used_kernels
from lowering.program import Program
from lowering.target import CompileTarget, FlagSet

PACKAGES = ("torch", "torch-mlir", "iree-base-compiler")
# What a module is; the other parts say who compiled it, and where.
IDENTITY = ("program", "kernels", "parameters", "given", "rebind", "flags", "target")

# `--a=spec.mlir`, `--b=scope=weights.irpa`, `--c=library.mlir@entry`, `--d=pass{file=spec.mlir}`
_PARTS_OF_A_FLAG = re.compile(r"[=@,(){}\s]+")


@dataclass(frozen=True)
class CacheKey:
    """Labelled parts, and the digest of them all; prints itself.

    Attributes:
        parts: label -> text. Long parts (the program) are digests.
    """

    parts: Mapping[str, str]

    @property
    def identity(self) -> tuple[str, ...]:
        """What is compiled and for what, whoever compiles it."""
        return tuple(self.parts.get(label, "") for label in IDENTITY)

    @property
    def digest(self) -> str:
        """The name of the entry: SHA-256 of the parts, in hexadecimal."""
        text = json.dumps(dict(sorted(self.parts.items())))
        return text_digest(text)

    def differences(self, other: Mapping[str, str]) -> list[str]:
        """Name the parts in which another key differs."""
        labels = sorted({*self.parts, *other})
        return [label for label in labels if self.parts.get(label) != other.get(label)]

    def __str__(self) -> str:
        lines = [f"{label}: {text}" for label, text in sorted(self.parts.items())]
        return "\n".join([self.digest, *lines])


def program_key(
    program: Program,
    target: CompileTarget,
    flags: FlagSet = (),
    kernels: Mapping[str, Kernel] | None = None,
    tune: str = "",
) -> CacheKey:
    """Make the key of a program for a target.

    Args:
        program: the program.
        target: what to compile for; all flag sets that may be tried are part of the key.
        flags: the user's own flags.
        kernels: the user's own kernels; those of ops that the program does not have are left out.
        tune: which settings are measured to choose among; empty: none.
    """
    flag_sets = target.flag_sets_for(program.traits, flags)
    texts = [f"{entry}:\n{canonical_text(graph)}" for entry, graph in program.graphs.items()]
    words = [flag.rpartition("=")[2] for flags in flag_sets for flag in flags]
    is_for_this_cpu = "host" in words  # a CPU, or its features, whoever writes the flag how
    return CacheKey(
        {
            "program": text_digest("\n".join(texts)),
            "kernels": json.dumps(dict(used_kernels(kernels or {}, program.ops))),
            "parameters": json.dumps(program.parameters),
            "given": json.dumps(program.given),
            "rebind": json.dumps(program.rebind),
            "flags": json.dumps(flag_sets),
            "target": target.name,
            "rewrites": json.dumps(target.rewrites),
            "cpu": host_cpu() if is_for_this_cpu else "",
            **compiler_build(),
            **({"files": json.dumps(files)} if (files := named_files(flag_sets)) else {}),
            **({"tune": tune} if tune else {}),
        }
    )


def named_files(flag_sets: Iterable[FlagSet]) -> list[tuple[str, str]]:
    """Return the files that flags name, which the compiler reads, and their digests."""
    names = {name for flags in flag_sets for flag in flags for name in _names_in(flag)}
    found = []
    for name in sorted(filter(os.path.isfile, names)):
        with contextlib.suppress(OSError):  # the compiler says what is wrong with it
            stat = os.stat(name)
            found.append((name, _digest(name, stat.st_ino, stat.st_size, stat.st_mtime_ns)))
    return found


def _names_in(flag: str) -> Iterator[str]:
    """Give all that may be a file's name in a flag; such a name may have any character."""
    words = flag.split("=")
    for rest in ("=".join(words[i:]) for i in range(1, len(words))):
        yield rest
        yield rest.rpartition("@")[0]
    yield from _PARTS_OF_A_FLAG.split(flag)


@cache
def _digest(file: str, *written: int) -> str:
    return file_digest(Path(file))


@cache
def compiler_build() -> dict[str, str]:
    """Return what compiles: versions of the packages, and a digest of our own lowering.

    Where no compiler is installed, what was compiled elsewhere still has to be looked up.
    """
    ours = sources_digest(Path(__file__).parent)
    return {**{name: package_version(name) for name in PACKAGES}, "lowering": ours}


def package_version(name: str) -> str:
    """Return the version of an installed package, or `not installed`."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
