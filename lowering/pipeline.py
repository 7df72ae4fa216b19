"""From a program to a module: the stages in their order, each verified, timed and dumped."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import fx

from lowering.cpu import required_features
from lowering.errors import CancelledError, FlagError, StageError, WorkerStartError, said, shortened
from lowering.kernels import Kernel, used_kernels
from lowering.program import Program
from lowering.rewrites import rewrite
from lowering.service import CompileService, Fault, Limits
from lowering.stages import CompileOptions, Stage
from lowering.stages.aten_to_torch import ATEN_TO_TORCH
from lowering.stages.flow_to_vmfb import FLOW_TO_VMFB
from lowering.stages.linalg_to_flow import LINALG_TO_FLOW
from lowering.stages.torch_to_linalg import TORCH_TO_LINALG
from lowering.target import CompileTarget, FlagSet
from lowering.worker import STAGES as WORKER_STAGES

log = logging.getLogger(__name__)

STAGES: tuple[Stage, ...] = (ATEN_TO_TORCH, TORCH_TO_LINALG, LINALG_TO_FLOW, FLOW_TO_VMFB)
OPTIONS_FILE = "options.json"


@dataclass(frozen=True, kw_only=True)
class Toolchain:
    """Where and how the stages run.

    Attributes:
        service: worker processes for the stages after the import; None runs them in this process.
        limits: what a stage may take in a worker.
        flags: the user's own `iree-compile` flags, after the target's.
        kernels: the user's own kernels, by their ops.
        fault: a failure to commit in a worker, for tests.
        cancelled: set when nobody waits for the product any more.
    """

    service: CompileService | None = None
    limits: Limits = field(default_factory=Limits)
    flags: FlagSet = ()
    kernels: Mapping[str, Kernel] = field(default_factory=dict)
    fault: Fault | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class CompiledModule:
    """What the stages made of a program.

    Attributes:
        vmfb: the module.
        flags: the flag set that was taken.
        source: the program in the torch dialect, from which it can be compiled again.
        cpu_features: what a CPU must have to run it (`lowering.cpu`).
        refused: how many flag sets, which would have been better, the compiler refused or died of.
        is_lasting: whether the compiler would end so again: nobody has killed it.
    """

    vmfb: bytes
    flags: FlagSet
    source: str
    cpu_features: tuple[str, ...] = ()
    refused: int = 0
    is_lasting: bool = True


def compile_program(
    program: Program,
    target: CompileTarget,
    toolchain: Toolchain = Toolchain(),
    dump: Path | None = None,
) -> CompiledModule:
    """Lower a program to a .vmfb.

    Args:
        program: the program.
        target: what to compile for; its flag sets are tried in order.
        toolchain: where the stages run, with which limits.
        dump: a folder for the product of every stage and a `repro.sh`, or None.

    Raises:
        StageError: a stage failed, with every flag set where it is one of IREE's.
        WorkerStartError: the service has no workers.
    """
    if toolchain.service is not None:
        toolchain.service.start_ahead()
    graphs = rewritten(program, target)
    if dump is not None:
        text = "\n".join(map(_readable, graphs.values()))
        _keep(dump / "00-graph.txt", text.encode())
    flag_sets = target.flag_sets_for(program.traits, toolchain.flags)
    fault = toolchain.fault
    if fault is not None and fault.op not in program.ops:
        toolchain = replace(toolchain, fault=None)
    options = options_for(program, flag_sets[0] if flag_sets else (), toolchain)
    torch_asm = run_stage(ATEN_TO_TORCH, graphs, options, toolchain, dump)
    linalg_asm = run_stage(TORCH_TO_LINALG, torch_asm, options, toolchain, dump)
    was_killed = False
    for i, flag_set in enumerate(flag_sets):
        options = replace(options, flags=flag_set)
        try:
            flow_asm = run_stage(LINALG_TO_FLOW, linalg_asm, options, toolchain, dump)
            vmfb = run_stage(FLOW_TO_VMFB, flow_asm, options, toolchain, dump)
        except StageError as error:
            others = flag_sets[i + 1 :]
            error.was_killed = was_killed = was_killed or error.was_killed
            is_hopeless = error.timed_out or error.lacks_space or _is_of_all(error, others)
            if not others or is_hopeless:
                raise
            number = f"{i + 1} of {len(flag_sets)}"
            log.info("%s: flag set %s failed: %s", program.name, number, error)
            continue
        features = required_features(flow_asm)
        return CompiledModule(vmfb, flag_set, torch_asm, features, i, is_lasting=not was_killed)
    raise StageError(LINALG_TO_FLOW.name, f"target {target.name!r} lists no flag sets")


def _is_of_all(error: StageError, flag_sets: Sequence[FlagSet]) -> bool:
    """Say whether a flag is refused that all of these sets have, too: the user's, for one."""
    named = error.named if isinstance(error, FlagError) else ()
    return any(all(flag in flags for flags in flag_sets) for flag in named)


