"""From a captured graph to a plan with its artifacts: planned, built, and healed where need be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowering.artifact import Artifact
from lowering.build import Builder
from lowering.capabilities import Capabilities
from lowering.capture import CapturedGraph
from lowering.denials import DenialRecord
from lowering.errors import HostOp, StageError, UnsupportedOpError
from lowering.heal import Healed, Healer
from lowering.partition import Partition, partition
from lowering.plan import Plan, build_plan
from lowering.region import bound_nodes, extract_region


@dataclass(frozen=True)
class CompiledGraph:
    """A plan, and the artifacts of its regions by name."""

    plan: Plan
    artifacts: dict[str, Artifact]


@dataclass(frozen=True, kw_only=True)
class Compiler:
    """Plans and compiles graphs for one target.

    Attributes:
        builder: gets the modules of regions.
        capabilities: what the target runs.
        forbid_host: raise instead of leaving to the host what the target cannot run.
        disabled_ops: ops that the user sends to the host.
        denials: what the compiler refused before, or None.
    """

    builder: Builder
    capabilities: Capabilities
    forbid_host: bool = False
    disabled_ops: frozenset[str] = frozenset()
    denials: DenialRecord | None = None

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
        )
        refused = [op for op in parts.host_ops.values() if op.kind in ("unsupported", "failed")]
        if self.forbid_host and refused:
            raise UnsupportedOpError(self.builder.target.name, _each_once(refused))
        bound = bound_nodes(captured)
        return parts, build_plan(parts, [extract_region(s, bound) for s in parts.regions])

    def compile(self, captured: CapturedGraph) -> CompiledGraph:
        """Plan a graph and compile its regions.

        What the compiler refuses is bisected: the ops to blame go to the host, with one warning.

        Raises:
            UnsupportedOpError: the host is forbidden, and the target cannot run some ops.
            StageError: the host is forbidden, and the compiler refused a region.
        """
        healer = Healer(self.builder, self.denials, captured)
        healed = healer.recall(lambda known: self.plan(captured, known)[0].regions)
        while True:
            parts, plan = self.plan(captured, healed)
            built = self.builder.build(list(plan.regions.values()))
            artifacts = {n: a for n, a in built.items() if isinstance(a, Artifact)}
            if len(artifacts) == len(built):
                return CompiledGraph(plan, artifacts)
            for segment in parts.regions:
                error = built[segment.name]
                if isinstance(error, StageError):
                    if self.forbid_host:
                        raise error
                    healer.heal(segment, error, healed)


def _each_once(ops: Sequence[HostOp]) -> list[HostOp]:
    return list({id(op): op for op in ops}.values())
