"""Benchmark results as tables, as the lines that are to be reached, and as a plot."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benching.suite import LIMIT, OURS

Cases = Mapping[str, Mapping[str, Mapping[str, Any]]]
_COLUMNS = {
    "ms": ("ms", 9, 2),
    "+-": ("spread_ms", 7, 2),
    "of eager": ("of_eager", 9, 2),
    "cold s": ("cold_s", 8, 1),
    "warm s": ("warm_s", 8, 1),
    "peak MB": ("peak_mb", 9, 0),
    "off by": ("difference", 9, 7),
}


def table(cases: Cases) -> str:
    """Write all rows; what was not measured says why."""
    lines = [
        f"{'model':24} {'backend':22}"
        + "".join(f"{c:>{w + 1}}" for c, (_, w, _) in _COLUMNS.items())
    ]
    for case, rows in cases.items():
        for backend, row in rows.items():
            cells = row["missing"] or "".join(
                " " + _cell(row[key], width, digits) for key, width, digits in _COLUMNS.values()
            )
            lines.append(f"{case:24} {backend:22}{cells}")
    return "\n".join(lines)


def _cell(value: float | None, width: int, digits: int) -> str:
    return f"{value:{width}.{digits}f}" if value is not None else " " * width


def summary(cases: Cases) -> str:
    """Write the ratios of ours to others: geometric means over the models that both ran."""
    ratios = {
        "ours over the best of eager and Inductor": _ratios(cases, "ms", ("eager", "inductor")),
        "ours over eager": _ratios(cases, "ms", ("eager",)),
        "ours over Inductor": _ratios(cases, "ms", ("inductor",)),
        "ours over OpenVINO": _ratios(cases, "ms", ("openvino",)),
        "ours over iree-turbine": _ratios(cases, "ms", ("turbine",)),
        f"ours over {LIMIT}": _ratios(cases, "ms", (LIMIT,)),
        "the same without what is PyTorch's": _ratios(_inside(cases), "ms", (LIMIT,)),
        "first call, cold, over Inductor's": _ratios(cases, "cold_s", ("inductor",)),
        "first call, warm, over Inductor's": _ratios(cases, "warm_s", ("inductor",)),
        "first call, warm, over aot_eager's": _ratios(cases, "warm_s", ("aot_eager",)),
        "peak memory after compiling, over eager's": _ratios(cases, "cold_peak_mb", ("eager",)),
        "peak memory, over eager's": _ratios(cases, "peak_mb", ("eager",)),
    }
    return "\n".join(_line(what, found) for what, found in ratios.items() if found)


def _line(what: str, found: Mapping[str, float]) -> str:
    worst = max(found, key=found.__getitem__)
    return (
        f"{what:44} {_geometric_mean(found.values()):6.2f}   "
        f"worst {found[worst]:.2f} ({worst}), {len(found)} models"
    )


def _ratios(cases: Cases, key: str, others: tuple[str, ...]) -> dict[str, float]:
    """Give our ratio to the best of some backends, model by model; times: within each round."""
    found = {}
    for case, rows in cases.items():
        theirs = [rows[o] for o in others if o in rows and rows[o][key] is not None]
        mine = rows.get(OURS)
        if mine is None or mine[key] is None or len(theirs) < len(others):
            continue
        found[case] = max(_ratio(mine, other, key) for other in theirs)
    return found


def _inside(cases: Cases) -> Cases:
    """Take of our own calls what our runner takes."""
    return {
        case: {**rows, OURS: {**rows[OURS], "rounds_ms": inside}}
        for case, rows in cases.items()
        if OURS in rows and (inside := rows[OURS].get("inside_ms"))
    }


def _ratio(mine: Mapping[str, Any], other: Mapping[str, Any], key: str) -> float:
    if key != "ms":
        return float(mine[key]) / float(other[key])
    pairs = zip(mine["rounds_ms"], other["rounds_ms"], strict=True)
    return statistics.median(a / b for a, b in pairs)


def _geometric_mean(values: Iterable[float]) -> float:
    return math.exp(statistics.fmean(math.log(value) for value in values))


def plot(cases: Cases, path: Path) -> None:
    """Draw the time of a call over eager's, model by model: bars go up or down from eager's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = dict.fromkeys(b for rows in cases.values() for b, r in rows.items() if r["of_eager"])
    backends = [name for name in names if name not in ("eager", LIMIT)]
    figure, axes = pyplot.subplots(figsize=(1.0 + 0.8 * len(cases), 4))
    width = 0.8 / max(1, len(backends))
    for i, backend in enumerate(backends):
        ratios = [rows.get(backend, {}).get("of_eager") or 1.0 for rows in cases.values()]
        places = [x + i * width for x in range(len(cases))]
        axes.bar(places, [ratio - 1 for ratio in ratios], width, bottom=1, label=backend)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xticks([x + 0.4 - width / 2 for x in range(len(cases))], list(cases), rotation=45)
    axes.set_ylabel("time of a call over eager's")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
