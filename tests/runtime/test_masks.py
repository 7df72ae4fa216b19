"""Whatever falls back, the numbers are eager's, and each plan keeps the promises of plans."""

from __future__ import annotations

import graphlib
import operator
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from lowering.capture import capture_aot
from lowering.decompositions import decomposition_table
from lowering.partition import Partition
from lowering.plan import Free, Gather, Host, Invoke, Plan, Put, Scalar, Value
from lowering.segments import HOST
from npu_iree.options import Options
from npu_iree.toolchain import compiler_for
from tolerances import assert_same

Tensor = torch.Tensor


def halves(a: Tensor) -> Tensor:
    left, right = a.split(2, 1)
    return torch.cat([right * 2, left], 1)


def channels_last(a: Tensor) -> Tensor:
    image = torch.relu(a.view(1, 2, 2, 4).permute(0, 3, 1, 2)) + 1
    return image.permute(0, 2, 3, 1).reshape(4, 4)


def largest(a: Tensor) -> Tensor:
    values, indices = a.topk(2, dim=1)
    return torch.cat([values, indices], 1)


def row_maxima(a: Tensor, b: Tensor) -> Tensor:
    values, indices = a.max(1)
    return (b + values - indices) % 23


@dataclass(frozen=True)
class Op:
    """A step on [4, 4] tensors; floats take steps that have no jumps, so that rounding stays small.

    Attributes:
        run: the step.
        kinds: what it takes, `f` (f32) or `i` (i64) each.
        makes: what it gives.
    """

    run: Callable[..., Tensor]
    kinds: str
    makes: str


OPS: dict[str, Op] = {
    "add": Op(lambda a, b: a + b, "ff", "f"),
    "mul": Op(lambda a, b: torch.sigmoid(a) * b, "ff", "f"),
    "relu": Op(lambda a: torch.relu(a) - 0.5, "f", "f"),
    "matmul": Op(lambda a, b: (a * 0.2) @ torch.tanh(b), "ff", "f"),
    "reduce": Op(lambda a, b: a * 0.1 + b.sum(1, keepdim=True) * 0.1 - a.amax(0), "ff", "f"),
    "softmax": Op(lambda a: torch.softmax(a, -1), "f", "f"),
    "transpose": Op(lambda a: a.t(), "f", "f"),
    "views": Op(lambda a: a.reshape(2, 2, 4).permute(1, 0, 2).reshape(4, 4), "f", "f"),
    "slices": Op(lambda a, b: torch.cat([a[1:], b[:1]]), "ff", "f"),
    "split": Op(halves, "f", "f"),
    "channels_last": Op(channels_last, "f", "f"),
    "where": Op(lambda a, b, n: torch.where(n > 5, a, b), "ffi", "f"),
    "gather": Op(lambda a, n: a.gather(1, n % 4), "fi", "f"),
    "to_float": Op(lambda n: n.float() * 0.1, "i", "f"),
    "int_add": Op(lambda n, m: (n + m * 3) % 19, "ii", "i"),
    "int_and": Op(lambda n, m: (n & 7) | (m ^ 1), "ii", "i"),
    "topk": Op(largest, "i", "i"),
    "max": Op(row_maxima, "ii", "i"),
    "cumsum": Op(lambda n: n.cumsum(0) % 29, "i", "i"),
    "scatter": Op(lambda n, m: n.scatter(1, m % 4, 1), "ii", "i"),
    "compare": Op(lambda n, m: ((n > m) & (m != 3)).long() + n, "ii", "i"),
}
MASKABLE = [
    *("add", "sub", "mul", "div", "relu", "sigmoid", "tanh", "mm", "sum", "amax", "exp", "permute"),
    *("transpose", "view", "slice", "cat", "where", "gt", "split", "split_with_sizes", "topk"),
    *("max", "cumsum", "remainder", "bitwise_and", "bitwise_or", "bitwise_xor", "gather"),
    *("scatter", "_to_copy", "clone", "select", "ne", "unsqueeze"),
]
INPUTS = "ffi"


@dataclass(frozen=True)
class Program:
    """Steps by name with the positions of their operands, and the positions that are returned."""

    steps: tuple[tuple[str, tuple[int, ...]], ...]
    returned: tuple[int, ...]

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        values = list(inputs)
        for name, operands in self.steps:
            values.append(OPS[name].run(*[values[i] for i in operands]))
        return [values[i] for i in self.returned]


@st.composite
def programs(draw: st.DrawFn) -> Program:
    kinds = list(INPUTS)
    steps = []
    for _ in range(draw(st.integers(3, 10))):
        name = draw(st.sampled_from(sorted(OPS)))
        op = OPS[name]
        places = [[i for i, k in enumerate(kinds) if k == kind] for kind in op.kinds]
        steps.append((name, tuple(draw(st.sampled_from(p[::-1])) for p in places)))
        kinds.append(op.makes)
    positions = st.integers(0, len(kinds) - 1).map(lambda i: len(kinds) - 1 - i)
    return Program(tuple(steps), tuple(draw(st.lists(positions, min_size=1, max_size=5))))


masks = st.frozensets(st.sampled_from(MASKABLE), max_size=8)


def example_inputs() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(5)
    floats = (torch.randn(4, 4, generator=generator) for _ in range(2))
    # Distinct numbers: which of two equal ones `topk` names first is nobody's promise.
    return *floats, torch.randperm(16, generator=generator).view(4, 4)