def rewritten(program: Program, target: CompileTarget) -> dict[str, fx.GraphModule]:
    """Rewrite the graphs of a program; where a rule fails, the graph as it is computes the same."""
    graphs = dict(program.graphs)
    for entry, graph in graphs.items():
        try:
            graphs[entry] = rewrite(graph, target)
        except Exception as error:
            text = "%s is not rewritten for %s, and may be slower: %r"
            log.warning(text, program.name, target.name, error)
    return graphs


def options_for(program: Program, flags: FlagSet, toolchain: Toolchain) -> CompileOptions:
    """Return what the stages may know of a program."""
    return CompileOptions(
        flags=flags,
        parameters=program.parameters,
        given=program.given,
        rebind=program.rebind,
        kernels=used_kernels(toolchain.kernels, program.ops),
    )


def stop_after(
    stage: str, program: Program, target: CompileTarget, toolchain: Toolchain = Toolchain()
) -> bytes:
    """Lower a program with the first flag set as far as one stage; return its product.

    Raises:
        StageError: a stage failed.
        WorkerStartError: the service has no workers.
        ValueError: there is no such stage.
    """
    names = [s.name for s in STAGES]
    if stage not in names:
        raise ValueError(f"no stage {stage!r}; there are: {', '.join(names)}")
    flags = target.flag_sets_for(program.traits, toolchain.flags)[0]
    options = options_for(program, flags, toolchain)
    value: Any = rewritten(program, target)
    for step in STAGES[: names.index(stage) + 1]:
        value = run_stage(step, value, options, toolchain)
    return value if isinstance(value, bytes) else bytes(value.encode())


def compile_source(
    source: str, options: CompileOptions, toolchain: Toolchain = Toolchain()
) -> bytes:
    """Compile again from the torch dialect.

    Args:
        source: one module in the torch dialect.
        options: what it was compiled with.
        toolchain: where the stages run, with which limits.

    Raises:
        StageError: a stage failed.
        WorkerStartError: the service has no workers.
    """
    fault = toolchain.fault
    if fault is not None and f"torch.{fault.op.removesuffix('.default')} " not in source:
        toolchain = replace(toolchain, fault=None)
    value: Any = source
    for stage in STAGES[1:]:
        value = run_stage(stage, value, options, toolchain)
    return bytes(value)


def run_stage(
    stage: Stage,
    value: Any,
    options: CompileOptions,
    toolchain: Toolchain = Toolchain(),
    dump: Path | None = None,
) -> Any:
    """Run one stage: the only place that verifies, times, dumps and wraps errors.

    Args:
        stage: what to run.
        value: its input, a graph, text or bytes.
        options: what it may know beside its input.
        toolchain: where it runs.
        dump: folder for the product, or None.

    Raises:
        StageError: the stage failed or its product is not what the next stage expects.
        WorkerStartError: the service has no workers.
    """
    if dump is not None:
        _write_repro(dump, stage, options)
    log.debug("stage %s", stage.name)
    started = time.perf_counter()
    if toolchain.cancelled.is_set():
        raise CancelledError
    try:
        product = _product(stage, value, options, toolchain)
    except FlagError:
        raise
    except StageError as error:
        text = _first_lines(error.diagnostics)
        raise StageError(
            stage.name, text, dump, timed_out=error.timed_out, was_killed=error.was_killed
        ) from error
    except WorkerStartError:  # that says nothing of the program
        raise
    except Exception as error:
        raise StageError(stage.name, _first_lines(said(error)), dump) from error
    log.debug("stage %s took %.3f s", stage.name, time.perf_counter() - started)
    if dump is not None:
        data = product if isinstance(product, bytes) else product.encode()
        _keep(dump / product_name(stage), data)
    return product


