"""Every environment variable that the project reads; nobody else reads any."""

from __future__ import annotations

import functools
import logging
import os
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from lowering.service import FAULT_KINDS, Fault
from lowering.worker import STAGES
from npu_iree.errors import OptionError

_warn_once = functools.cache(logging.getLogger(__name__).warning)

# variable -> what it means; printed by `npu-iree settings`.
VARIABLES = {
    "NPU_IREE_DUMP": "folder for the product of every lowering stage, with a repro.sh",
    "NPU_IREE_CACHE": "folder of the compile cache, or `off`",
    "NPU_IREE_CACHE_LIMIT_BYTES": "what its entries may take; the least recently used go first",
    "NPU_IREE_FAULT": "for tests: `stage:kind:op`, a failure to commit in a compile worker",
}


@dataclass(frozen=True)
class Settings:
    """Debug and deployment settings; they never change what is computed and never enter a key.

    Attributes:
        dump: folder for the product of every lowering stage, or None.
        cache: folder of the compile cache, or None.
        cache_limit_bytes: what its entries may take.
        fault: a failure to commit in a compile worker, for tests, or None.
    """

    dump: Path | None
    cache: Path | None
    cache_limit_bytes: int
    fault: Fault | None

    @classmethod
    def read(cls) -> Settings:
        """Read the environment."""
        dump, fault = os.environ.get("NPU_IREE_DUMP"), os.environ.get("NPU_IREE_FAULT")
        cache = os.environ.get("NPU_IREE_CACHE") or _user_cache()
        return cls(
            dump=Path(dump).absolute() if dump else None,
            cache=None if cache.lower() == "off" else Path(cache).absolute(),
            cache_limit_bytes=_bytes("NPU_IREE_CACHE_LIMIT_BYTES", 4 << 30),
            fault=_fault(fault) if fault else None,
        )


def _user_cache() -> str:
    """Return where users keep caches; `off` where nobody knows, as for an unknown user id."""
    try:
        return platformdirs.user_cache_dir("npu_iree")
    except RuntimeError as error:
        _warn_once("nothing is cached, as NPU_IREE_CACHE is not set: %s", str(error))
        return "off"


def turn_cache_off() -> None:
    """Compile everything anew in this process, whatever the user has set."""
    os.environ["NPU_IREE_CACHE"] = "off"


def _fault(text: str) -> Fault:
    match text.split(":", 2):
        case [stage, kind, op] if stage in STAGES and kind in FAULT_KINDS and op:
            return Fault(stage, kind, op)
    stages, kinds = ", ".join(STAGES), ", ".join(FAULT_KINDS)
    raise OptionError(f"NPU_IREE_FAULT is `stage:kind:op` of {stages}; {kinds}; not {text!r}")


def _bytes(name: str, default: int) -> int:
    text = os.environ.get(name)
    if not text:
        return default
    if not text.isdecimal():
        raise OptionError(f"{name} is a number of bytes, not {text!r}")
    return int(text)


def rows() -> list[tuple[str, str, str]]:
    """Return (variable, value, meaning) of every setting, for the command line."""
    return [(name, os.environ.get(name, ""), text) for name, text in VARIABLES.items()]
