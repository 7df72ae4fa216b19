"""What a run found, as a table, as JUnit XML, and against another run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from xml.etree import ElementTree

from lowering.capabilities import NOT_LOWERED
from npu_iree.conformance.verdict import OUTCOMES, Verdict

_NOT_LOWERED = re.compile(f": {NOT_LOWERED}$", re.MULTILINE)
BAD = ("error", "wrong", "hang", "crash")


def by_dtype(verdicts: Iterable[Verdict]) -> dict[str, list[Verdict]]:
    """Sort verdicts by dtype."""
    table: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        table.setdefault(_dtype(verdict.key), []).append(verdict)
    return table


def device_share(verdicts: Iterable[Verdict]) -> tuple[float, float]:
    """Give the share of the cases that ran right that ran on the device as a whole.

    Returns:
        The share of all, and of those that hold no op that torch-mlir cannot lower.
    """
    right = [v for v in verdicts if v.outcome in ("device", "host")]
    device = sum(v.outcome == "device" for v in right)
    lowered = [v for v in right if not _NOT_LOWERED.search(v.detail)]
    return device / max(1, len(right)), device / max(1, len(lowered))


def junit(verdicts: Iterable[Verdict], target: str) -> str:
    """Write verdicts as JUnit XML: a test a case, a suite a dtype."""
    root = ElementTree.Element("testsuites", name=f"npu-iree conformance ops, {target}")
    suites: dict[str, ElementTree.Element] = {}
    for verdict in verdicts:
        dtype = _dtype(verdict.key)
        suite = suites.get(dtype)
        if suite is None:
            suite = suites[dtype] = ElementTree.SubElement(root, "testsuite", name=dtype)
        test = ElementTree.SubElement(suite, "testcase", name=verdict.key, classname=target)
        if verdict.outcome in BAD:
            problem = ElementTree.SubElement(test, "failure", message=verdict.outcome)
            problem.text = verdict.detail
        elif verdict.outcome == "skipped":
            ElementTree.SubElement(test, "skipped", message=verdict.detail[:200])
    return ElementTree.tostring(root, encoding="unicode")


def changes(
    before: Mapping[str, Verdict], after: Mapping[str, Verdict]
) -> list[tuple[str, str, str]]:
    """List the cases whose outcome differs between two runs: (case, before, after), worst first."""
    found = []
    for key in sorted({*before, *after}):
        one = before[key].outcome if key in before else "-"
        other = after[key].outcome if key in after else "-"
        if one != other:
            found.append((key, one, other))
    return sorted(found, key=lambda row: -_rank(row[2]))


def _rank(outcome: str) -> int:
    return OUTCOMES.index(outcome) if outcome in OUTCOMES else -1


def _dtype(key: str) -> str:
    match = re.search(r"\[(\w+)\]$", key)
    return match[1] if match else ""
