"""A graph of AOTAutograd's: what it is compiled as, and what runs it."""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import unset_fake_temporarily

from lowering.capture import CapturedGraph, capture_aot
from npu_iree import bundles
from npu_iree.cause import Cause
from npu_iree.device import open_device
from npu_iree.donation import NOTHING, Donated
from npu_iree.errors import EagerOnlyError, NotCompiledError, NpuIreeError
from npu_iree.executable import Executable
from npu_iree.options import Options
from npu_iree.report import CompileReport, tell
from npu_iree.returned_views import ReturnedViews
from npu_iree.runner import Runner
from npu_iree.shared_graph import SharedGraph, for_each_model
from npu_iree.toolchain import compiler_for
from npu_iree.torch_device import graphs
from npu_iree.transforms import teller, why_in_eager

log = logging.getLogger(__name__)
_GRAPH_NUMBERS = itertools.count()
_SET = torch.ops.aten.set_.source_Tensor


@dataclass(frozen=True, kw_only=True)
class AotGraph:
    """What a graph is compiled as.

    Attributes:
        options: of the `torch.compile` call.
        kind: what AOTAutograd made it for: `inference`, `forward` (of training) or `backward`.
        names: what the user would call its inputs; may be left out.
        weights: positions of the inputs whose tensors keep their identity between calls.
        donated: the inputs that a call gives away.
        returned: how many of its first results the user gets; None: all. The others are for the
            backward pass.
        views: positions of the results that are to be made as views of arguments.
    """

    options: Options
    kind: str
    names: Sequence[str] = ()
    weights: Sequence[int] = ()
    donated: Donated = NOTHING
    returned: int | None = None
    views: Sequence[int] = ()

    def load(
        self,
        graph_module: fx.GraphModule,
        cause: Cause | None = None,
        caller: bundles.Caller | None = None,
    ) -> LoadedGraph:
        """Compile the graph, which is changed, and load it.

        Args:
            graph_module: the graph.
            cause: why it is compiled, for the report.
            caller: the `torch.compile` call, for `save_bundle`.

        Raises:
            NotCompiledError: it would have to be compiled, and may not be.
            NpuIreeError: all else that `compile_graph` raises.
        """
        taken = self.take(graph_module)
        captured, donated = taken.captured, self.donated
        loaded: Runner | None = None
        every: Runner | SharedGraph | None = None
        runner: Callable[[list[Any]], Sequence[Any]]
        with unset_fake_temporarily():  # AOTAutograd calls us inside its fake tensor mode
            try:
                loaded = compile_graph(captured, self.options, cause, caller)
                every, donated = for_each_model(loaded), donated.reused_by(loaded.plan)
                runner = every.run
            except NotCompiledError as error:
                if self.options.compile != "eager":
                    raise
                log.warning("a graph runs on PyTorch's CPU kernels: %s", error.missing)
                runner = graphs.eager_runner(captured)
        is_direct = not (captured.handles or captured.kept or taken.views)
        run = taken.run_by(runner, donated, self.returned)
        if self.kind == "backward":
            run = taken.not_transformed(run, self.options.fallback)
        return LoadedGraph(run, loaded, every if is_direct else None)

    def take(self, graph_module: fx.GraphModule) -> TakenGraph:
        """Take the graph, which is changed, as what is compiled, and what is left to each call.

        Raises:
            EagerOnlyError: it cannot be, on "npu".
        """
        is_on_npu = graphs.is_any_on_npu(graph_module)
        if is_on_npu and any(n.target is _SET for n in graph_module.graph.nodes):
            raise EagerOnlyError("it gives an argument other memory (`x.data = ...`)")
        views = ReturnedViews.taken_out(graph_module, self.views, of_results=is_on_npu)
        if is_on_npu:
            graphs.make_device_free(graph_module)
        captured = capture_aot(graph_module, self.weights, self.names, self.kind)
        written, captured = captured.written, graphs.placed(captured)
        donated = frozenset(captured.inputs[i] for i in self.donated.names)
        return TakenGraph(replace(captured, donated=donated), written, views)


