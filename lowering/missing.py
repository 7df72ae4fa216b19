"""What tells a graph from the nearest one of a bundle, in words for the person who saved it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from lowering.bundle import Bundle, Origin
from lowering.capture import CapturedGraph
from lowering.digest import text_digest
from lowering.errors import ArtifactError, shortened
from lowering.key import IDENTITY, CacheKey

_SHOWN = 8
_LINE = re.compile(r"%\d+ = (.*)")


def differences(
    captured: CapturedGraph,
    text: str,
    keys: Sequence[CacheKey],
    now: Origin | None,
    bundle: Bundle,
) -> list[str]:
    """Say how a graph, and what it is compiled with, differ from what a bundle holds.

    Args:
        captured: the graph.
        text: its canonical text.
        keys: of its regions that the bundle lacks.
        now: what it would be built with.
        bundle: what was saved.
    """
    found = _origins(bundle.origin, now) if now is not None else []
    if other := _other_kinds(captured, bundle):
        return [other, *found]
    if text_digest(text) in bundle.graphs:
        return [*found, *_regions(keys, bundle)]
    alike = [d for d, record in bundle.graphs.items() if record.kind == captured.kind]
    texts = [_text(bundle, digest) for digest in alike]
    nearest = min(texts, key=lambda saved: _distance(saved, text))
    return [*found, *_graphs(captured, nearest, text)]


def _other_kinds(captured: CapturedGraph, bundle: Bundle) -> str | None:
    kinds = sorted({record.kind for record in bundle.graphs.values()})
    if captured.kind in kinds:
        return None
    how = "without gradients" if captured.kind == "inference" else "with gradients and backward()"
    held = f"{' and '.join(kinds)} graphs only" if kinds else "no graphs"
    return f"the bundle has {held}: save it after a call {how}"


def _origins(then: Origin, now: Origin) -> list[str]:
    lines = [
        f"option {name}: {then.options.get(name)} when it was saved, {now.options.get(name)} now"
        for name in sorted({*then.options, *now.options})
        if then.options.get(name) != now.options.get(name)
    ]
    if then.capabilities != now.capabilities:
        lines.append(f"the capability table of target {now.target!r} has changed")
    lines += [
        f"{name} {then.versions[name]} when it was saved, {now.versions[name]} now"
        for name in sorted({*then.versions} & {*now.versions})
        if then.versions[name] != now.versions[name] and now.versions[name] != "not installed"
    ]
    return lines


def _regions(keys: Sequence[CacheKey], bundle: Bundle) -> list[str]:
    """Name the parts of a missing region's key in which all saved ones differ."""
    lines = []
    for key in keys:
        labels = [
            [label for label, a, b in zip(IDENTITY, key.identity, other, strict=True) if a != b]
            for other in bundle.artifacts
        ]
        near = min(labels, key=len, default=list(IDENTITY))
        lines.append(f"it is cut otherwise: the nearest region differs in {', '.join(near)}")
    return list(dict.fromkeys(lines))


def _graphs(captured: CapturedGraph, then: str, now: str) -> list[str]:
    names = [node.name for node in captured.inputs]
    old, new = _inputs(then), _inputs(now)
    lines = []
    if len(old) != len(new):
        lines.append(f"it takes {len(new)} inputs, the nearest graph {len(old)}")
    else:
        changed = [i for i in range(len(new)) if old[i] != new[i]]
        told = [f"input {names[i]}: {old[i]} then, {new[i]} now" for i in changed]
        lines += shortened(told, _SHOWN)
    if counts := _counts(_ops(then), _ops(now)):
        lines += shortened(counts, _SHOWN)
    elif not lines:
        pairs = zip(then.splitlines(), now.splitlines(), strict=False)
        lines += [f"line by line: {a} then, {b} now" for a, b in pairs if a != b][:1]
    return lines


def _counts(then: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
    ops = sorted({*then, *now})
    pairs = [(op, then.get(op, 0), now.get(op, 0)) for op in ops]
    return [f"{op}: {a} times then, {b} times now" for op, a, b in pairs if a != b]


def _inputs(text: str) -> list[str]:
    return [line.removeprefix("input ") for line in _lines(text) if line.startswith("input ")]


def _ops(text: str) -> Counter[str]:
    return Counter(
        line.partition("(")[0] for line in _lines(text) if not line.startswith(("input ", "const"))
    )


def _lines(text: str) -> list[str]:
    return [match[1] for match in map(_LINE.match, text.splitlines()) if match]


def _distance(then: str, now: str) -> tuple[int, int]:
    """Count ops, then lines that only one of them has: one op more renumbers all that follow."""
    return _apart(_ops(then), _ops(now)), _apart(Counter(_lines(then)), Counter(_lines(now)))


def _apart(one: Counter[str], other: Counter[str]) -> int:
    return ((one - other) + (other - one)).total()


def _text(bundle: Bundle, digest: str) -> str:
    try:
        return bundle.text(digest)
    except ArtifactError:  # it is only asked for words
        return ""
