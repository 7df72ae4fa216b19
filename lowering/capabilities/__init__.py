"""Which ops a target runs: op x dtype x shape predicates, read from a TOML table."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from pathlib import Path

import torch
from torch import fx

from lowering.digest import text_digest
from lowering.dtypes import DTYPE_NAMES, dtype_name
from lowering.errors import NpuIreeError
from lowering.sizes import is_static

# How measured tables say that torch-mlir refuses an op, whatever its tensors.
NOT_LOWERED = "torch-mlir cannot lower it"


class CapabilityError(NpuIreeError):
    """A capability table cannot be read or says something that we do not understand."""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A case of otherwise supported ops that the target cannot run.

    Attributes:
        ops: names of the ops; empty means every op.
        dtypes: the case needs a tensor of one of these dtypes; empty means any.
        empty: the case needs a tensor with a dimension of (statically) zero.
        scalar: the case needs that no tensor has a dimension.
        dynamic: the case needs a tensor with a size that is not known.
        longer_than: the case needs a tensor with a dimension (statically) longer than this, if set.
        reason: one line for people.
    """

    ops: frozenset[str]
    dtypes: frozenset[str]
    empty: bool
    scalar: bool
    dynamic: bool
    longer_than: int | None
    reason: str

    def covers(self, op: str, tensors: Iterable[torch.Tensor]) -> bool:
        """Say whether this limit forbids `op` on tensors of these dtypes and shapes."""
        if self.ops and op not in self.ops:
            return False
        tensors = tuple(tensors)
        if self.dtypes and not any(dtype_name(t.dtype) in self.dtypes for t in tensors):
            return False
        if self.scalar and any(t.dim() for t in tensors):
            return False
        if self.dynamic and is_static(*tensors):
            return False
        if self.longer_than is not None and _longest(tensors) <= self.longer_than:
            return False
        return not self.empty or any(0 in t.shape for t in tensors if is_static(t))


@dataclass(frozen=True)
class Capabilities:
    """A target's capability table.

    Attributes:
        source: where the table was read from.
        ops: op name -> the dtypes it runs in.
        host: op name -> why it is not for the device, where more is known than its absence.
        limits: cases cut out of `ops`.
    """

    source: str
    ops: Mapping[str, frozenset[str]]
    host: Mapping[str, str]
    limits: tuple[Limit, ...]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of what the table says, wherever it was read from."""
        ops = {op: sorted(dtypes) for op, dtypes in self.ops.items()}
        rows = [
            [sorted(r.ops), sorted(r.dtypes), r.empty, r.scalar, r.dynamic, r.longer_than, r.reason]
            for r in self.limits
        ]
        text = json.dumps([ops, dict(self.host), rows], sort_keys=True)
        return text_digest(text)

    def why_not(self, op: str, tensors: Iterable[torch.Tensor]) -> str | None:
        """Return why the target cannot run `op` on these tensors, or None if it can.

        Args:
            op: op name with overload, e.g. `aten.add.Tensor`.
            tensors: every tensor that goes in or comes out (fake ones will do).
        """
        tensors = tuple(tensors)
        if op in self.host:
            return self.host[op]
        if op not in self.ops:
            return "not in the capability table of the target"
        for tensor in tensors:
            if tensor.dtype not in DTYPE_NAMES:
                return f"no device buffer holds {tensor.dtype}"
            if tensor.layout is not torch.strided:
                return f"no device buffer holds the layout {tensor.layout}"
            name = dtype_name(tensor.dtype)
            if name not in self.ops[op]:
                return f"the target does not run it in {name}"
        return next((limit.reason for limit in self.limits if limit.covers(op, tensors)), None)


def node_tensors(node: fx.Node) -> list[torch.Tensor]:
    """Return the (fake) tensors that go into and come out of `node`."""
    values = [n.meta.get("val") for n in (*node.all_input_nodes, node)]
    flat: list[torch.Tensor] = []
    for value in values:
        items = value if isinstance(value, (list, tuple)) else (value,)
        flat += [v for v in items if isinstance(v, torch.Tensor)]
    return flat


@cache
def load_capabilities(name: str) -> Capabilities:
    """Read a capability table.

    Args:
        name: a file in `lowering/capabilities`, or the path of a TOML file.

    Raises:
        CapabilityError: there is no such file, or it does not have the form described here:
            `[ops]` with `"aten.op.overload" = ["f32", ...]`, `[host]` with
            `"aten.op.overload" = "reason"`, and `[[limits]]` with `ops`, `dtypes`, `empty`,
            `scalar`, `dynamic`, `longer_than` and `reason`.
    """
    path = Path(name)
    try:
        text = (
            path.read_text()
            if path.is_absolute()
            else (resources.files("lowering.capabilities") / name).read_text()
        )
        table = tomllib.loads(text)
        return Capabilities(
            source=name,
            ops={op: frozenset(dtypes) for op, dtypes in table.get("ops", {}).items()},
            host=dict(table.get("host", {})),
            limits=tuple(_limit(row) for row in table.get("limits", ())),
        )
    except (OSError, tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise CapabilityError(f"cannot read the capability table {name!r}: {error}") from error


def _limit(row: Mapping[str, object]) -> Limit:
    unknown = set(row) - {"ops", "dtypes", "empty", "scalar", "dynamic", "longer_than", "reason"}
    if unknown:
        raise KeyError(f"unknown key {sorted(unknown)} in [[limits]]")
    ops, dtypes = row.get("ops", ()), row.get("dtypes", ())
    if not isinstance(ops, (list, tuple)) or not isinstance(dtypes, (list, tuple)):
        raise TypeError("ops and dtypes of a limit are lists")
    longer_than = row.get("longer_than")
    if longer_than is not None and not isinstance(longer_than, int):
        raise TypeError("longer_than of a limit is a number of elements")
    return Limit(
        ops=frozenset(ops),
        dtypes=frozenset(dtypes),
        empty=bool(row.get("empty", False)),
        scalar=bool(row.get("scalar", False)),
        dynamic=bool(row.get("dynamic", False)),
        longer_than=longer_than,
        reason=str(row["reason"]),
    )


def _longest(tensors: Iterable[torch.Tensor]) -> int:
    """Return the largest size that is known; 0 if none is."""
    sizes = (size for t in tensors for size in t.shape if isinstance(size, int))
    return max(sizes, default=0)
