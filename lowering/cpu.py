"""Which instruction sets code for a CPU needs, may use best, and which this machine lacks."""

from __future__ import annotations

import contextlib
import contextvars
import platform
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TypeVar

from lowering.digest import text_digest

# What generated code may use, by LLVM's names; Linux writes most of them alike but for punctuation.
# Not AVX10, which Linux does not list: its first version is another name for parts of AVX-512 that
# are named beside it, and a CPU with a later one has more that is.
_CODE_FEATURE = re.compile(
    r"(s?sse.*|avx(?!10).*|amx.*|fma4?|f16c|bmi2?|lzcnt|popcnt|movbe|aes|vaes|v?pclmul(qdq)?|gfni|sha.*|tbm|xop"
    r"|sve.*|sme.*|dotprod|i8mm|bf16|fp16fml|fullfp16|lse|rdm)"  # of ARM
)
# LLVM's name -> Linux's, where they are different words.
_LINUX_NAMES = {
    "arm_64": "aarch64",
    "bmi": "bmi1",
    "dotprod": "asimddp",
    "fp16fml": "asimdfhm",
    "fullfp16": "asimdhp",
    "lse": "atomics",
    "lzcnt": "abm",
    "pclmul": "pclmulqdq",
    "rdm": "asimdrdm",
    "sha": "shani",
    "sse3": "pni",
    "sve2-aes": "sveaes",
    "sve2-bitperm": "svebitperm",
    "sve2-sha3": "svesha3",
    "sve2-sm4": "svesm4",
}
# What CPUs of a level have for certain, of what is asked for here, by LLVM's names.
# Source: the x86-64 psABI, "Micro-Architecture Levels".
_LEVELS = {f"x86-64-v{level}": frozenset({"avx2", "fma"}) for level in (3, 4)}
# What Linux calls an x86 CPU, or the parts of an ARM core's name.
_NAMES = ("model name", "CPU implementer", "CPU variant", "CPU part")
CPU_FLAG = "--iree-llvmcpu-target-cpu="
THIS_CPU = f"{CPU_FLAG}host"
_T = TypeVar("_T")
_TARGET = re.compile(
    r'#hal\.executable\.target<"llvm-cpu", "embedded-elf-(?P<arch>\w+)"[^>]*?'
    r'cpu_features = "(?P<features>[^"]*)"'
)


def best_for(features: Collection[str], table: Mapping[frozenset[str], _T]) -> _T:
    """Return the first entry of a table all of whose features a CPU has; the last needs none."""
    return next(value for needed, value in table.items() if needed.issubset(features))


def required_features(flow_asm: str) -> tuple[str, ...]:
    """Read from a module in IREE's flow dialect what its machine code will need.

    Of a feature that is named twice, the last word counts, as for LLVM: `host` names all that a CPU
    of its kind has, then what this one has, and a virtual machine may hide some of it.

    Returns:
        The architecture and LLVM's feature names, e.g. `("x86_64", "avx2", "fma")`; nothing for
        code that is for no CPU.
    """
    found: set[str] = set()
    for match in _TARGET.finditer(flow_asm):
        found.add(match["arch"])
        has = {name[1:]: name[0] == "+" for name in match["features"].split(",") if name}
        found.update(n for n, is_there in has.items() if is_there and _CODE_FEATURE.fullmatch(n))
    return tuple(sorted(found))


def missing_features(required: Iterable[str]) -> list[str]:
    """Return which of `required` this machine does not have; nothing where it cannot be known."""
    here = _features_here()
    return [name for name in required if here and _linux_name(name) not in here]


def has_here(features: Iterable[str]) -> bool:
    """Say whether this machine is known to have what code may use, by LLVM's names."""
    here = _features_here()
    return all(_linux_name(name) in here for name in features)


# LLVM's name of the CPU that is compiled for; `host` is this one.
_COMPILED_FOR = contextvars.ContextVar("compiled_for", default="host")


@contextlib.contextmanager
def compiling_for(flags: Iterable[str]) -> Iterator[None]:
    """Compile for the CPU that flags of `iree-compile` name; `known_to_have` tells of it."""
    named = [flag.removeprefix(CPU_FLAG) for flag in flags if flag.startswith(CPU_FLAG)]
    token = _COMPILED_FOR.set(named[-1] if named else "")
    try:
        yield
    finally:
        _COMPILED_FOR.reset(token)


def known_to_have(features: Collection[str]) -> bool:
    """Say whether the CPU that is compiled for has these, as far as its name tells.

    It never depends on this machine where code is compiled for another: the cache's key does not.
    """
    name = _COMPILED_FOR.get()
    if name == "host":
        return has_here(features)
    return _LEVELS.get(name, frozenset()).issuperset(features)


def cpu_name() -> str:
    """Return what this machine's CPU is called, with its architecture."""
    return f"{_told().get('model name', platform.processor())} ({platform.machine()})"


@cache
def host_cpu() -> str:
    """Return the CPU that code for `host` is for: its model, and a digest of its features."""
    if not (told := _told()):
        return platform.processor() or platform.machine()
    model = " ".join(told[name] for name in _NAMES if name in told) or platform.machine()
    return f"{model} {text_digest(_features(told))[:16]}"


@cache
def _told() -> Mapping[str, str]:
    """Return what Linux tells of the first CPU; nothing where it does not."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    cells = [line.partition("\t: ")[::2] for line in lines if "\t: " in line]
    return {name.strip(): value for name, value in reversed(cells)}


def _features(told: Mapping[str, str]) -> str:
    return told.get("flags", told.get("Features", ""))


@cache
def _features_here() -> frozenset[str]:
    told = _told()
    return frozenset(map(_plain, [platform.machine(), *_features(told).split()] if told else ()))


def _linux_name(feature: str) -> str:
    return _LINUX_NAMES.get(feature, _plain(feature))


def _plain(name: str) -> str:
    return re.sub(r"[-_.]", "", name)
