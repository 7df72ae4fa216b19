"""From a captured graph to a plan with its artifacts: planned, built, and healed where need be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowering.abi import ENTRY
from lowering.artifact import Artifact, EntryPoint
from lowering.build import Builder
from lowering.bundle import BuiltGraph, Origin
from lowering.cache import Entry
from lowering.capabilities import Capabilities
from lowering.capture import CapturedGraph
from lowering.denials import DenialRecord
from lowering.errors import HostOp, NotCompiledError, StageError, UnsupportedOpError
from lowering.heal import Healer
from lowering.missing import differences
from lowering.partition import Partition, partition
from lowering.plan import Plan, build_plan
from lowering.record import GraphRecord, Healed, graph_text
from lowering.region import Region, bound_nodes, extract_region
from lowering.source import model_line
from lowering.writes import given_inputs

# Ops that PyTorch's own kernels crash on in a compiled graph -> why, and what to do.
_NOWHERE = {
    "aten.mkldnn_rnn_layer_backward.default": (
        "PyTorch's kernel reads a workspace that its forward leaves out in a compiled graph",
        "keep the LSTM out of the graph: torch._dynamo.config.allow_rnn = False",
    )
}


@dataclass(frozen=True)
class CompiledGraph:
    """A plan, the artifacts of its regions by name, and what a bundle keeps of it."""

    plan: Plan
    artifacts: dict[str, Artifact]
    built: BuiltGraph


@dataclass(frozen=True, kw_only=True)
class Compiler:
    """Plans and compiles graphs for one target.

    Attributes:
        builder: gets the modules of regions.
        capabilities: what the target runs.
        forbid_host: raise instead of leaving to the host what the target cannot run.
        disabled_ops: ops that the user sends to the host.
        denials: what the compiler refused before, or None.
        origin: what graphs are built with and for, as a bundle tells it.
    """

    builder: Builder
    capabilities: Capabilities
    forbid_host: bool = False
    disabled_ops: frozenset[str] = frozenset()
    denials: DenialRecord | None = None
    origin: Origin | None = None

    def plan(self, captured: CapturedGraph, healed: Healed | None = None) -> tuple[Partition, Plan]:
        """Decide what of a graph runs where; compiles nothing.

        Raises:
            UnsupportedOpError: the host is forbidden, and the target cannot run some ops; the
                error lists them all.
        """
        parts = partition(
            captured,
            self.capabilities,
            disabled_ops=self.disabled_ops,
            failed=healed.failed if healed else None,
            apart=healed.apart if healed else None,
            kernels=self.builder.toolchain.kernels,
        )
        for op in parts.host_ops.values():
            if op.op in _NOWHERE:
                raise UnsupportedOpError(self.builder.target.name, [op], *_NOWHERE[op.op])
        refused = [op for op in parts.host_ops.values() if op.kind in ("unsupported", "failed")]
        if self.forbid_host and refused:
            raise UnsupportedOpError(self.builder.target.name, _each_once(refused))
        bound, given = bound_nodes(captured), given_inputs(parts)
        regions = [extract_region(s, bound, given=given[s.name]) for s in parts.regions]
        return parts, build_plan(parts, regions)

    def compile(self, captured: CapturedGraph) -> CompiledGraph:
        """Plan a graph and compile its regions.

        What the compiler refuses is bisected: the ops to blame go to the host, with one warning.

        Raises:
            UnsupportedOpError: the host is forbidden, and the target cannot run some ops.
            StageError: the host is forbidden, and the compiler refused a region.
            NotCompiledError: a region is neither in the bundle nor in the cache, and may not be
                compiled.
            ArtifactError: the bundle is damaged.
        """
        healer, text = Healer(self.builder, self.denials, captured), graph_text(captured)
        healed = self._saved(captured, text) or healer.recall(
            lambda known: self.plan(captured, known)[0].regions
        )
        while True:
            parts, plan = self.plan(captured, healed)
            built = self.builder.build(list(plan.regions.values()))
            entries = {n: e for n, e in built.items() if isinstance(e, Entry)}
            if len(entries) == len(built):
                return _compiled(captured, text, plan, healed, entries)
            if None in built.values():
                raise self._not_compiled(captured, text, plan, list(entries))
            for segment in parts.regions:
                error = built[segment.name]
                if isinstance(error, StageError):
                    if self.forbid_host:
                        raise error
                    healer.heal(segment, error, healed)

    def _saved(self, captured: CapturedGraph, text: str) -> Healed | None:
        bundle = self.builder.bundle
        return bundle.healed(captured, text) if bundle is not None else None

    def _not_compiled(
        self, captured: CapturedGraph, text: str, plan: Plan, found: Sequence[str]
    ) -> NotCompiledError:
        builder = self.builder
        keys = [builder.key(region) for name, region in plan.regions.items() if name not in found]
        found_in = [f"the bundle {builder.bundle.path}"] if builder.bundle is not None else []
        found_in += [f"the cache in {builder.cache.folder}"] if builder.cache is not None else []
        lines = []
        if builder.bundle is not None:
            lines = differences(captured, text, keys, self.origin, builder.bundle)
        elif builder.cache is not None:
            near = builder.cache.nearest(keys[0])
            lines = [
                f"the nearest entry of the cache differs in {near}"
                if near
                else "the cache is empty"
            ]
        where = next(filter(None, (model_line(node).where for node in captured.nodes)), "")
        return NotCompiledError(captured.kind, where, " or ".join(found_in), lines)


def _compiled(
    captured: CapturedGraph, text: str, plan: Plan, healed: Healed, entries: dict[str, Entry]
) -> CompiledGraph:
    artifacts = {name: _artifact(plan.regions[name], entry) for name, entry in entries.items()}
    digests = {name: entry.key.digest for name, entry in entries.items()}
    record = GraphRecord.of(captured, text, plan, healed, digests)
    return CompiledGraph(plan, artifacts, BuiltGraph(record, text, entries))


def _artifact(region: Region, entry: Entry) -> Artifact:
    ops = tuple((op, str(line)) for op, line in region.ops)
    main = EntryPoint(region.signature, ops)
    return Artifact(region.name, entry.vmfb, {ENTRY: main}, entry.flags)


def _each_once(ops: Sequence[HostOp]) -> list[HostOp]:
    return list({id(op): op for op in ops}.values())