@dataclass(frozen=True)
class TakenGraph:
    """A graph as it is compiled, and what each call does beside running that.

    Attributes:
        captured: what is compiled.
        written: the inputs that it writes to.
        views: the results that are made of arguments, or of other results; None: no result is.
    """

    captured: CapturedGraph
    written: Sequence[fx.Node]
    views: ReturnedViews | None

    def run_by(
        self,
        runner: Callable[[list[Any]], Sequence[Any]],
        donated: Donated = NOTHING,
        returned: int | None = None,
    ) -> Callable[[list[Any]], list[Any]]:
        """Return what AOTAutograd calls.

        Args:
            runner: runs what is compiled, or the graph in another way, on handles and CPU tensors.
            donated: the inputs that a call gives away.
            returned: as for `AotGraph`.
        """
        captured, views = self.captured, self.views
        if captured.handles or captured.kept:
            runner = graphs.HandleRunner(runner, captured, self.written, donated, returned)

        def run(args: list[Any]) -> list[Any]:
            return list(runner(args)) if views is None else views.run(runner, args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def not_transformed(
        self, run: Callable[[list[Any]], list[Any]], fallback: str
    ) -> Callable[[list[Any]], list[Any]]:
        """Return what runs the calls in eager that no region can: those of PyTorch's transforms.

        Args:
            run: what runs the others.
            fallback: the option.
        """
        tell = teller(fallback)

        def call(args: list[Any]) -> list[Any]:
            if not (reason := why_in_eager(args)):
                return run(args)
            if self.captured.handles:
                raise NpuIreeError(f"{reason}; call the function itself, not compiled")
            tell(reason)
            return self.run_by(graphs.eager_runner(self.captured))(args)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call


@dataclass(frozen=True)
class LoadedGraph:
    """What a graph has become.

    Attributes:
        run: what AOTAutograd calls: takes the arguments out of a list, returns a list of results.
        runner: what runs it on the target; None if PyTorch's CPU kernels do.
        direct: what may be called itself, if all arguments and results are on the host.
    """

    run: Callable[[list[Any]], list[Any]]
    runner: Runner | None
    direct: Runner | SharedGraph | None


def compile_graph(
    captured: CapturedGraph,
    options: Options,
    cause: Cause | None = None,
    caller: bundles.Caller | None = None,
) -> Runner:
    """Plan a captured graph, compile its regions, and load them.

    Args:
        captured: the graph.
        options: of the `torch.compile` call.
        cause: why it is compiled, for the report.
        caller: the `torch.compile` call, for `save_bundle`.

    Raises:
        UnsupportedOpError: `fallback="error"`, and the target cannot run some ops.
        StageError: `fallback="error"`, and the compiler refused a region.
        TargetError: the target's device cannot be opened here.
        DeviceError: the device cannot load what was compiled for it.
        NotCompiledError: it would have to be compiled, and may not be.
        WorkerStartError: there are no workers to compile in.
    """
    number, started = next(_GRAPH_NUMBERS), time.perf_counter()
    counts: Counter[str] = Counter()
    compiler = compiler_for(options, f"graph{number}", counts)
    if compiler.builder.may_compile:  # which takes long, and is for a device that is there
        open_device(options.target_value)
    try:
        compiled = compiler.compile(captured)
    finally:
        counters["npu_iree"].update(counts)
    device = open_device(options.target_value)
    executables = {
        name: Executable(device, artifact) for name, artifact in compiled.artifacts.items()
    }
    constants = {node.name: tensor for node, tensor in captured.constants.items()}
    report = CompileReport(
        graph=number,
        part=captured.kind,
        target=options.target_value.name,
        cause=cause or Cause.now(),
        regions=len(compiled.plan.regions),
        host_ops=len(compiled.plan.host_ops),
        counts=dict(counts),
        ms=round((time.perf_counter() - started) * 1e3),
    )
    tell(report, compiled.plan)
    runner = Runner(compiled.plan, device, executables, constants)
    if compiler.origin is not None:
        bundles.remember(runner, caller, compiler.origin, compiled.built)
    return runner