def planned(program: Program, mask: frozenset[str]) -> tuple[Partition, Plan]:
    graph = make_fx(program, decomposition_table=decomposition_table(), tracing_mode="fake")(
        *example_inputs()
    )
    return compiler_for(Options.parse({"disabled_ops": mask})).plan(capture_aot(graph))


@pytest.mark.slow
@pytest.mark.parametrize(
    "target", [pytest.param("npu-local", marks=pytest.mark.sweep), "npu-virtual"]
)
@settings(deadline=None, max_examples=12, suppress_health_check=list(HealthCheck), derandomize=True)
@given(program=programs(), mask=masks)
def test_every_mask_gives_eagers_numbers(
    program: Program, mask: frozenset[str], target: str
) -> None:
    torch._dynamo.reset()
    options = {"target": target, "disabled_ops": mask}
    run = torch.compile(lambda *inputs: program(*inputs), backend="npu_iree", options=options)
    for _ in range(2):
        ours, eagers = example_inputs(), example_inputs()
        actual, expected = run(*ours), program(*eagers)
        assert_same(actual, expected)
        assert_same(ours, eagers)
        assert [t.stride() for t in actual] == [t.stride() for t in expected]


@pytest.mark.parametrize("name", MASKABLE)
def test_each_op_alone_may_be_masked(name: str) -> None:
    steps = tuple((op, tuple(INPUTS.index(k) for k in OPS[op].kinds)) for op in OPS)
    program = Program(steps, tuple(range(3 + len(steps))))
    parts, plan = planned(program, frozenset({name}))
    check_segments(parts, frozenset({name}))
    check_steps(plan)


@pytest.mark.slow
@settings(
    deadline=None, max_examples=100, suppress_health_check=list(HealthCheck), derandomize=True
)
@given(program=programs(), mask=masks)
def test_every_plan_keeps_the_promises_of_plans(program: Program, mask: frozenset[str]) -> None:
    parts, plan = planned(program, mask)
    check_segments(parts, mask)
    check_steps(plan)
    assert len(plan.outputs) == len(program.returned)


@pytest.mark.parametrize("mask", [[], ["sub"], ["expand", "unsqueeze"]])
def test_a_reduction_that_is_read_along_two_axes_is_right(mask: list[str], target: str) -> None:
    def differences(x: Tensor) -> tuple[Tensor, Tensor]:
        values, indices = x.max(1)
        total = x.sum(1)
        return total[:, None] - total[None], values[:, None] - indices

    options = {"target": target, "disabled_ops": mask}
    run = torch.compile(differences, backend="npu_iree", options=options)
    assert_same(run(example_inputs()[0]), differences(example_inputs()[0]))


def check_segments(parts: Partition, mask: frozenset[str]) -> None:
    """Each node is in one segment, masked ones on the host; the segments have no cycle."""
    placed = [(n, s.name) for s in parts.segments for n in s.nodes if n not in parts.scalars]
    owner = dict(placed)
    assert len(owner) == len(placed), "a node is in two segments"
    assert set(owner) | set(parts.scalars) == set(parts.captured.nodes)
    graph: dict[str, set[str]] = {s.name: set() for s in parts.segments}
    for segment in parts.segments:
        for node in segment.nodes:
            packet = str(node.target).rpartition(".")[0]
            is_masked = not mask.isdisjoint({packet, packet.rpartition(".")[2]})
            assert segment.space == HOST or not is_masked, node.format_node()
            inputs = {owner[n] for n in node.all_input_nodes if n in owner}
            graph[segment.name] |= inputs - {segment.name}
            if node.target is operator.getitem:
                assert owner[node.args[0]] == segment.name, "a tuple crosses a border"
    tuple(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError: not convex


def check_steps(plan: Plan) -> None:
    """Walk through a plan; every read must find its value where the step looks for it."""
    on_host, on_device = {*plan.inputs, *plan.constants}, set[str]()
    made: set[str] = {*on_host}
    crossed: dict[type, list[str]] = {Put: [], Gather: []}
    device_made: set[str] = set()
    at_first_wait: list[set[str]] = []
    for step in plan.steps:
        match step:
            case Put(values):
                assert set(values) <= on_host - on_device, step
                assert not device_made & set(values), "a value of the device is put back"
                on_device |= set(values)
                crossed[Put] += values
            case Invoke(_, inputs, outputs):
                tensors = {n for n in inputs if n not in plan.scalars}
                assert tensors <= on_device, step
                for known in at_first_wait:
                    assert not set(inputs) <= known, f"{step} could have been submitted before"
                on_device |= set(outputs)
                device_made |= set(outputs)
            case Gather(values, _):
                assert set(values) <= on_device - on_host, step
                on_host |= set(values)
                crossed[Gather] += values
                at_first_wait.append(set(made))
            case Host(_, inputs, outputs) | Scalar(outputs, inputs):
                assert set(inputs) <= on_host, step
                on_host |= {outputs} if isinstance(outputs, str) else set(outputs)
            case Free(values):
                assert set(values) <= on_host | on_device, "freed twice, or never made"
                on_host -= set(values)
                on_device -= set(values)
        made |= on_host | on_device
    assert {o.name for o in plan.outputs if isinstance(o, Value)} <= on_host
    for kind, values in crossed.items():
        assert len(values) == len(set(values)), f"{kind.__name__} twice"