def _keep(path: Path, data: bytes) -> bool:
    """Write a file of a dump, if it can be; on a full disk the compile goes on without it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink()  # half of it may be there
        _say_once(error.strerror)
        return False
    return True


@functools.cache
def _say_once(why: str) -> None:
    log.warning("dumps are not complete: files cannot be written (%s)", why)


def _product(stage: Stage, value: Any, options: CompileOptions, toolchain: Toolchain) -> Any:
    if toolchain.service is None or stage.name not in WORKER_STAGES:
        product = stage.run(value, options)
        if problem := stage.verify(product):
            raise StageError(stage.name, problem)
        return product
    fault = toolchain.fault
    kind = fault.kind if fault is not None and fault.stage == stage.name else None
    data = toolchain.service.run(
        stage.name, value, options, toolchain.limits, kind, toolchain.cancelled
    )
    return data if stage is STAGES[-1] else data.decode()


def product_name(stage: Stage) -> str:
    """Return the file name of a stage's dump, e.g. `02-torch-to-linalg.linalg.mlir`."""
    return f"{STAGES.index(stage) + 1:02d}-{stage.name}.{stage.product}"


def restart(
    path: Path, options: CompileOptions, dump: Path, toolchain: Toolchain = Toolchain()
) -> Path:
    """Run the stages that follow the one that wrote `path`, and dump their products.

    Args:
        path: a dump of a stage, or any file whose name ends like one (`.torch.mlir`,
            `.linalg.mlir`).
        options: flags and parameter count.
        dump: folder for the products.
        toolchain: where the stages run, with which limits.

    Returns:
        The last product.

    Raises:
        StageError: a stage failed.
        ValueError: no stage continues from such a file.
    """
    done = next((i for i, s in enumerate(STAGES[:-1]) if path.name.endswith(s.product)), None)
    if done is None:
        endings = ", ".join(f".{s.product}" for s in STAGES[:-1])
        raise ValueError(f"no stage continues from {path.name!r}; it must end in one of {endings}")
    dump.mkdir(parents=True, exist_ok=True)
    value: Any = path.read_text()
    for stage in STAGES[done + 1 :]:
        value = run_stage(stage, value, options, toolchain, dump)
    return dump / product_name(STAGES[-1])


def _write_repro(dump: Path, stage: Stage, options: CompileOptions) -> None:
    """Write the script that restarts from the input of `stage`; a later stage overwrites it."""
    position = STAGES.index(stage)
    if position == 0 or not (dump / product_name(STAGES[position - 1])).exists():
        return  # there is nothing to restart from
    texts = json.dumps(options.to_json(), indent=1) + "\n"
    if not _keep(dump / OPTIONS_FILE, texts.encode()):
        return
    script = (
        "#!/bin/sh\n"
        f"# Repeats the lowering from the input of the stage {stage.name} on, with the flags and\n"
        f"# parameters of {OPTIONS_FILE}.\n"
        'cd "$(dirname "$0")" && exec python -m lowering '
        f"{product_name(STAGES[position - 1])}\n"
    )
    _keep(dump / "repro.sh", script.encode())


def _readable(graph_module: fx.GraphModule) -> str:
    return str(graph_module.print_readable(print_output=False))


def _first_lines(text: str) -> str:
    lines = [line[:400] for line in text.strip().splitlines() if line.strip()]
    return "\n".join(shortened(lines, 12, "... ({} more lines)"))
