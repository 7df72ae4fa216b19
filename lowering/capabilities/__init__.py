"""Which ops a target runs: op x dtype x shape predicates, read from a TOML table."""

from __future__ import annotations

import json
import logging
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import fx

from lowering.digest import text_digest
from lowering.dtypes import DTYPE_NAMES, DTYPES, dtype_name
from lowering.errors import NpuIreeError
from lowering.sizes import is_static
from lowering.suggest import suggested, there_are

_log = logging.getLogger(__name__)
_FEW = 50  # names, which are all listed where one is wrong
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

    def why_not(
        self, op: str, inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor] = ()
    ) -> str | None:
        """Return why the target cannot run `op` on these tensors, or None if it can.

        Args:
            op: op name with overload, e.g. `aten.add.Tensor`.
            inputs: every tensor that goes in (fake ones will do).
            results: every tensor that comes out.
        """
        tensors = (*inputs, *results)
        if op in self.host:
            return self.host[op]
        if op not in self.ops:
            return "not in the capability table of the target"
        for i, tensor in enumerate(tensors):
            if tensor.dtype not in DTYPE_NAMES:
                return f"no device buffer holds {tensor.dtype}"
            if tensor.layout is not torch.strided:
                return f"no device buffer holds the layout {tensor.layout}"
            name = dtype_name(tensor.dtype)
            if name not in self.ops[op]:
                if i < len(inputs):
                    return f"the target does not run it on tensors of {name}"
                return f"a result of it is {name}, which the table does not list for it"
        return next((limit.reason for limit in self.limits if limit.covers(op, tensors)), None)


def tensors_of(nodes: Iterable[fx.Node]) -> list[torch.Tensor]:
    """Return the (fake) tensors that come out of nodes."""
    values = [node.meta.get("val") for node in nodes]
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
        file = path if path.is_absolute() else resources.files("lowering.capabilities") / name
        text = file.read_text(encoding="utf-8")
        return _table(name, tomllib.loads(text))
    except (OSError, ValueError, TypeError) as error:  # of TOML, too
        raise CapabilityError(f"cannot read the capability table {name!r}: {error}") from error


def _table(source: str, table: Mapping[str, Any]) -> Capabilities:
    """Make a table of what a file says.

    Raises:
        ValueError: it says what we do not understand.
    """
    if not table:
        raise ValueError("it is empty: there are [ops], [host] and [[limits]]")
    _refuse_unknown("section", table, ("ops", "host", "limits"))
    for section, kind in (("ops", dict), ("host", dict), ("limits", list)):
        if not isinstance(table.get(section, kind()), kind):
            raise ValueError(f"{section!r} is no {'list of tables' if kind is list else 'table'}")
    ops, host = table.get("ops", {}), table.get("host", {})
    _check_ops(source, ops, host)
    for op, reason in host.items():
        if not isinstance(reason, str):
            raise ValueError(f"[host] gives the reason for {op!r} as text, not {reason!r}")
    return Capabilities(
        source=source,
        ops={op: _names(f"[ops] {op!r}", dtypes, DTYPES) for op, dtypes in ops.items()},
        host=dict(host),
        limits=tuple(_limit(row, {*ops, *host}) for row in table.get("limits", ())),
    )


def _names(where: str, names: object, known: Iterable[str]) -> frozenset[str]:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{where} is a list of names, not {names!r}")
    _refuse_unknown(where, names, known)
    return frozenset(names)


def _refuse_unknown(where: str, names: Iterable[str], known: Iterable[str]) -> None:
    known = list(known)
    for name in names:
        if name not in known:
            say = there_are if len(known) < _FEW else suggested
            raise ValueError(f"{where}: unknown {name!r}.{say(name, known)}")


def _check_ops(source: str, ops: Mapping[str, Any], host: Mapping[str, Any]) -> None:
    """Check how ops are named; warn of those that this PyTorch has not: another version may.

    Raises:
        ValueError: a name is none of an op, or an op is in both sections.
    """
    known = set(torch._C._dispatch_get_all_op_names())
    for name in (*ops, *host):
        namespace, *rest = name.split(".")
        if len(rest) != 2 or not all((namespace, *rest)):
            raise ValueError(f"{name!r} names no op: it is 'namespace.op.overload'")
        if name in ops and name in host:
            raise ValueError(f"{name!r} is in [ops] and in [host]")
        full = f"{namespace}::{'.'.join(rest).removesuffix('.default')}"
        if namespace == "aten" and full not in known:
            hint = suggested(full, known).replace("::", ".")
            _log.warning("%s: PyTorch %s has no op %r.%s", source, torch.__version__, name, hint)


def _limit(row: Mapping[str, Any], known_ops: Iterable[str]) -> Limit:
    _refuse_unknown("a key of [[limits]]", row, (field.name for field in fields(Limit)))
    if not isinstance(row.get("reason"), str):
        raise ValueError(f"a limit without a reason in [[limits]]: {dict(row)}")
    longer_than = row.get("longer_than")
    if longer_than is not None and not (type(longer_than) is int and longer_than >= 0):
        raise ValueError(f"longer_than of a limit is a number of elements, not {longer_than!r}")
    return Limit(
        ops=_names("ops of [[limits]]", row.get("ops", []), known_ops),
        dtypes=_names("dtypes of [[limits]]", row.get("dtypes", []), DTYPES),
        empty=_claim(row, "empty"),
        scalar=_claim(row, "scalar"),
        dynamic=_claim(row, "dynamic"),
        longer_than=longer_than,
        reason=row["reason"],
    )


def _claim(row: Mapping[str, Any], name: str) -> bool:
    value = row.get(name, False)
    if not isinstance(value, bool):
        raise ValueError(f"{name} of a limit is true or false, not {value!r}")
    return value


def _longest(tensors: Iterable[torch.Tensor]) -> int:
    """Return the largest size that is known; 0 if none is."""
    sizes = (size for t in tensors for size in t.shape if isinstance(size, int))
    return max(sizes, default=0)
