"""The device programs that a program was compiled into, with the user's lines: for a profile."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence

from torch import fx

from lowering.errors import StageError
from lowering.manifest import Dispatch
from lowering.pipeline import Toolchain, options_for, rewritten, run_stage
from lowering.program import Program
from lowering.source import model_line
from lowering.stages.aten_to_torch import ATEN_TO_LOCATED_TORCH
from lowering.stages.torch_to_dispatches import TORCH_TO_DISPATCHES
from lowering.target import CompileTarget, FlagSet

log = logging.getLogger(__name__)


def list_dispatches(
    program: Program, target: CompileTarget, flags: FlagSet, toolchain: Toolchain
) -> tuple[Dispatch, ...]:
    """Lower a program again, as far as its device programs, to know what these compute.

    The module itself holds no lines: equal programs from different files are one in the cache.

    Args:
        program: what was compiled.
        target: what for.
        flags: the settings that were chosen.
        toolchain: where the stages run, with which limits.

    Returns:
        Its device programs; none if a stage failed, with a log line: nothing else depends on them.

    Raises:
        WorkerStartError: the service has no workers.
    """
    graphs = rewritten(program, target)
    options = options_for(program, flags, toolchain)
    try:
        located = run_stage(ATEN_TO_LOCATED_TORCH, graphs, options, toolchain)
        table = json.loads(run_stage(TORCH_TO_DISPATCHES, located, options, toolchain))
    except StageError as error:
        log.warning("%s: profiles will tell no lines and no work: %s", program.name, error)
        return ()
    nodes = [list(graph.graph.nodes) for graph in graphs.values()]
    return tuple(
        Dispatch(name, _ops(nodes, row["nodes"]), row["bytes"], row["flops"])
        for name, row in table.items()
    )


def _ops(
    nodes: Sequence[Sequence[fx.Node]], places: Iterable[tuple[int, int]]
) -> tuple[tuple[str, str], ...]:
    """Return the ops at some positions of graph and node; inputs and constants are none."""
    found = [nodes[graph][node] for graph, node in places]
    ops = [(str(n.target), str(model_line(n))) for n in found if n.op == "call_function"]
    return tuple(dict.fromkeys(ops))
