"""From the journal of what was tried to the capability table."""

from __future__ import annotations

import json
import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version

from lowering.capabilities import NOT_LOWERED, Capabilities
from lowering.dtypes import DTYPES
from measuring.single_op import EMPTY, NAN, PLAIN, SCALAR
from measuring.verdict import RIGHT

PACKAGES = ("torch", "torch-mlir", "iree-base-compiler", "iree-base-runtime")
# If a call on several dtypes fails, the op is not listed for the last of them in this order.
IMPORTANCE = ("f32", "i64", "bool", "f16", "bf16", "i32", "f64", "i8", "u8", "i16", "c64", "c128")
# Dtypes in which few calls are tried -> the one of their sort in which many are, and must be right.
STANDARD = {
    **dict.fromkeys(("f16", "bf16", "f64"), "f32"),
    **dict.fromkeys(("i8", "i16", "i32", "u8"), "i64"),
}


# Ops that only graphs with dynamic sizes hold -> the op that they stand for.
SAME = {"prims.collapse.default": "aten.view.default"}


# Right, but in quadratic time: ops -> the length of rows from which PyTorch's kernels are better.
SLOW = {("aten.sort.default", "aten.topk.default"): 1024}
# Right where all sizes are numbers, and refused otherwise.
STATIC = ("aten.as_strided.default",)


# Right on the values that were tried, wrong on others that matter.
OVERRULED = {
    "aten.atan2.default": "gives NaN for two zeros",
}


@dataclass(frozen=True)
class Row:
    """One line of the journal: a call that was tried.

    Attributes:
        op: name of the op.
        key: the call, as text.
        dtypes: of all of its tensors.
        kind: `plain`, or what is special about its tensors.
        source: the program it is from.
        reason: `right`, or what went wrong.
        detail: what the compiler or the comparison said.
    """

    op: str
    key: str
    dtypes: list[str]
    kind: str
    source: str
    reason: str
    detail: str

    @property
    def is_right(self) -> bool:
        """Whether it gave what eager gives."""
        return self.reason == RIGHT


# Calls that fail and yet do not cost their op its place, because models that need the op rarely
# call it so, and because the compiler refuses them, which sends one region to the host at run
# time. Those that are wrong instead say so. Pattern of `key: reason` -> what fails.
KNOWN = {
    r"exceeded stack allocation limit": "on rows that are too long for the CPU back end's stack",
    r"^aten\.arange.* \(.*\d\.\d.*(int|float16)": "of integers or halves, in fractions: wrong",
    r"^aten\.as_strided.default \(\w+:0,": "from a tensor without dimensions",
    r"^aten\.constant_pad_nd.*-\d": "with negative padding",
    r"^aten\.convolution.default .* True, \[[\d, ]*\], [2-9]": "transposed, in groups",
    r"^aten\.convolution_backward.* True, \[[\d, ]*\], \d": "of a transposed convolution",
    r"^aten\.convolution_backward.* False, \[[\d, ]*\], [2-9]": "in groups",
    r"^aten\.gelu.*tanh": "with approximate='tanh': wrong by 5e-5",
    r"^aten\.max_pool.*True\)": "with ceil_mode=True",
    r"^aten\.max_pool2d_with_indices.default \(\w+:3": "without a batch dimension",
    r"^aten\.max_pool2d_with_indices.default \([iu]\d": "of integers",
    r"^aten\.pow\.Tensor_Scalar \(\w+:\d:inf, -": "zero to a negative power: wrong sign",
    r"^aten\.scatter.*, -\d, i": "along a dimension counted from the end: crashes torch-mlir",
}


KINDS = {
    EMPTY: "on tensors without elements",
    NAN: "where NaN goes in",
    SCALAR: "where no tensor has a dimension",
}
# Those that `lowering.capabilities.Limit` can tell, by a field of that name.
LIMITS = (EMPTY, SCALAR)


@dataclass(frozen=True)
class Measured:
    """One op, with every call of it that was tried.

    Attributes:
        name: name of the op.
        tried: the calls, by key.
    """

    name: str
    tried: Sequence[Row]

    @cached_property
    def dtypes(self) -> list[str]:
        """The dtypes of which no failing call can be made, and some right one was."""
        right = [set(r.dtypes) for r in self.tried if r.is_right and r.kind != EMPTY]
        wrong = [set(r.dtypes) for r in self.tried if not r.is_right and not self._excuse(r)]
        listed = set().union(*right)
        for dtypes in sorted(wrong, key=len):
            if dtypes <= listed:
                listed.remove(max(dtypes, key=IMPORTANCE.index))
        tried = set().union(*(r.dtypes for r in self.tried))
        listed -= {d for d in listed if STANDARD.get(d, d) in tried - listed}
        seen = set().union(*(dtypes for dtypes in right if dtypes <= listed))
        return [name for name in DTYPES if name in seen]

    @property
    def excused(self) -> Iterator[tuple[Row, str]]:
        """The calls that fail though their dtypes are listed, and what is special about each."""
        for row in self.tried:
            if not row.is_right and set(row.dtypes) <= set(self.dtypes):
                yield row, self._excuse(row)

    @property
    def reason(self) -> str:
        """What most calls failed for; plain calls in the most important dtypes decide."""
        failed = [r for r in self.tried if not r.is_right]
        if not failed:
            return "tried on tensors without elements only"
        first = min(failed, key=lambda r: (r.kind != PLAIN, IMPORTANCE.index(r.dtypes[0])))
        alike = [r.reason for r in failed if (r.kind, r.dtypes) == (first.kind, first.dtypes)]
        return Counter(alike).most_common(1)[0][0]

    def _excuse(self, row: Row) -> str:
        """Say what is special about a call that fails, or nothing if its dtypes are to blame."""
        line = f"{row.key}: {row.reason}"
        if known := next((text for pattern, text in KNOWN.items() if re.search(pattern, line)), ""):
            return known
        if row.kind == PLAIN or not any(
            r.is_right and r.kind == PLAIN and r.dtypes == row.dtypes for r in self.tried
        ):
            return ""
        return f"{KINDS[row.kind]}: {row.reason}"


