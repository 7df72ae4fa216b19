"""When the compiler refuses a region: only the ops to blame go to the host, now and next time."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import operator
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from lowering.bisect import diagnose, units_of
from lowering.build import Builder
from lowering.capture import CapturedGraph
from lowering.denials import Denial, DenialRecord
from lowering.errors import StageError
from lowering.nodes import is_scalar
from lowering.record import Healed
from lowering.region import Region, bound_nodes, extract_region
from lowering.segments import DEVICE, Segment, with_own_sizes
from lowering.source import user_line

log = logging.getLogger(__name__)
_TOLD: set[str] = set()  # the programs whose denials this process has warned of


class Healer:
    """Heals the regions of one graph, and remembers what it found."""

    def __init__(
        self, builder: Builder, denials: DenialRecord | None, captured: CapturedGraph
    ) -> None:
        self._builder = builder
        self._denials = denials
        self._captured = captured

    def recall(self, regions: Callable[[Healed], Sequence[Segment]]) -> Healed:
        """Apply what was found before.

        Args:
            regions: gives the device segments of the graph under what is known so far.
        """
        healed = Healed()
        known = self._denials.under(self._builder.limits) if self._denials is not None else {}
        ops, found = {denial.op for denial in known.values()}, list[Denial]()
        for node in self._captured.nodes:
            if str(node.target) in ops and (denial := known.get(self._program(_with_parts(node)))):
                healed.failed |= dict.fromkeys(_with_parts(node), f"{denial.reason} (found before)")
                found.append(replace(denial, where=str(user_line(node))))
        if found:
            self._builder.counts["denials"] += len(found)
        if new := [denial for denial in found if denial.program not in _TOLD]:
            _TOLD.update(denial.program for denial in new)
            listed = "\n  ".join(map(str, new))
            log.warning("the compiler has refused ops before, which run on the host:\n  %s", listed)
        for segment in regions(healed) if any(d.parts for d in known.values()) else ():
            if denial := known.get(self._program(segment.nodes)):
                healed.keep_apart(_split(segment.nodes, denial.parts))
                self._builder.counts["denials"] += 1
        return healed

    def heal(self, segment: Segment, error: StageError, healed: Healed) -> None:
        """Find out what of a region is to blame, say so, and remember it.

        Args:
            segment: the region.
            error: how the compiler refused it.
            healed: takes what is found.
        """
        if self._is_futile:
            why = f"the compiler refuses even the smallest program ({error.summary})"
            text = "%s runs on the host: %s, so no op is to blame, and nothing of it is remembered"
            log.warning(text, segment.name, why)
            healed.failed |= dict.fromkeys(segment.nodes, why)
            return
        with _scratch() as folder:
            trials = _Trials(self, folder)
            found = diagnose(segment.nodes, error, trials.attempt)
            denials: list[tuple[Denial, StageError]] = []
            for node, failure in found.blamed.items():
                healed.failed[node] = failure.summary
                if node.target is not operator.getitem:
                    denials.append((self._deny(node, failure, trials), failure))
        self._builder.counts["healed_ops"] += len(denials)
        if denials:
            listed = "\n  ".join(str(denial) for denial, _ in denials)
            log.warning("the compiler refused ops, which run on the host now:\n  %s", listed)
        if found.parts:
            healed.keep_apart(found.parts)
            denials.append((self._deny_together(segment, error, found.parts), error))
        _TOLD.update(denial.program for denial, _ in denials)
        if self._denials is not None:
            self._denials.add([denial for denial, why in denials if not why.is_passing])

    @functools.cached_property
    def _is_futile(self) -> bool:
        return refuses_everything(self._builder)

    @functools.cached_property
    def _scalars(self) -> Sequence[fx.Node]:
        return [n for n in self._captured.nodes if is_scalar(n)]

    def region(self, nodes: Sequence[fx.Node]) -> Region:
        """Make some nodes a region of their own."""
        segment = with_own_sizes(Segment(DEVICE, list(nodes), "trial"), self._scalars)
        return extract_region(segment, bound_nodes(self._captured))

    def _program(self, nodes: Sequence[fx.Node]) -> str:
        return self._builder.key(self.region(nodes)).digest

    def _deny(self, node: fx.Node, error: StageError, trials: _Trials) -> Denial:
        program = self._program(_with_parts(node))
        return Denial(
            program=program,
            op=str(node.target),
            target=self._builder.target.name,
            reason=error.summary,
            where=str(user_line(node)),
            repro=str(trials.keep(node, program) or ""),
            limits=self._builder.limits,
        )

    def _deny_together(
        self, segment: Segment, error: StageError, parts: Sequence[Sequence[fx.Node]]
    ) -> Denial:
        log.warning(
            "%s is compiled in %d parts: as one the compiler refused it (%s)",
            segment.name,
            len(parts),
            error.summary,
        )
        return Denial(
            program=self._program(segment.nodes),
            op="",
            parts=tuple(map(len, parts)),
            target=self._builder.target.name,
            reason=error.summary,
            limits=self._builder.limits,
        )


def refuses_everything(builder: Builder) -> bool:
    """Say whether even the smallest program fails: a flag, a limit or the machine is to blame."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    more = graph.call_function(torch.ops.aten.add.Tensor, (x, x))
    graph.output((more,))
    with unset_fake_temporarily(), FakeTensorMode():
        x.meta["val"], more.meta["val"] = torch.empty(2), torch.empty(2)
    region = extract_region(Segment(DEVICE, [more], "smallest"), {})
    return builder.attempt(region, None) is not None


class _Trials:
    """Compiles of parts of a region, each with a dump that is kept if its op is to blame."""

    def __init__(self, healer: Healer, folder: Path | None) -> None:
        self._healer = healer
        self._folders = (folder / str(i) if folder else None for i in itertools.count())
        self._dumps: dict[tuple[fx.Node, ...], Path | None] = {}

    def attempt(self, nodes: Sequence[fx.Node]) -> StageError | None:
        """Compile some nodes as a region of their own; return how it fails, or None."""
        dump = self._dumps[tuple(nodes)] = next(self._folders)
        return self._healer._builder.attempt(self._healer.region(nodes), dump)

    def keep(self, node: fx.Node, program: str) -> Path | None:
        """Move the dump of a blamed node to where the user can find it."""
        cache = self._healer._builder.cache
        nodes = tuple(_with_parts(node))
        if cache is None:
            return None
        if nodes not in self._dumps:  # the region was this op alone
            self.attempt(nodes)
        dump, kept = self._dumps[nodes], cache.folder / "failures" / program[:16]
        if dump is None or not (dump / "repro.sh").exists():
            return None
        try:
            shutil.copytree(dump, kept, dirs_exist_ok=True)
        except OSError:  # a full disk: half of what repeats a failure is worse than nothing
            shutil.rmtree(kept, ignore_errors=True)
            return None
        return kept


@contextlib.contextmanager
def _scratch() -> Iterator[Path | None]:
    """Give a folder for the time of the block; None if there is no place for one."""
    try:
        folder = tempfile.mkdtemp(prefix="npu-iree-")
    except OSError:
        yield None
        return
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _with_parts(node: fx.Node) -> list[fx.Node]:
    """Give a node and the nodes that take its result apart."""
    return [node, *(user for user in node.users if user.target is operator.getitem)]


def _split(nodes: Sequence[fx.Node], sizes: Sequence[int]) -> list[list[fx.Node]]:
    """Cut a region as `diagnose` has cut it before, into parts of these sizes."""
    ordered = itertools.chain.from_iterable(units_of(nodes))
    return [list(itertools.islice(ordered, size)) for size in sizes]
