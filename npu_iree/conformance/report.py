"""What a run found, as a table, as JUnit XML, and against another run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from xml.etree import ElementTree

from lowering.capabilities import NOT_LOWERED
from npu_iree.conformance.verdict import BAD, OUTCOMES, Verdict

ABSENT = "-"  # what a case has in a run that it is not of
_NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_HOST_REASON = re.compile(r"^(?:\S+|graph break): (.*)$", re.MULTILINE)
_PLACE = re.compile(r'(?:loc\()?"-":\d+:\d+\)?: ')  # in the text of a region, which nobody sees
_REFUSED = re.compile(r"^(\S+): (stage .*)$", re.MULTILINE)  # as `StageError.summary` begins
_NOT_LOWERED = re.compile(f": {NOT_LOWERED}$", re.MULTILINE)


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


def host_reasons(verdicts: Iterable[Verdict]) -> Counter[str]:
    """Count the reasons for which cases had to run on the host, each once a case.

    What the compiler says of several places is one reason.
    """
    found = Counter[str]()
    for verdict in verdicts:
        if verdict.outcome == "host":
            found.update({*_HOST_REASON.findall(_PLACE.sub("", verdict.detail))})
    return found


def refused_ops(verdicts: Iterable[Verdict]) -> dict[tuple[str, str], str]:
    """Give the ops that the compiler refused: (op, dtype of the case) -> how, the first time."""
    found: dict[tuple[str, str], str] = {}
    for verdict in verdicts:
        if verdict.outcome == "host":
            for op, how in _REFUSED.findall(verdict.detail):
                found.setdefault((op, _dtype(verdict.key)), how)
    return found


def junit(verdicts: Iterable[Verdict], judged_as: Mapping[str, object]) -> str:
    """Write verdicts as JUnit XML: a test a case, a suite a dtype.

    Args:
        verdicts: of a run.
        judged_as: what was tried (`of`), the `target`, and all else that decides verdicts.
    """
    target = str(judged_as["target"])
    name = f"npu-iree conformance {judged_as['of']}, {target}"
    root = ElementTree.Element("testsuites", name=name)
    for dtype, found in by_dtype(verdicts).items():
        suite = ElementTree.SubElement(root, "testsuite", _counts(found), name=dtype)
        share, of_lowered = (f"{share:.1%}" for share in device_share(found))
        _add_properties(suite, {**judged_as, "share": share, "share of lowered": of_lowered})
        for verdict in found:
            test = ElementTree.SubElement(suite, "testcase", name=verdict.key, classname=target)
            _add_verdict(test, verdict)
    return ElementTree.tostring(root, encoding="unicode")


def _add_verdict(test: ElementTree.Element, verdict: Verdict) -> None:
    _add_properties(test, {"outcome": verdict.outcome})
    if verdict.outcome in BAD:
        problem = ElementTree.SubElement(test, "failure", message=verdict.outcome)
        problem.text = _printable(verdict.detail)
    elif verdict.outcome == "skipped":
        ElementTree.SubElement(test, "skipped", message=_printable(verdict.detail[:200]))
    elif verdict.detail:
        ElementTree.SubElement(test, "system-out").text = _printable(verdict.detail)


def _add_properties(element: ElementTree.Element, values: Mapping[str, object]) -> None:
    properties = ElementTree.SubElement(element, "properties")
    for name, value in values.items():
        ElementTree.SubElement(properties, "property", name=name, value=_printable(str(value)))


def _counts(verdicts: Sequence[Verdict]) -> dict[str, str]:
    found = Counter("failures" if v.outcome in BAD else v.outcome for v in verdicts)
    counts = {"tests": len(verdicts), "failures": found["failures"], "skipped": found["skipped"]}
    return {name: str(count) for name, count in counts.items()}


def _printable(text: str) -> str:
    """Replace what no XML can hold, not even escaped."""
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text)


def changes(
    before: Mapping[str, Verdict], after: Mapping[str, Verdict]
) -> list[tuple[str, str, str]]:
    """List the cases whose outcome differs between two runs: (case, before, after), worst first."""
    found = []
    for key in sorted({*before, *after}):
        one = before[key].outcome if key in before else ABSENT
        other = after[key].outcome if key in after else ABSENT
        if one != other:
            found.append((key, one, other))
    return sorted(found, key=lambda row: (not is_worse(*row[1:]), -_rank(row[2])))


def is_worse(before: str, after: str) -> bool:
    """Say whether an outcome is worse than one before, or gone, or new and bad."""
    if ABSENT in (before, after):
        return after == ABSENT or after in BAD
    return _rank(after) > max(_rank(before), _rank("device"))


def _rank(outcome: str) -> int:
    return OUTCOMES.index(outcome) if outcome in OUTCOMES else -1


def _dtype(key: str) -> str:
    match = re.search(r"\[(\w+)\]$", key)
    return match[1] if match else ""