def disagreement(row: Row, table: Capabilities) -> str:
    """Say in what a call that was tried is not as the table says; empty if it is."""
    if row.op not in table.ops and row.op not in table.host:
        return "the table does not have it"
    if row.is_right:
        is_new = table.host.get(row.op) == NOT_LOWERED
        return f"it runs right, the table says {NOT_LOWERED!r}" if is_new else ""
    is_claimed = set(row.dtypes) <= table.ops.get(row.op, frozenset())
    is_known = any(re.search(pattern, f"{row.key}: {row.reason}") for pattern in KNOWN)
    if is_claimed and row.kind == PLAIN and not is_known:
        return f"the table says that it runs; {row.reason}"
    return ""


def table_text(rows: Iterable[Row], target: str) -> str:
    """Write the table: what is listed, what is not and why, and what to beware of."""
    by_op: dict[str, list[Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda r: (r.op, r.key)):
        by_op[row.op].append(row)
    for name, like in SAME.items():
        by_op[name] = by_op[like]
    ops = [Measured(name, tried) for name, tried in sorted(by_op.items())]
    lines = [
        HEADER.format(target=target)
        + f"# with {', '.join(f'{name} {version(name)}' for name in PACKAGES)}.\n#"
    ]
    lines += _beware(ops)
    listed = {op.name: op.dtypes for op in ops if op.dtypes and op.name not in OVERRULED}
    host = {op.name: OVERRULED.get(op.name, op.reason) for op in ops if op.name not in listed}
    lines += ["\n[ops]", *(f'"{name}" = {json.dumps(dtypes)}' for name, dtypes in listed.items())]
    lines += ["\n[host]", *(f'"{name}" = {_quoted(reason)}' for name, reason in host.items())]
    lines += [*_limits(ops), *_dynamic(), *_slow()]
    return "\n".join(lines) + "\n"


HEADER = """\
# Which ops {target} runs right, in the dtypes that all of an op's tensors may have, results
# and indices included. Measured, not written by hand:
#   python ci/measure_capabilities.py --target {target} --journal capabilities.jsonl
#   python ci/measure_capabilities.py --target {target} --journal capabilities.jsonl --write
"""


def _beware(ops: Iterable[Measured]) -> Iterator[str]:
    """Write down, as comments, which calls of listed ops fail all the same."""
    notes: dict[str, set[str]] = defaultdict(set)
    for op in ops:
        for row, excuse in op.excused:
            if row.kind not in LIMITS:
                notes[excuse].add(op.name)
    yield "# Listed, although these calls fail:"
    for text, names in sorted(notes.items()):
        line = f"{text}: {', '.join(sorted(names))}"
        yield textwrap.fill(line, 100, initial_indent="# - ", subsequent_indent="#   ")


def _limits(ops: Iterable[Measured]) -> Iterator[str]:
    cut: dict[tuple[str, str], list[str]] = defaultdict(list)
    for op in ops:
        found = {(row.kind, excuse) for row, excuse in op.excused if row.kind in LIMITS}
        for kind_and_reason in found:
            cut[kind_and_reason].append(op.name)
    for (kind, reason), names in sorted(cut.items()):
        yield f"\n[[limits]]\nops = {json.dumps(names)}\n{kind} = true\nreason = {_quoted(reason)}"


def _dynamic() -> Iterator[str]:
    reason = f"of sizes that are not known: {NOT_LOWERED}"
    yield (f"\n[[limits]]\nops = {json.dumps(STATIC)}\ndynamic = true\nreason = {_quoted(reason)}")


def _slow() -> Iterator[str]:
    for names, length in SLOW.items():
        ops, reason = json.dumps(list(names)), f"IREE takes quadratic time for rows over {length}"
        yield f"\n[[limits]]\nops = {ops}\nlonger_than = {length}\nreason = {_quoted(reason)}"


def _quoted(text: str) -> str:
    return json.dumps(text)
