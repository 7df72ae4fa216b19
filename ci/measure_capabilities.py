"""Measure which ATen ops a target gets right, and write its capability table.

    python ci/measure_capabilities.py --journal capabilities.jsonl
    python ci/measure_capabilities.py --journal capabilities.jsonl --write
    python ci/measure_capabilities.py --check 30

The first command traces PyTorch's own table of ops (`op_db`, which needs the package `expecttest`)
and our own programs as the backend would, takes the graphs apart, and tries each distinct op by
itself: lower, compile, run, compare with eager. It appends one line an op to the journal and can be
stopped and started again. The second command turns the journal into the table. The third measures
some ops anew, spread over all there are, and fails where the table says otherwise. All are about
`npu-local`, or about the target that `--target` names, whose table is where `--table` says.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import multiprocessing
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import lowering.capabilities
from lowering.capabilities import Capabilities, load_capabilities
from lowering.files import write_atomically
from measuring.find import OURS, Source, find, sources
from measuring.single_op import PLAIN, SingleOp
from measuring.table import Row, disagreement, table_text
from measuring.verdict import Verdict, judge
from npu_iree.conformance.pool import Died, Progress, run_all
from npu_iree.conformance.run import append_line
from npu_iree.targets import NPU_LOCAL, find_target

_Item = TypeVar("_Item")
_Judge = Callable[[SingleOp, Progress], Verdict]
TABLE = Path(lowering.capabilities.__file__).with_name("npu-local.toml")
PRELOAD = [
    "torch.testing._internal.common_methods_invocations",
    "torch_mlir.passmanager",
    "torch_mlir.extras.fx_importer",
    "iree.compiler.api",
    "iree.runtime",
]


@dataclass(frozen=True)
class Pass:
    """Dtypes that are measured together, and how closely.

    Attributes:
        dtypes: of the programs' inputs.
        samples: how many samples of each op of `op_db` are traced.
        ours: how many calls of one op on one set of dtypes are tried from our own programs.
        theirs: how many from `op_db`.
        special: how many that are empty, 0-d or hold NaN.
    """

    dtypes: tuple[str, ...]
    samples: int
    ours: int
    theirs: int
    special: int


PASSES = (
    Pass(("f32", "i64", "bool"), samples=4, ours=12, theirs=3, special=1),
    Pass(("f16", "bf16", "f64", "i32"), samples=2, ours=3, theirs=1, special=0),
    Pass(("i8", "i16", "u8", "c64", "c128"), samples=2, ours=2, theirs=1, special=0),
)


def main() -> int:
    """Measure, or write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    todo = parser.add_mutually_exclusive_group(required=True)
    todo.add_argument("--journal", type=Path, help="JSON lines, one an op tried")
    todo.add_argument("--check", type=int, metavar="N", help="compare N ops with the table")
    parser.add_argument("--write", action="store_true", help="write the table from the journal")
    parser.add_argument("--target", default=NPU_LOCAL.name, help="an installed target")
    parser.add_argument("--table", type=Path, help="the table to write, or to compare with")
    parser.add_argument("--workers", type=int, default=2, help="processes at work")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds that one op may take")
    args = parser.parse_args()
    find_target(args.target)
    if args.table is None and args.target != NPU_LOCAL.name and (args.write or args.check):
        parser.error(f"--table: where is the table of {args.target}?")
    table, judge_it = args.table or TABLE, functools.partial(_judge, target=args.target)
    if args.write:
        text = table_text(_read(args.journal).values(), args.target)
        write_atomically(table, text.encode())
        return 0
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    if args.check:
        known = load_capabilities(str(table.resolve()))
        return _check(args.check, known, judge_it, args.workers, args.limit)
    for measured in PASSES:
        _measure(measured, args.journal, judge_it, args.workers, args.limit)
    return 0


