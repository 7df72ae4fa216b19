"""What a run found, as a table, as JUnit XML, and against another run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from xml.etree import ElementTree

from npu_iree.conformance.judge import OUTCOMES, Verdict

BAD = ("error", "wrong", "hang", "crash")


def by_dtype(verdicts: Iterable[Verdict]) -> dict[str, Counter[str]]:
    """Count the outcomes in each dtype."""
    table: dict[str, Counter[str]] = {}
    for verdict in verdicts:
        table.setdefault(_dtype(verdict.key), Counter())[verdict.outcome] += 1
    return table


def device_share(counts: Mapping[str, int]) -> float:
    """Give the share of the cases that ran right that ran on the device as a whole."""
    right = counts.get("device", 0) + counts.get("host", 0)
    return counts.get("device", 0) / right if right else 0.0


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
