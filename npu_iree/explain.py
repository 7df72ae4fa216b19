"""`npu_iree.explain`: what of a model runs where, and why, without compiling anything."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from lowering.errors import first_line
from lowering.plan import Gather, Plan, Put
from lowering.region import Region
from npu_iree.aot import aot_backend
from npu_iree.backend import Source, aot_graph
from npu_iree.compiled_call import is_compiled_function
from npu_iree.errors import EagerOnlyError, HostOp, OptionError
from npu_iree.options import Options, as_dict
from npu_iree.targets import Target
from npu_iree.toolchain import compiler_for
from npu_iree.torch_device.current import is_on_npu
from npu_iree.torch_device.graphs import eager_runner, options_on_npu


@dataclass(frozen=True)
class GraphExplanation:
    """One graph that Dynamo captured.

    Attributes:
        plan: its schedule.
        target: what it was planned for.
    """

    plan: Plan
    target: Target

    @property
    def regions(self) -> list[Region]:
        """The device regions."""
        return list(self.plan.regions.values())

    @property
    def host_ops(self) -> tuple[HostOp, ...]:
        """The ops that run on the host, each with its reason and the user's line."""
        return self.plan.host_ops

    @property
    def transfers(self) -> list[tuple[str, str]]:
        """What will cross at each call: (`h2d` or `d2h`, name of the value), in order."""
        names = {Put: "h2d", Gather: "d2h"}
        steps = [s for s in self.plan.steps if isinstance(s, (Put, Gather))]
        return [(names[type(step)], value) for step in steps for value in step.values]

    @property
    def waits(self) -> int:
        """How often the host will wait at each call."""
        return sum(isinstance(step, Gather) for step in self.plan.steps)

    def __str__(self) -> str:
        lines = [f"{len(self.regions)} regions on {self.target.name}:"]
        lines += [f"  {r.name}: {len(r.ops)} ops {r.signature}" for r in self.regions]
        lines += [f"{len(self.host_ops)} host ops{':' if self.host_ops else ''}"]
        lines += [f"  {op}" for op in self.host_ops]
        how = "aliased" if self.target.memory == "unified" else "copied"
        lines += [f"{len(self.transfers)} transfers a call ({how}), {self.waits} waits:"]
        lines += [f"  {way} {value}" for way, value in self.transfers]
        return "\n".join(lines)


@dataclass(frozen=True)
class Explanation:
    """What `explain` found; prints itself.

    Attributes:
        graphs: the graphs, in the order in which they were captured.
        graph_breaks: why Dynamo ended a graph and where, one text each.
        in_eager: why a graph that was captured is run in eager, one text each.
    """

    graphs: list[GraphExplanation] = field(default_factory=list)
    graph_breaks: list[str] = field(default_factory=list)
    in_eager: list[str] = field(default_factory=list)

    @property
    def regions(self) -> list[Region]:
        """The device regions of all graphs."""
        return [region for graph in self.graphs for region in graph.regions]

    @property
    def host_ops(self) -> list[HostOp]:
        """The host ops of all graphs."""
        return [op for graph in self.graphs for op in graph.host_ops]

    def __str__(self) -> str:
        lines = [f"{len(self.graphs)} graphs, {len(self.graph_breaks)} graph breaks"]
        lines += [f"  break: {text}" for text in self.graph_breaks]
        lines += [f"a graph runs in eager: {text}" for text in self.in_eager]
        for i, graph in enumerate(self.graphs):
            lines += [f"graph {i}:", *(f"  {line}" for line in str(graph).splitlines())]
        return "\n".join(lines)


def explain(
    model: Callable[..., Any], *args: Any, options: dict[str, Any] | None = None, **kwargs: Any
) -> Explanation:
    """Say what `torch.compile(model, backend="npu_iree")` would do with these arguments.

    The model runs once, with PyTorch's own kernels; nothing is compiled for the target, and no
    device is opened.

    Args:
        model: a module or function.
        args: its arguments.
        options: as for `torch.compile`; `fallback="error"` is read as `"host"`, since the answer
            lists all ops anyway.
        kwargs: its keyword arguments.

    Raises:
        OptionError: an option does not exist or has a bad value, or the model is what
            `torch.compile` gave, whose options would not be looked at.
    """
    asked = _asked(model, options)
    found = Explanation()

    def plan(
        parsed: Options, source: Source, graph_module: fx.GraphModule, inputs: Any, *, kind: str
    ) -> Callable[..., Any]:
        graph = aot_graph(parsed, source, kind, len(inputs))
        if kind == "forward" and len(source.names) == len(inputs):
            graph = replace(graph, names=source.names)  # which tell more
        taken = graph.take(graph_module)
        with unset_fake_temporarily():  # AOTAutograd calls us inside its fake tensor mode
            _, schedule = compiler_for(parsed).plan(taken.captured)
        found.graphs.append(GraphExplanation(schedule, parsed.target_value))
        return taken.run_by(eager_runner(taken.captured))

    def backend(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        reason = getattr(graph_module, "compile_subgraph_reason", None)
        if reason is not None and reason.graph_break:
            found.graph_breaks.append(_break_text(reason))
        parsed = options_on_npu(asked) if any(map(is_on_npu, inputs)) else Options.parse(asked)
        source = Source.of(graph_module, inputs, parsed)
        made = aot_backend(parsed, functools.partial(plan, parsed, source))
        try:
            compiled: Callable[..., Any] = made(graph_module, inputs)
        except EagerOnlyError as error:
            found.in_eager.append(str(error))
            return graph_module
        finally:
            source.inputs.clear()
        return compiled

    # In a Dynamo cache of its own: a function has few places in the one that it is compiled into.
    isolated = torch.compile(model, backend=backend, isolate_recompiles=True)  # type: ignore[call-overload]
    isolated(*args, **kwargs)
    return found


def _asked(model: object, options: dict[str, Any] | None) -> dict[str, Any]:
    """Return the options to explain a model by, which are right."""
    if is_compiled_function(model):
        raise OptionError(
            "explain takes the model itself, not what torch.compile made of it; give the options "
            "that torch.compile was given as options={...}"
        )
    asked = {**as_dict(options), "fallback": "host"}
    Options.parse(asked)
    return asked


def _break_text(reason: Any) -> str:
    frame = reason.user_stack[-1] if reason.user_stack else None
    where = f" at {frame.filename}:{frame.lineno} in {frame.name}" if frame else ""
    return f"{first_line(str(reason.reason))}{where}"