def _measure(measured: Pass, journal: Path, judge_it: _Judge, workers: int, limit_s: float) -> None:
    """Try the ops of one pass that the journal does not have yet."""
    started = time.monotonic()
    todo = _chosen(_found(measured, workers), measured)
    known = _read(journal)
    todo = [single for single in todo if single.key not in known]
    print(f"{measured.dtypes}: {len(todo)} ops to try, found in {_since(started)}", flush=True)
    for single, answer in run_all(judge_it, todo, workers=workers, limit_s=limit_s):
        append_line(journal, asdict(_row(single, answer)))
    print(f"{measured.dtypes}: done in {_since(started)}", flush=True)


def _check(count: int, table: Capabilities, judge_it: _Judge, workers: int, limit_s: float) -> int:
    """Try a call each of some ops, and list those of which the table says something else."""
    entries = [source for source in _sources(PASSES[0]) if source.position >= 0]
    by_op = {single.op: single for single in _traced(_spread(entries, 2 * count), workers)}
    singles = _spread(list(by_op.values()), count)
    wrong = []
    for single, answer in run_all(judge_it, singles, workers=workers, limit_s=limit_s):
        if problem := disagreement(_row(single, answer), table):
            wrong.append(f"{single.key}: {problem}")
    print(f"{len(singles)} ops tried; {len(wrong)} are not as the table says")
    print("\n".join(sorted(wrong)))
    return bool(wrong)


def _found(measured: Pass, workers: int) -> list[SingleOp]:
    """Trace every source of a pass."""
    return _traced(_sources(measured), workers)


def _sources(measured: Pass) -> list[Source]:
    return [
        source
        for dtype in measured.dtypes
        for source in sources(dtype, measured.samples, backward=dtype == "f32")
    ]


def _traced(todo: Sequence[Source], workers: int) -> list[SingleOp]:
    """Trace programs into distinct ops; the result does not depend on which worker ends first."""
    found: dict[Source, list[SingleOp]] = {}
    for source, answer in run_all(_find, todo, workers=workers, limit_s=120):
        if isinstance(answer, Died):
            print(f"cannot trace {source.name}: {answer.how}", file=sys.stderr)
        else:
            found[source] = answer
    distinct = {s.key: s for source in reversed(todo) for s in reversed(found.get(source, []))}
    return sorted(distinct.values(), key=lambda single: single.key)


def _chosen(found: Iterable[SingleOp], measured: Pass) -> list[SingleOp]:
    """Take some calls of each op and dtype set, evenly from all there are."""
    groups: dict[tuple[str, ...], dict[str, list[SingleOp]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for single in found:
        origin = OURS if single.source.startswith(OURS) else ""
        group = groups[single.op, *single.dtypes]
        group[origin if single.kind == PLAIN else single.kind].append(single)
    counts = {OURS: measured.ours, "": measured.theirs}
    chosen: list[SingleOp] = []
    for group in groups.values():
        special = measured.special if counts.keys() & group else 1
        for name, calls in group.items():
            chosen += _spread(calls, counts.get(name, special))
    return chosen


def _spread(items: Sequence[_Item], count: int) -> list[_Item]:
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]


def _find(source: Source, progress: Progress) -> list[SingleOp]:
    return find(source)


def _judge(single: SingleOp, progress: Progress, target: str) -> Verdict:
    return judge(single, progress, find_target(target))


_VERBS = {"hang": "hangs", "crash": "crashes", "error": "breaks"}


def _row(single: SingleOp, answer: Verdict | Died) -> Row:
    if isinstance(answer, Died):
        answer = Verdict(f"{_VERBS[answer.kind]} the {answer.during} ({answer.how})")
    return Row(
        op=single.op,
        key=single.key,
        dtypes=list(single.dtypes),
        kind=single.kind,
        source=single.source,
        reason=answer.reason,
        detail=answer.detail[:2000],
    )


def _read(journal: Path) -> dict[str, Row]:
    """Read a journal; half a line, of a run that was killed, is left out."""
    rows: dict[str, Row] = {}
    for line in journal.read_text().splitlines() if journal.exists() else []:
        with contextlib.suppress(ValueError, TypeError):
            row = Row(**json.loads(line))
            rows[row.key] = row
    return rows


def _since(started: float) -> str:
    return f"{(time.monotonic() - started) / 60:.1f} min"


if __name__ == "__main__":
    raise SystemExit(main())
