"""What the stages make of a graph, read in the IR; dumps restart; failures say what failed."""

from __future__ import annotations

import itertools
import math
import operator
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from iree.compiler import ir
from iree.runtime import _binding as hal
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from cpus import WIDE, WIDE_CPU, target_for
from lowering import pipeline
from lowering.__main__ import main as repeat
from lowering.abi import (
    LEND,
    LEND_RESULTS,
    LENT_BYTES,
    TAKE_BACK,
    TAKE_RESULTS_BACK,
    read_sizes,
)
from lowering.capabilities import load_capabilities
from lowering.capture import capture_aot
from lowering.cpu import missing_features
from lowering.decompositions import decomposition_table
from lowering.errors import StageError
from lowering.partition import partition
from lowering.pipeline import (
    STAGES,
    Toolchain,
    compile_program,
    options_for,
    product_name,
    restart,
    rewritten,
    run_stage,
)
from lowering.program import Program
from lowering.region import Region, extract_region
from lowering.stages import CompileOptions
from lowering.stages.code.block_convolutions import block_convolutions
from lowering.stages.code.give_access import replace_probe
from lowering.stages.code.multiply_tiles import multiply_tiles
from lowering.stages.code.pack_whole_tiles import pack_whole_tiles
from lowering.stages.code.product_loops import loop_at
from lowering.stages.code.read_ahead import read_ahead
from lowering.stages.code.read_rows_ahead import read_rows_ahead
from lowering.stages.code.sort_rows import sort_rows
from lowering.stages.flow.bind_functions import add_bind_functions
from lowering.stages.flow.read_by_rows import read_by_rows
from lowering.stages.ir.symbols import device_functions
from lowering.stages.ir.work_items import work_item
from lowering.stages.iree_session import IreeSession
from lowering.stages.linalg.separate_slices import separate_slices
from lowering.stages.linalg_to_flow import form_dispatches, prepare
from npu_iree.targets import NPU_LOCAL

BEFORE = {
    stage.name: (before, stage) for before, stage in zip((None, *STAGES), STAGES, strict=False)
}


def region_of(
    function: Callable[..., Any],
    *args: torch.Tensor,
    weights: int = 0,
    unknown: Sequence[int] = (),
) -> Region:
    """The one region of a function; its last `weights` arguments are bound.

    Of the others, sizes along some dimensions are unknown.
    """
    if unknown:
        fake = FakeTensorMode(shape_env=ShapeEnv())
        args = tuple(
            fake_of(fake, x, unknown if i < len(args) - weights else ()) for i, x in enumerate(args)
        )
    graph = make_fx(function, decomposition_table=decomposition_table())(*args)
    captured = capture_aot(graph, range(len(args) - weights, len(args)))
    (segment,) = partition(captured, load_capabilities("npu-local.toml")).segments
    return extract_region(segment, captured.weights)


def fake_of(mode: FakeTensorMode, x: torch.Tensor, unknown: Sequence[int]) -> torch.Tensor:
    """A tensor of which some sizes are unknown."""
    sizes = [DimDynamic.DYNAMIC if d in unknown else DimDynamic.STATIC for d in range(x.dim())]
    context = StatelessSymbolicContext(sizes, constraint_sizes=[None] * x.dim())
    return mode.from_tensor(x, symbolic_context=context)


class Lowered(dict[str, str]):
    """The products of the stages of a function by their names, each made when it is asked for."""

    def __init__(
        self,
        function: Callable[..., Any],
        *args: torch.Tensor,
        weights: int = 0,
        unknown: Sequence[int] = (),
    ) -> None:
        self.region = region_of(function, *args, weights=weights, unknown=unknown)

    def __missing__(self, name: str) -> str:
        program, (before, stage) = Program.of(self.region), BEFORE[name]
        flags, *_ = WIDE.flag_sets_for(program.traits)
        given = self[before.name] if before else rewritten(program, WIDE)
        product = run_stage(stage, given, options_for(program, flags, Toolchain()))
        self[name] = product if isinstance(product, str) else product.decode(errors="replace")
        return self[name]


def flags_for(cpu: str) -> tuple[str, ...]:
    return target_for(cpu).flag_sets[0]


@contextmanager
def device_code(ir: dict[str, str], cpu: str) -> Iterator[tuple[IreeSession, Any]]:
    """A function's device programs for a CPU, in the LLVM dialect; nothing is bound."""
    options = CompileOptions(flags=flags_for(cpu))
    with IreeSession(options) as session:
        module = session.parse(ir["torch-to-linalg"])
        form_dispatches(session, module, options)
        session.compile(module, begin="flow", end="executable-targets")
        yield session, module


@contextmanager
def convolution(
    cpu: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    window: Any,
    weights: int = 1,
    unknown: Sequence[int] = (),
) -> Iterator[tuple[IreeSession, Any]]:
    """A convolution and what follows it, with channels last; its dispatches are formed."""
    ir = Lowered(
        lambda x, w: torch.relu(torch.conv2d(x, w, **window)),
        x,
        weight,
        weights=weights,
        unknown=unknown,
    )
    (flags,) = (c.flags for c in target_for(cpu).candidates if c.name == "channels-last-packed")
    options = CompileOptions(flags=flags, parameters={"main": ("w",)[:weights]})
    with IreeSession(options) as session:
        module = session.parse(ir["torch-to-linalg"])
        form_dispatches(session, module, options)
        yield session, module


def lowered_for(cpu: str, function: Callable[..., Any], *tensors: torch.Tensor) -> str:
    """The dispatches of a function with channels last, for a CPU; nothing is bound."""
    ir = Lowered(function, *tensors)
    (flags,) = (c.flags for c in target_for(cpu).candidates if c.name == "channels-last-packed")
    options = CompileOptions(flags=flags)
    with IreeSession(options) as session:
        module = session.parse(ir["torch-to-linalg"])
        form_dispatches(session, module, options)
        assert module.operation.verify()
        return str(module)


def count(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text))


def test_relu_becomes_one_linalg_generic() -> None:
    ir = Lowered(torch.relu, torch.zeros(4, 8))
    assert count(r"torch\.aten\.relu", ir["aten-to-torch"]) == 1
    assert count(r"linalg\.generic", ir["torch-to-linalg"]) == 1
    assert count(r"torch\.", ir["torch-to-linalg"]) == 0


def test_weights_become_parameters_with_a_bind_function_of_each_form() -> None:
    ir = Lowered(
        lambda x, w, b: torch.relu(x @ w + b),
        torch.zeros(4, 8), torch.zeros(8, 8), torch.zeros(8), weights=2,
    )  # fmt: skip
    assert count(r"#flow\.parameter\.named<\"model\"::\"p\d\">", ir["linalg-to-flow"]) == 2
    (main,) = re.findall(r"util\.func public @main\((.*?)\)", ir["linalg-to-flow"])
    assert count("!hal.buffer_view", main) == 1
    assert count("!hal.fence", main) == 2
    assert set(re.findall(r"bind\$\d", ir["flow-to-vmfb"])) == {"bind$0", "bind$1"}


def test_what_is_made_of_weights_stays_constant() -> None:
    """Also if these can be bound anew; only what is used as it is can be swapped."""
    ir = Lowered(
        lambda x, w, b: torch.relu(x @ w)[0] + b[1], torch.zeros(4, 8), torch.zeros(8, 8),
        torch.zeros(2, 8), weights=2,
    )  # fmt: skip
    with IreeSession(CompileOptions(flags=WIDE.flag_sets[0])) as session:
        module = session.parse(ir["linalg-to-flow"])
        with session.context:
            bound = add_bind_functions(module)
        assert bound is not None
        assert [one.parameters for one in bound.made] == [("p0",)]
        assert [*bound.held.values()] == ["p1"]
        session.compile(module, begin="flow", end="executable-targets")
        with session.context:
            replace_probe(module, bound, ["p0", "p1"])
            text = str(module)
    assert count("stream.cmd.copy", text.partition("util.func public @main")[2]) == 0
    mutable = re.findall(r"util\.global private mutable @(\w+)", text)
    assert [name for name in mutable if "p1" not in name] == []
    assert count(r"util\.func public @made\$memory", text) == 1


def test_channels_last_crosses_as_the_dense_tensor_that_it_is() -> None:
    x = torch.zeros(1, 8, 4, 5).to(memory_format=torch.channels_last)
    ir = Lowered(lambda x: torch.relu(x) + 1, x)
    (signature,) = re.findall(r"func\.func @main\((.*?)\) ->", ir["torch-to-linalg"])
    assert "tensor<1x4x5x8xf32>" in signature


def test_f64_stays_f64() -> None:
    ir = Lowered(lambda x: x * 2, torch.zeros(4, dtype=torch.float64))
    assert count("f64", ir["linalg-to-flow"]) > 0
    assert count(r"x?f32", ir["linalg-to-flow"].partition("util.func public @main")[2]) == 0


@pytest.mark.parametrize(
    ("function", "barriers", "programs"),
    [
        (lambda x: x.sum(1)[:, None] - x.sum(1)[None], 1, 2),
        (lambda x: (lambda p: p - p.mT)(torch.softmax(x, -1)), 1, 2),
        (lambda x: (lambda y: y + y.diagonal()[:, None])(x - x.sum(0)), 1, 2),
        (lambda x: torch.softmax(x, -1), 0, 1),
        (lambda x: torch.nn.functional.layer_norm(x, (8,)), 0, 1),
        (lambda x: (lambda y: y + y.mT)(torch.relu(x)), 0, 1),
    ],
)
def test_a_barrier_stands_only_where_one_op_reads_a_reduction_along_two_axes(
    function: Callable[..., Any], barriers: int, programs: int
) -> None:
    ir = Lowered(function, torch.zeros(8, 8))
    options = CompileOptions(flags=WIDE.flag_sets[0])
    with IreeSession(options) as session:
        module = session.parse(ir["torch-to-linalg"])
        prepare(session, module, options)
        assert count(r"util\.optimization_barrier", str(module)) == barriers
    assert count(r"flow\.dispatch @", ir["linalg-to-flow"]) == programs
    assert count("optimization_barrier", ir["linalg-to-flow"]) == 0, "the host would wait there"


@pytest.mark.parametrize(("cpu", "cache"), [("haswell", 3), ("znver4", 2), ("znver5", None)])
@pytest.mark.parametrize(
    ("function", "prefetches"), [(torch.mm, 2), (lambda x, y: x.sigmoid() * y, 0)]
)
def test_products_read_both_factors_ahead(
    function: Callable[..., Any], prefetches: int, cpu: str, cache: int | None
) -> None:
    ir = Lowered(lambda x, y: function(x, y), torch.zeros(96, 96), torch.zeros(96, 96))
    with device_code(ir, cpu) as (session, module):
        with session.context:
            read_ahead(module, session.features)
        text = str(module)
    found = re.findall(r'llvm\.intr\.prefetch[" (]*(%\w+).*?hint = (\d)', text)
    prefetches = 0 if cache is None else prefetches
    assert [hint for _, hint in found] == [str(cache)] * prefetches
    bases = [re.findall(rf"{p} = llvm\.getelementptr (%\w+)\[4096\]", text)[0] for p, _ in found]
    assert len(set(bases)) == prefetches


@pytest.mark.parametrize(
    ("cpu", "rows", "depth", "asking"),
    [
        ("skylake-avx512", 128, 96, [1, 1]),  # of blocks of 12 rows, and the 8 that are left
        ("sapphirerapids", 96, 96, [1]),
        ("sapphirerapids", 24, 96, [1]),
        ("sapphirerapids", 12, 96, [2]),
        ("sapphirerapids", 9, 96, [2]),
        ("skylake-avx512", 128, 4096, []),  # whose panels are as large as half of the second cache
        ("znver4", 128, 96, []),
    ],
)
def test_a_product_asks_for_all_of_the_next_panel_a_part_with_each_block(
    cpu: str, rows: int, depth: int, asking: list[int]
) -> None:
    ir = Lowered(lambda x, w: x @ w, torch.zeros(rows, depth), torch.zeros(depth, 96))
    asked, panel_bytes, line_bytes = list[int](), depth * 128, 64
    with device_code(ir, cpu) as (session, module):
        with session.context:
            read_ahead(module, session.features)
        found = [
            (loop, ahead)
            for function in device_functions(module)
            for header in function.regions[0].blocks
            if (loop := loop_at(header)) and (ahead := asked_for(loop.levels[0].body, loop.panel))
        ]
        assert [len(ahead) for _, ahead in found] == asking
        for loop, ahead in found:
            k = loop.levels[0].header.arguments[0]
            firsts = range(0, rows // loop.height * loop.height, loop.height)
            for row, step in itertools.product(firsts, range(depth)):
                asked += [step * 128 + computed(a, k, step, row) for a in ahead]
    lines = {(at - panel_bytes) // line_bytes for at in asked}
    assert not asking or lines == set(range(panel_bytes // line_bytes))


def asked_for(body: Any, panel: Any) -> list[tuple[Any, int]]:
    """Return what is asked for in bytes from where a panel is read: a value, and a number more."""
    lines = [op.operands[0].owner for op in body.operations if op.name == "llvm.intr.prefetch"]
    places = [line.operands[0].owner for line in lines]
    return [
        (place.operands[1], line.attributes["rawConstantIndices"][0])
        for line, place in zip(lines, places, strict=True)
        if getattr(place, "name", "") == "llvm.getelementptr" and place.operands[0] == panel
    ]


def computed(ahead: tuple[Any, int], k: Any, step: int, row: int) -> int:
    """Compute a number of device code, in which `k` is a step, and any other argument a row."""
    value, more = ahead
    if not hasattr(value.owner, "name"):
        return (step if value == k else row) + more
    if value.owner.name == "llvm.mlir.constant":
        return int(value.owner.attributes["value"].value) + more
    compute = {
        "llvm.add": operator.add,
        "llvm.sub": operator.sub,
        "llvm.mul": operator.mul,
        "llvm.lshr": operator.rshift,
    }[value.owner.name]
    return int(compute(*(computed((o, 0), k, step, row) for o in value.owner.operands))) + more


@pytest.mark.parametrize(
    ("cpu", "rows", "width", "ahead"),
    [
        ("skylake-avx512", 1, 1024, 8 * 1024 * 4),
        ("skylake-avx512", 1, 4096, 8 * 4096 * 4),
        ("znver4", 1, 4112, 2048),
        ("znver5", 1, 4112, 0),
        ("skylake-avx512", 1, 1020, 0),
        ("skylake-avx512", 96, 96, 0),
    ],
)
def test_a_product_with_a_vector_asks_for_the_next_rows(
    cpu: str, rows: int, width: int, ahead: int
) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, w.t()).relu()

    ir = Lowered(function, torch.zeros(rows, width), torch.zeros(64, width))
    with device_code(ir, cpu) as (session, module):
        with session.context:
            read_rows_ahead(module, session.features)
        text = str(module)
    assert count(r"llvm\.intr\.prefetch", text) == (8 if ahead else 0)
    assert count(rf"getelementptr %\w+\[{ahead}\]", text) == (8 if ahead else 0)


@pytest.mark.parametrize(
    ("function", "dtype", "unknown", "first"),
    [
        (lambda x: x.sort(1), torch.float32, (), []),
        (lambda x: x.sort(0, descending=True), torch.float16, (), []),
        (lambda x: x.sort(0)[0], torch.int64, (), []),
        (lambda x: x.sort(1, descending=True)[0], torch.int8, (0, 1), []),
        (lambda x: x.topk(5, 0), torch.float64, (), ["5"]),
        (lambda x: x.topk(3, 1, largest=False)[0], torch.float32, (0, 1), ["3"]),
    ],
)
def test_rows_are_sorted_by_a_function_and_no_further_than_they_are_read(
    function: Callable[..., Any], dtype: torch.dtype, unknown: Sequence[int], first: list[str]
) -> None:
    ir = Lowered(function, torch.zeros(40, 40, dtype=dtype), unknown=unknown)
    with device_code(ir, "haswell") as (session, module):
        with session.context:
            sort_rows(module)
            assert module.operation.verify()
        text = str(module)
    assert count(r"llvm\.call @npu_iree\.sort\.\w+\(", text) == 1
    assert re.findall(r"npu_iree\.first = (\d+)", text) == first


@pytest.mark.parametrize("cpu", ["haswell", "znver4"])
def test_integers_become_bfloat16_with_vectors_of_any_width(cpu: str) -> None:
    """LLVM calls a function for it where it has no AVX-512, and there is none."""
    region = region_of(lambda x, y: x.bfloat16() + y, torch.zeros(9).long(), torch.ones(9) > 0)
    assert compile_program(Program.of(region), target_for(cpu)).vmfb


@pytest.mark.parametrize(
    ("cpu", "dtype", "count_of_halves"),
    [
        ("haswell", torch.bfloat16, 0),
        ("haswell", torch.float16, 0),
        ("skylake-avx512", torch.bfloat16, 0),
        ("znver4", torch.bfloat16, 4),
        ("sapphirerapids", torch.float16, 4),
    ],
)
def test_a_cpu_multiplies_halves_only_if_it_can(
    cpu: str, dtype: torch.dtype, count_of_halves: int
) -> None:
    """IREE would do so number by number elsewhere, of products with one half, too."""

    def products(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> Any:
        a, b, c = x.to(dtype), w.to(dtype), y.to(dtype)
        return a @ b, torch.mm(a[:1], b), torch.bmm(c, c.mT), x @ b.float(), c[0, :, :16] @ a[:16]

    text = lowered_for(cpu, products, torch.ones(33, 50), torch.ones(50, 70), torch.ones(3, 16, 24))
    halves = {torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
    assert count(rf"matmul [^\n]*ins\([^)]*x{halves}[,>]", text) == count_of_halves


def test_rows_that_are_made_of_halves_are_made_once() -> None:
    """Not again for each panel of the other factor: attention in bf16 would take 8 times longer."""
    x, w = torch.ones(8, 512, 128).bfloat16(), torch.ones(8, 128, 512).bfloat16()
    text = lowered_for("haswell", lambda x, w: torch.bmm(x.float() * 0.5, w.float()), x, w)
    (product,) = re.findall(r"func\.func @\w*matmul_like\w*\(([^\n]*)", text)
    assert count("tensor<8x512x128xf32>", product) == 1


def test_code_for_this_cpu_needs_nothing_that_it_lacks() -> None:
    with IreeSession(CompileOptions(flags=NPU_LOCAL.compile.flag_sets[0])) as session:
        assert missing_features(session.features) == []
        assert session.features


@pytest.mark.parametrize(
    ("cpu", "rows", "depth", "loops"),
    [
        ("sapphirerapids", 128, 192, 1),
        ("sapphirerapids", 150, 192, 1),
        ("sapphirerapids", 1500, 224, 2),  # blocks of 32 rows, and those that are left
        ("sapphirerapids", 128, 223, 1),  # no whole number of steps
        ("sapphirerapids", 128, 191, 0),
        ("sapphirerapids", 128, 5152, 0),
        ("sapphirerapids", 32, 192, 1),
        ("sapphirerapids", 31, 192, 0),
        ("skylake-avx512", 128, 192, 0),
    ],
)
def test_a_product_is_computed_by_tiles_where_that_is_faster(
    cpu: str, rows: int, depth: int, loops: int
) -> None:
    """What is used often, and added up for long, on a CPU with a matrix unit."""
    ir = Lowered(lambda x, w: x @ w, torch.zeros(rows, depth), torch.zeros(depth, 64))
    with device_code(ir, cpu) as (session, module):
        features = session.features
        with session.context:
            before = str(module)
            multiply_tiles(module, [f for f in features if not f.startswith("amx")])
            assert str(module) == before, "on a CPU without the unit"
            multiply_tiles(module, features)
            text = str(module)
            assert module.operation.verify()
    assert count(r"llvm\.call @npu_iree\.multiply_\d+_rows", text) == loops
    memory = f"workgroup_local_memory = {depth // 32 * 6144 + 64}>"
    assert count(memory, text) == count(r"call @npu_iree\.tiles_lent", text) == int(loops > 0)
    assert count("llvm.intr.fmuladd", text) > 0, "the loop stays, for what tiles cannot do"


@pytest.mark.parametrize(
    ("cpu", "channels", "places", "window", "loops"),
    [
        ("sapphirerapids", 64, 28, {}, {28: 1}),
        ("sapphirerapids", 64, 56, {"stride": 2}, {28: 1}),
        ("sapphirerapids", 64, 26, {"dilation": (2, 1), "padding": (2, 1)}, {26: 1}),
        ("sapphirerapids", 64, 37, {}, {}),  # no whole number of blocks
    ],
)
def test_a_convolution_is_computed_by_tiles_where_rows_are_whole_blocks(
    cpu: str, channels: int, places: int, window: Any, loops: dict[int, int]
) -> None:
    """All of its three loops at once, with what follows in the same device program."""
    tensors = torch.zeros(1, channels, 20, places), torch.zeros(64, channels, 3, 3)
    with convolution(cpu, *tensors, {"padding": 1, **window}) as (session, module):
        session.compile(module, begin="flow", end="executable-configurations")
        features = session.features
        with session.context:
            block_convolutions(module, features)
            vectors = re.findall(r"vector_common_parallel = \[1, 1, (\d+), 32, 0", str(module))
            assert Counter(map(int, vectors)) == loops
        session.compile(module, begin="executable-configurations", end="executable-targets")
        with session.context:
            multiply_tiles(module, features)
            text = str(module)
            assert module.operation.verify()
    assert Counter(map(int, re.findall(r"llvm\.call @npu_iree\.multiply_(\d+)_", text))) == loops
    assert count(r"llvm\.func @main_dispatch_\d+_conv_", text) == 1
    assert count(r"llvm\.intr\.fmuladd", text) > 0, "the loops stay, for what tiles cannot do"


@pytest.mark.parametrize(
    ("cpu", "channels", "places", "made", "block"),
    [
        ("skylake-avx512", 64, 28, 64, (14, 32)),
        ("skylake-avx512", 3, 40, 32, (10, 32)),
        ("sapphirerapids", 48, 28, 64, (14, 32)),  # no whole number of tiles
        ("haswell", 64, 30, 48, (6, 16)),
        ("skylake-avx512", 64, 28, 48, None),  # no whole number of blocks
        ("haswell", 64, 37, 64, None),
        ("nehalem", 64, 28, 64, None),
    ],
)
def test_a_convolution_is_computed_in_blocks_that_fill_registers(
    cpu: str, channels: int, places: int, made: int, block: tuple[int, int] | None
) -> None:
    """Of a row of places by some features; all of the sums are in registers."""
    tensors = torch.zeros(1, channels, 20, places), torch.zeros(made, channels, 3, 3)
    with convolution(cpu, *tensors, {"padding": 1}) as (session, module):
        session.compile(module, begin="flow", end="executable-configurations")
        with session.context:
            before = str(module)
            block_convolutions(module, session.features)
            assert (str(module) != before) == (block is not None)
        if block is None:
            return
        session.compile(module, begin="executable-configurations", end="executable-targets")
        multiplied = re.findall(r"llvm\.intr\.fmuladd\(.*(vector<\d+xf32>)", str(module))
        width, columns = block
        assert Counter(multiplied) == {f"vector<{columns}xf32>": width}


@pytest.mark.parametrize("weights", [0, 1])
def test_a_convolution_reads_channels_last_whatever_its_weight_is(weights: int) -> None:
    """A weight that is a parameter is transposed at load; another, by a program of its own."""
    tensors, window = (torch.zeros(2, 8, 20, 28), torch.zeros(32, 8, 3, 3)), {"padding": 1}
    with convolution(WIDE_CPU, *tensors, window, weights) as (_, module):
        text = str(module)
    assert count(r"ins\(%\w+, %\w+ : tensor<2x22x30x8xf32>, tensor<3x3x8x32xf32>\)", text) == 1


def test_each_channel_by_itself_is_read_with_channels_last() -> None:
    """What a product made is padded as it lies, and what follows is in the program of either."""

    def bottleneck(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        y = torch.conv2d(x, weights[0]).relu()
        return torch.conv2d(y, weights[1], padding=1, groups=32).relu()

    shapes = (2, 8, 20, 28), (32, 8, 1, 1), (32, 1, 3, 3)
    text = lowered_for(WIDE_CPU, bottleneck, *map(torch.zeros, shapes))
    assert count(r"ins\(%\w+, %\w+ : tensor<2x22x30x32xf32>, tensor<3x3x32xf32>\)", text) == 1
    programs = re.findall(r"flow.dispatch @\w+::@main_dispatch_\d+_([a-z_]+?)_\d", text)
    made = [name for name in programs if name != "transpose"]
    assert made == ["matmul_like", "conv"]


@pytest.mark.parametrize(
    ("cpu", "columns", "fmas"),
    [
        ("skylake-avx512", 64, {"vector<32xf32>": 12}),
        ("haswell", 64, {"vector<16xf32>": 6}),
        ("skylake-avx512", 63, None),
        ("nehalem", 64, None),
    ],
)
def test_a_product_packs_its_weight_at_load_and_nothing_else(
    cpu: str, columns: int, fmas: dict[str, int] | None
) -> None:
    """Where a CPU has vectors that the columns fill; elsewhere it is left to IREE."""
    ir = Lowered(
        lambda x, w, b: torch.relu(torch.nn.functional.linear(x, w, b)),
        torch.zeros(24, 40), torch.zeros(columns, 40), torch.zeros(columns), weights=2,
    )  # fmt: skip
    options = CompileOptions(flags=flags_for(cpu), parameters={"main": ("w", "b")})
    with IreeSession(options) as session:
        module = session.parse(ir["torch-to-linalg"])
        form_dispatches(session, module, options)
        text = str(module)
        assert count("compilation_info =", text) == int(fmas is not None)
        if fmas is not None:
            assert count(r"linalg\.pack ", text) == count(r"flow\.dispatch @main", text) == 1
            assert count(r"linalg\.unpack|encode", text) == 0
            session.compile(module, begin="flow", end="executable-targets")
            found = re.findall(r"llvm\.intr\.fmuladd\(.*(vector<\d+xf32>)", str(module))
            assert Counter(found) == fmas, "one for each row of a block"


@pytest.mark.parametrize(
    ("columns", "weights", "panels"),
    [(545, 1, 18), (545, 0, 0), (511, 1, 0)],  # few columns, or packed at each call: not worth it
)
def test_weights_are_padded_to_whole_panels_for_the_matrix_unit(
    columns: int, weights: int, panels: int
) -> None:
    tensors = torch.zeros(70, 224), torch.zeros(columns, 224)
    ir = Lowered(torch.nn.functional.linear, *tensors, weights=weights)
    names = {"main": ("w",)} if weights else {}
    options = CompileOptions(flags=flags_for("sapphirerapids"), parameters=names)
    with IreeSession(options) as session:
        module = session.parse(ir["torch-to-linalg"])
        prepare(session, module, options)
        text = str(module)
    assert count("padding_value", text) == int(panels > 0)
    assert count(rf"into tensor<70x{panels * 32}xf32>", text) == int(panels > 0)


@pytest.mark.parametrize(
    ("index", "scatters"),
    [
        ((9, 1, 1), ["[0]"]),
        ((9, 3, 1), ["[0, 1]"]),  # where each row goes, in each batch
        ((9, 3, 8), ["[0, 1, 2]"]),  # where each number does
    ],
)
def test_rows_that_go_by_one_index_are_put_at_once(
    index: tuple[int, ...], scatters: list[str]
) -> None:
    def put(x: torch.Tensor, index: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.scatter_reduce(0, index.expand(9, 3, 8), y, "amax")

    tensors = torch.zeros(6, 3, 8), torch.zeros(index, dtype=torch.int64), torch.zeros(9, 3, 8)
    flow = Lowered(put, *tensors)["linalg-to-flow"]
    assert re.findall(r"scatter dimension_map = (\[.*?\])", flow) == scatters


@pytest.mark.parametrize(
    ("count", "width", "items"),
    [(1000, 64, 4), (1000, 48, 3), (300, 64, 2), (40, 64, 1), (1000, 50, 1)],
)
def test_rows_are_added_up_in_vectors_by_columns(count: int, width: int, items: int) -> None:
    """A work item has lines of a cache of its own, and enough to do."""
    x, y, index = torch.zeros(9, width), torch.zeros(count, width), torch.zeros(count).long()
    flow = Lowered(lambda *tensors: torch.index_add(tensors[0], 0, *tensors[1:]), x, index, y)
    assert f"tensor<{width // items}xf32>" in flow["linalg-to-flow"]
    assert "iree_linalg_ext.scatter" not in flow["linalg-to-flow"]


def test_a_residual_of_a_batch_is_added_in_the_program_of_the_product() -> None:
    ir = Lowered(
        lambda x, y, w: torch.relu(torch.nn.functional.linear(x, w) + y),
        torch.zeros(2, 24, 40), torch.zeros(2, 24, 64), torch.zeros(64, 40), weights=1,
    )  # fmt: skip
    assert count(r"flow\.dispatch @main", ir["linalg-to-flow"]) == 1


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("columns", [64, 63])
def test_what_transposes_a_product_in_panels_is_a_program_of_its_own(
    columns: int, has_bias: bool
) -> None:
    def network(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.linear(x, weight, bias if has_bias else None)
        return y.view(1, 24, columns).mT.flatten(1)

    ir = Lowered(network, torch.zeros(24, 40), torch.zeros(columns, 40), torch.zeros(columns))
    options = CompileOptions(flags=WIDE.flag_sets[0])
    with IreeSession(options) as session:
        module = session.parse(ir["torch-to-linalg"])
        prepare(session, module, options)
        barriers = count(r"util\.optimization_barrier", str(module))
        assert barriers == (2 if columns == 64 else 0), "the panels, and the result"


@pytest.mark.parametrize(
    ("rows", "panels", "stack", "expected"),
    [
        (128, 24, 1, (132, 3)),
        (128, 96, 1, (132, 3)),
        (197, 72, 1, (204, 9)),
        (250, 2, 8, (252, 1)),
        (12, 1, 1, (12, 1)),
        (1500, 16, 1, (500, 1)),
        (1009, 16, 1, (1020, 1)),
    ],
)
def test_work_is_shared_out_evenly(
    rows: int, panels: int, stack: int, expected: tuple[int, int]
) -> None:
    assert work_item(rows, panels, stack, 12) == expected


@pytest.mark.parametrize(("width", "products"), [(64, 1), (63, 0)])
def test_a_matrix_of_whole_cache_lines_is_added_up_lane_by_lane(width: int, products: int) -> None:
    ir = Lowered(lambda x, w: torch.mm(x, w.t()), torch.zeros(1, width), torch.zeros(40, width))
    flow = ir["linalg-to-flow"]
    assert count(r"linalg\.matvec ", ir["torch-to-linalg"]) == 1
    assert count(r"math\.fma", flow) == count("compilation_info =", flow) == products
    options = CompileOptions(flags=WIDE.flag_sets[0])
    with IreeSession(options) as session:
        module = session.parse(flow)
        session.compile(module, begin="flow", end="executable-targets")
        vectors = re.findall(r"llvm\.intr\.fma\(.*vector<16xf32>", str(module))
        assert len(vectors) == 8 * products, "one for each row of a tile, and no element alone"


def test_what_follows_a_product_with_a_vector_is_in_the_same_program() -> None:
    gelu, linear = torch.nn.functional.gelu, torch.nn.functional.linear
    tensors = torch.zeros(1, 64), torch.zeros(40, 64), torch.zeros(40)
    flow = Lowered(lambda x, w, b: gelu(linear(x, w, b)), *tensors, weights=2)["linalg-to-flow"]
    assert count(r"math\.erf", flow) == count(r"flow\.dispatch @main", flow) == 1


def test_a_product_with_a_vector_that_is_computed_is_added_up_lane_by_lane() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.mm(x.relu(), w.t())

    flow = Lowered(function, torch.zeros(1, 64), torch.zeros(40, 64))["linalg-to-flow"]
    assert count(r"into tensor<40x4x16xf32>", flow) == 1


@pytest.mark.parametrize("is_transposed", [True, False])
@pytest.mark.parametrize(("rows", "are_few"), [(1, True), (2, True), (4, True), (5, False)])
def test_products_of_few_rows_pack_nothing(rows: int, are_few: bool, is_transposed: bool) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x, w.mT if is_transposed else w)

    flow = Lowered(function, torch.zeros(3, rows, 64), torch.zeros(3, 64, 64))["linalg-to-flow"]
    assert count(r"flow\.dispatch @", flow) == (1 if are_few else 2)
    assert count(r"linalg\.pack", flow) == int(not are_few and not is_transposed)
    assert count("compilation_info = ", flow) > 0


@pytest.mark.parametrize("is_transposed", [True, False])
@pytest.mark.parametrize(
    ("rows", "weights", "are_few"), [(8, 0, True), (9, 0, False), (2, 1, False)]
)
def test_only_what_is_bound_is_packed_for_few_rows(
    rows: int, weights: int, are_few: bool, is_transposed: bool
) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ (w.t() if is_transposed else w)

    args = torch.zeros(rows, 64), torch.zeros(64, 64)
    flow = Lowered(function, *args, weights=weights)["linalg-to-flow"]
    assert (count(r"math\.fma", flow) == 1) == are_few


_SUM = """
func.func @sum(%w: tensor<64x64x{kind}>, %x: tensor<64x{kind}>, %y: tensor<64x{kind}>)
    -> tensor<64x{kind}> {{
  %r = linalg.generic {{
      indexing_maps = [affine_map<(n, k) -> (n, k)>, affine_map<(n, k) -> (k)>,
                       affine_map<(n, k) -> (n)>],
      iterator_types = ["parallel", "reduction"]}}
      ins(%w, %x : tensor<64x64x{kind}>, tensor<64x{kind}>) outs(%y : tensor<64x{kind}>) {{
  ^bb0(%a: {kind}, %b: {kind}, %sum: {kind}):
    %c = arith.constant {addend} : {kind}
    %ab = math.fma %a, %{other}, %c : {kind}
    %next = arith.addf %sum, %ab : {kind}
    linalg.yield %next : {kind}
  }} -> tensor<64x{kind}>
  return %r : tensor<64x{kind}>
}}
"""


@pytest.mark.parametrize(
    ("addend", "other", "kind", "is_product"),
    [
        ("-0.0", "b", "f32", True),
        ("0.0", "b", "f32", False),
        ("1.0", "b", "f32", False),
        ("-0.0", "a", "f32", False),
        ("-0.0", "b", "f64", False),
    ],
)
def test_only_sums_of_products_are_read_by_rows(
    addend: str, other: str, kind: str, is_product: bool
) -> None:
    with IreeSession(CompileOptions(flags=WIDE.flag_sets[0])) as session:
        module = session.parse(_SUM.format(addend=addend, other=other, kind=kind))
        with session.context:
            before = str(module)
            read_by_rows(module, ["avx512f"])
            assert (str(module) != before) == is_product


_SLICE = """
func.func @slice(%x: tensor<?x8xf32>, %at: index, %n: index) -> tensor<?x8xf32> {{
  %y = tensor.extract_slice %x[{at}, 0] [%n, 8] [{step}, 1] : tensor<?x8xf32> to tensor<?x8xf32>
  return %y : tensor<?x8xf32>
}}
"""


@pytest.mark.parametrize(
    ("at", "step", "is_copy"), [("%at", 2, True), ("%at", 1, False), ("1", 2, False)]
)
def test_rows_with_others_between_from_a_computed_place_are_a_copy(
    at: str, step: int, is_copy: bool
) -> None:
    """Which IREE could not share out among work items, merged with their columns."""
    with IreeSession(CompileOptions(flags=WIDE.flag_sets[0])) as session:
        module = session.parse(_SLICE.format(at=at, step=step))
        with session.context, ir.Location.unknown():
            (function,) = module.body.operations
            separate_slices(function)
            assert count("util.optimization_barrier", str(module)) == is_copy


@pytest.mark.parametrize("flags", WIDE.flag_sets[:2])
def test_a_row_is_added_up_in_the_lanes_of_vectors(flags: tuple[str, ...]) -> None:
    flow = Lowered(lambda x: x.sum(1), torch.zeros(40, 64))["linalg-to-flow"]
    with IreeSession(CompileOptions(flags=flags)) as session:
        module = session.parse(flow)
        session.compile(module, begin="flow", end="executable-targets")
    assert count(r"llvm\.fadd .*vector<16xf32>", str(module)) > 0
    assert count(r"vector\.reduce\.fadd\(.*\) fastmath<reassoc>", str(module)) > 0


@pytest.mark.parametrize(("function", "kept"), [(torch.sort, 1), (torch.relu, 0)])
def test_only_an_argument_that_would_be_overwritten_is_kept(
    function: Callable[..., Any], kept: int
) -> None:
    ir = Lowered(lambda x: function(x), torch.zeros(8, 8))
    (results,) = re.findall(r"func public @main\(.*?\) -> (.*?) attributes", ir["linalg-to-flow"])
    expected = 2 if function is torch.sort else 1
    assert count("!hal.buffer_view", results) == expected + kept


def test_a_dump_restarts_from_each_stage(tmp_path: Path) -> None:
    region = region_of(torch.relu, torch.zeros(4, 8))
    compile_program(Program.of(region), WIDE, dump=tmp_path)
    options = CompileOptions(flags=WIDE.flag_sets[0])
    for stage in STAGES[:-2]:  # from the last but one, the script does
        out = restart(tmp_path / product_name(stage), options, tmp_path / "again" / stage.name)
        assert out.stat().st_size > 1000
    done = subprocess.run(["sh", str(tmp_path / "repro.sh")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "restarted" / product_name(STAGES[-1])).exists()


def test_a_failed_stage_says_which_and_leaves_what_repeats_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    region = region_of(torch.relu, torch.zeros(4, 8))
    flags = ("--iree-hal-target-backends=nonsense",)
    with pytest.raises(StageError) as caught:
        compile_program(Program.of(region), NPU_LOCAL.compile, Toolchain(flags=flags), tmp_path)
    error = caught.value
    assert error.stage == "linalg-to-flow"
    assert "nonsense" in error.diagnostics
    assert error.repro == tmp_path
    _, arguments = (tmp_path / "repro.sh").read_text().split("exec python -m ")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", shlex.split(arguments))
    assert repeat() == 1
    assert "nonsense" in capsys.readouterr().err


def test_a_rewrite_that_fails_is_told_of_and_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no such rule")

    monkeypatch.setattr(pipeline, "rewrite", fail)
    region = region_of(torch.relu, torch.zeros(4, 8))
    assert compile_program(Program.of(region), NPU_LOCAL.compile).vmfb
    (message,) = caplog.messages
    assert (
        "is not rewritten for npu-local, and may be slower: ValueError('no such rule')" in message
    )


def test_a_file_that_no_stage_wrote_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "graph.txt"
    path.write_text("")
    with pytest.raises(ValueError, match=r"\.torch\.mlir, \.linalg\.mlir"):
        restart(path, CompileOptions(), tmp_path)


def test_compilers_say_nothing_on_the_screen(capfd: pytest.CaptureFixture[str]) -> None:
    region = region_of(torch.relu, torch.zeros(4, 8))
    flags = ("--iree-hal-target-backends=nonsense",)
    with pytest.raises(StageError):
        compile_program(Program.of(region), NPU_LOCAL.compile, Toolchain(flags=flags))
    assert capfd.readouterr() == ("", "")


OF_ROWS = [
    lambda x: torch.softmax(x, -1),
    lambda x: torch.softmax(x * 2, -1) * x,
    lambda x: torch.nn.functional.layer_norm(x + 1, x.shape[-1:]),
    lambda x: x * torch.rsqrt((x * x).mean(-1, keepdim=True)),
    lambda x: x.amax(-1) + torch.exp(x).sum(-1),
]


@pytest.mark.parametrize("function", OF_ROWS)
@pytest.mark.parametrize("shape", [(16, 1504), (16, 1500), (80, 197), (1, 768), (64, 5000)])
def test_what_is_computed_of_rows_is_one_program(
    function: Callable[..., Any], shape: tuple[int, int]
) -> None:
    flow = Lowered(function, torch.zeros(shape))["linalg-to-flow"]
    assert count("flow.dispatch @", flow) == 1
    assert count("linalg", flow) == 0


@pytest.mark.parametrize("function", OF_ROWS)
@pytest.mark.parametrize("shape", [(2, 3, 7), (5, 7)])
def test_rows_of_unknown_sizes_are_one_program(
    function: Callable[..., Any], shape: tuple[int, ...]
) -> None:
    flow = Lowered(function, torch.zeros(shape), unknown=range(len(shape)))["linalg-to-flow"]
    assert count("flow.dispatch @", flow) == 1
    assert count("linalg", flow) == 0


def test_a_product_of_any_rows_takes_along_what_is_computed_of_it() -> None:
    """Nothing is packed but the weight, at load."""

    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(torch.addmm(b, x, w)) + x.sum(1, True)

    tensors = torch.zeros(5, 96), torch.zeros(96, 64), torch.zeros(64)
    flow = Lowered(function, *tensors, weights=2, unknown=[0])["linalg-to-flow"]
    _, main = flow.split("util.func public @main")
    assert count("flow.dispatch @", main) == 2  # the sum is the other
    assert count("flow.tensor.encode", main) == 0


def test_products_of_any_rows_ask_for_the_next_panel() -> None:
    """In blocks of 12 rows and of 4."""
    tensors = torch.zeros(5, 96), torch.zeros(96, 64)
    ir = Lowered(lambda x, w: x @ w, *tensors, weights=1, unknown=[0])
    with device_code(ir, "skylake-avx512") as (session, module):
        with session.context:
            read_ahead(module, session.features)
        loops = [
            loop
            for function in device_functions(module)
            for header in function.regions[0].blocks
            if (loop := loop_at(header)) and asked_for(loop.levels[0].body, loop.panel)
        ]
        assert [loop.height for loop in loops] == [12, 4]


@pytest.mark.parametrize(("columns", "programs"), [(64, 3), (48, 2)])
def test_rows_of_a_large_product_are_moved_once(columns: int, programs: int) -> None:
    """The gradient of a weight: each panel would read columns of what is summed over."""
    tensors = torch.zeros(96, 512), torch.zeros(96, columns)
    flow = lowered_for("haswell", lambda g, x: g.t() @ x, *tensors)
    assert count("flow.dispatch @", flow) == programs


def test_keys_of_any_batch_are_moved_as_rows() -> None:
    """Not number by number: the product reads them transposed."""

    def function(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        heads = k.permute(0, 2, 3, 1)
        return torch.bmm(q, heads.reshape(-1, *heads.shape[2:]))

    q, k = torch.zeros(6, 5, 16), torch.zeros(3, 7, 2, 16)
    flow = Lowered(function, q, k, unknown=[0])["linalg-to-flow"]
    assert count(r"affine_map<\(d0, d1, d2, d3\) -> \(d0, d2, d1, d3\)>", flow) == 1
    assert count(r"affine_map<\(d0, d1, d2, d3\) -> \(d0, d3, d1, d2\)>", flow) == 0


def test_a_few_long_rows_are_reduced_apart_from_what_they_are_computed_from() -> None:
    """Which has numbers for all threads."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.exp(x)
        return y, y.sum(-1)

    for rows, programs in ((2, 2), (64, 1)):
        flow = Lowered(function, torch.zeros(rows, 50000))["linalg-to-flow"]
        assert count("flow.dispatch @", flow) == programs


def test_rows_that_something_else_reads_in_between_are_not_one_program() -> None:
    """A product reads what the first pass makes, and the second reads the product."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.softmax(x, -1)
        return torch.softmax(y + y @ w, -1)

    flow = Lowered(function, torch.zeros(64, 512), torch.zeros(512, 512))["linalg-to-flow"]
    assert count("rows::", flow) == 2


def lent(regions: dict[str, Region]) -> dict[str, dict[str, int] | None]:
    """Compile entry points; return what they are lent in bytes, by the function that lends it.

    None where there is no such function.
    """
    vmfb = compile_program(Program("lent", regions, rebind=True), NPU_LOCAL.compile).vmfb
    module, found = hal.VmModule.copy_buffer(hal.VmInstance(), vmfb), {}
    for lend, take_back in ((LEND, TAKE_BACK), (LEND_RESULTS, TAKE_RESULTS_BACK)):
        function = module.lookup_function(lend)
        assert (function is not None) == (take_back in module.function_names)
        sizes = {} if function is None else read_sizes(function.reflection[LENT_BYTES])
        named = {name.partition("$")[0]: nbytes for name, nbytes in sizes.items()}
        found[lend] = None if function is None else named
    return found


def test_entry_points_are_lent_what_is_much() -> None:
    """What they allocate, and once for each call, their results: the next call has none of it.

    What binds parameters, while calls are under way, takes none, and neither does what is computed
    of weights alone, which may begin before the call that had the memory has ended.
    """

    def chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ w, -1) @ w

    def grown(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x[:, None] * x, x + 1

    def of_weights(w: torch.Tensor) -> torch.Tensor:
        row = w.view(-1)[:1024]
        t = row[:, None] * row[None]
        return torch.softmax(t @ t, -1) @ t

    w = torch.zeros(512, 512)
    little = {
        "little_chain": region_of(chain, torch.zeros(8, 512), w, weights=1),
        "little_grown": region_of(grown, torch.zeros(256)),
        "of_weights": region_of(of_weights, w, weights=1),
    }
    much = {
        "chain": region_of(chain, torch.zeros(1024, 512), w, weights=1),
        "grown": region_of(grown, torch.zeros(2048)),
    }
    assert lent(little) == {LEND: None, LEND_RESULTS: None}
    found = lent({**little, **much})
    own, results = found[LEND] or {}, found[LEND_RESULTS] or {}
    assert ([*own], [*results]) == (["chain"], ["grown"])
    assert own["chain"] >= 1024 * 512 * 4
    assert results["grown"] >= (2048 * 2048 + 2048) * 4


@pytest.mark.parametrize(
    ("cpu", "images", "places", "block"),
    [
        ("skylake-avx512", 64, 3, (4, 3)),
        ("skylake-avx512", 3, 7, (1, 7)),
        ("haswell", 64, 3, (2, 3)),
        ("skylake-avx512", 17, 3, None),
    ],
)
def test_a_block_is_of_several_images_where_rows_are_narrow(
    cpu: str, images: int, places: int, block: tuple[int, int] | None
) -> None:
    """The gradient of a weight is such a convolution."""
    tensors = torch.zeros(images, 4, 10, 7 + places), torch.zeros(64, 4, 8, 8)
    with convolution(cpu, *tensors, {"dilation": 1}, weights=0) as (session, module):
        session.compile(module, begin="flow", end="executable-configurations")
        with session.context:
            block_convolutions(module, session.features)
            found = re.findall(r"vector_common_parallel = \[(\d+), 1, (\d+), (\d+), 0", str(module))
        columns = "16" if cpu == "haswell" else "32"
        assert (block is not None) == (found == [(*map(str, block or ()), columns)])
        session.compile(module, begin="executable-configurations", end="executable-targets")
        if block is not None:
            multiplied = re.findall(r"llvm\.intr\.fmuladd\(.*(vector<\d+xf32>)", str(module))
            assert Counter(multiplied) == {f"vector<{columns}xf32>": math.prod(block)}


@pytest.mark.parametrize(
    ("cpu", "images", "features", "rows", "columns"),
    [
        ("skylake-avx512", 8, 64, 8, 32),
        ("skylake-avx512", 24, 64, 12, 32),
        ("haswell", 8, 64, 4, 16),
        ("skylake-avx512", 8, 48, 8, 16),
        ("skylake-avx512", 26, 64, 13, 16),
        ("skylake-avx512", 8, 32, 8, 32),  # one panel
        ("skylake-avx512", 8, 16, 8, 16),
        ("haswell", 9, 24, 9, 8),
        ("skylake-avx512", 29, 64, None, 32),  # no whole number of blocks
        ("skylake-avx512", 8, 72, 20, 16),  # places of a row, and columns over
        ("sapphirerapids", 8, 64, None, 32),  # whose unit is faster
        ("nehalem", 8, 64, None, 32),
    ],
)
def test_several_images_are_convolved_at_a_time_without_their_padding(
    cpu: str, images: int, features: int, rows: int | None, columns: int
) -> None:
    """All sums of a block are in registers, and are only of what windows see of the images.

    Of features that no panel has, places of a row are, which leave out rows of the padding alone.
    """
    tensors = torch.zeros(images, 16, 20, 20), torch.zeros(features, 16, 3, 3)
    with convolution(cpu, *tensors, {"padding": 1}) as (session, module):
        bounds = count(r"affine\.(max|min)", str(module))
        assert bounds == (4 if rows is not None else 0), "of rows, and of columns"
        if rows is not None:
            session.compile(module, begin="flow", end="executable-targets")
            multiplied = re.findall(r"llvm\.intr\.fmuladd\(.*(vector<\d+xf32>)", str(module))
            assert Counter(multiplied) == {f"vector<{columns}xf32>": rows}


@pytest.mark.parametrize(
    ("cpu", "groups", "places", "block"),
    [
        ("skylake-avx512", 2, 28, (10, 32)),
        ("skylake-avx512", 4, 28, (14, 16)),
        ("haswell", 4, 30, (6, 16)),
        ("haswell", 4, 29, (6, 16)),  # the last block begins within the one before
        ("haswell", 8, 28, (10, 8)),
        ("haswell", 16, 30, (10, 4)),
        ("haswell", 64, 30, None),  # each channel by itself
        ("haswell", 32, 28, None),
        ("nehalem", 4, 28, None),
    ],
)
def test_convolutions_in_groups_are_computed_in_blocks_of_a_row(
    cpu: str, groups: int, places: int, block: tuple[int, int] | None
) -> None:
    """All sums of a block are in registers; rows of the padding are left out."""
    tensors = torch.zeros(1, 64, 20, places), torch.zeros(64, 64 // groups, 3, 3)
    with convolution(cpu, *tensors, {"padding": 1, "groups": groups}) as (session, module):
        has_rest = block is not None and places % block[0] > 0
        bounds = 0 if block is None else 4 + has_rest
        assert count(r"affine\.(max|min)", str(module)) == bounds
        if block is not None:
            session.compile(module, begin="flow", end="executable-targets")
            multiplied = re.findall(r"llvm\.intr\.fmuladd\(.*(vector<\d+xf32>)", str(module))
            width, columns = block
            assert Counter(multiplied) == {f"vector<{columns}xf32>": width}


@pytest.mark.parametrize(
    ("cpu", "channels", "features", "places", "block"),
    [
        ("haswell", 1, 64, 30, (6, 16)),
        ("haswell", 16, 6, 28, (10, 8)),
        ("haswell", 16, 3, 29, (10, 4)),
        ("haswell", 1, 20, 30, (10, 8)),
        ("haswell", 16, 64, 28, None),
        ("skylake-avx512", 1, 20, 30, (10, 32)),
        ("skylake-avx512", 16, 6, 29, (15, 8)),
        ("sapphirerapids", 1, 64, 30, (10, 32)),
        ("nehalem", 1, 64, 28, None),
    ],
)
def test_few_features_and_one_channel_are_computed_in_blocks_of_a_row(
    cpu: str, channels: int, features: int, places: int, block: tuple[int, int] | None
) -> None:
    """Features that no panel has are padded; one channel is no loop, nor a dimension."""
    tensors = torch.zeros(1, channels, 20, places), torch.zeros(features, channels, 3, 3)
    with convolution(cpu, *tensors, {"padding": 1}) as (session, module):
        assert count("scf.for", str(module)) == (3 if block is not None else 0)
        if block is not None:
            session.compile(module, begin="flow", end="executable-targets")
            multiplied = re.findall(r"llvm\.intr\.fmuladd\(.*(vector<\d+xf32>)", str(module))
            width, columns = block
            assert Counter(multiplied) == {f"vector<{columns}xf32>": width}


def test_groups_of_any_number_of_images_are_computed_so_too() -> None:
    tensors = torch.zeros(2, 64, 20, 30), torch.zeros(64, 16, 3, 3)
    window = {"padding": 1, "groups": 4}
    with convolution("haswell", *tensors, window, unknown=[0]) as (_, module):
        text = str(module)
    assert count(r"affine\.(max|min)", text) == 4
    assert count(r"npu_iree\.convolution", text) == 0


@pytest.mark.parametrize(("cpu", "products"), [("haswell", 1), ("nehalem", 0)])
def test_the_gradient_of_a_weight_in_groups_is_of_products_of_rows(cpu: str, products: int) -> None:
    """Of a row of the images and one of the gradient, where they lie."""
    tensors = torch.zeros(2, 64, 20, 28), torch.zeros(64, 16, 3, 3)

    def differentiate(gradient: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.nn.grad.conv2d_weight(x, w.shape, gradient, padding=1, groups=4)

    text = lowered_for(cpu, differentiate, torch.zeros(2, 64, 20, 28), *tensors)
    rows = r"linalg\.matmul indexing_maps .*: tensor<28x16xf32>, tensor<28x16xf32>\)"
    assert count(rows, text) == products
    assert count("npu_iree.weight_gradient", text) == 0


@pytest.mark.parametrize(
    ("follow", "programs"),
    [
        (lambda y, w: torch.relu(y) + 1, 1),
        (lambda y, w: (y.sigmoid(), y.permute(0, 2, 3, 1).relu()), 1),
        (lambda y, w: y.permute(0, 2, 3, 1) + torch.arange(64), 2),  # which asks for its place
        (lambda y, w: y.permute(0, 2, 3, 1) @ w.flatten(1)[:, :50], 2),  # whose rows are packed
    ],
)
def test_what_is_not_computed_by_tiles_has_a_program_of_its_own(
    follow: Callable[..., Any], programs: int
) -> None:
    tensors = torch.zeros(8, 16, 18, 20), torch.zeros(64, 16, 3, 3)

    def convolved(x: torch.Tensor, w: torch.Tensor) -> Any:
        return follow(torch.conv2d(x, w, padding=1), w)

    text = lowered_for("skylake-avx512", convolved, *tensors)
    assert count(r"linalg\.matmul \{compilation_info", text) == 1
    assert count(r"func\.func @\w+_convolution\(", text) == programs - 1
    assert count(r"npu_iree\.convolution", text) == 0


def test_images_that_are_made_padded_are_read_so() -> None:
    """What transposes them writes them there; others of the same sizes are read as they are."""
    tensors = torch.zeros(8, 64, 18, 20), torch.zeros(64, 64, 3, 3)

    def convolved(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.relu(torch.conv2d(x, w, padding=1))
        return x.permute(0, 2, 3, 1)

    text = lowered_for("skylake-avx512", convolved, *tensors)
    found = re.findall(r"flow\.dispatch @\w+::@\w*_conv_\w+\(.*: \(tensor<([\dx]+)xf32>", text)
    assert Counter(found) == {"8x20x22x64": 1, "8x18x20x64": 2}


@pytest.mark.parametrize(
    ("sizes", "rows"),
    [
        ((8, 197, 12, 64), 96),  # an item has as many numbers as before, and whole tiles
        ((2, 37, 6, 64), 48),
        ((8, 192, 12, 64), None),  # keys come in panels, and queries are not packed
    ],
)
def test_what_packs_heads_packs_whole_tiles_of_rows(
    sizes: tuple[int, int, int, int], rows: int | None
) -> None:
    """A work item that is one row of all heads would share each line of memory with another."""
    batch, length, heads, width = sizes

    def scores(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        query, key = (x.view(sizes).transpose(1, 2) for x in (query, key))
        return (query * 0.125) @ key.transpose(2, 3)

    flow = Lowered(scores, *(torch.zeros(batch, length, heads * width) for _ in range(2)))
    options = CompileOptions(flags=flags_for("skylake-avx512"))
    with IreeSession(options) as session:
        module = session.parse(flow["linalg-to-flow"])
        session.compile(module, begin="flow", end="executable-configurations")
        with session.context:
            before = str(module)
            pack_whole_tiles(module)
            items = re.findall(r"distribution = \[1, (\d+), 1, 64\]", str(module))
            assert list(map(int, items)) == ([] if rows is None else [rows])
            assert (str(module) != before) == (rows is not None)
        session.compile(module, begin="executable-configurations", end="executable-targets")


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: (x * 2) @ y.square(),
        lambda x, y: x[:1].expand(2, -1, -1) @ (y.exp() + y),
    ],
)
def test_what_is_packed_is_computed_in_the_shape_in_which_it_is_packed(
    function: Callable[..., Any],
) -> None:
    """IREE makes one long loop of it, and divides to find where each number goes."""
    flow = Lowered(function, torch.zeros(2, 20, 31), torch.zeros(2, 31, 45))["linalg-to-flow"]
    assert "tensor.expand_shape" not in flow
    assert "2790xf32" not in flow  # all numbers of the second factor


@pytest.mark.parametrize(("rows", "columns"), [(384, 1500), (208, 197), (197, 208), (37, 50)])
def test_a_result_of_no_whole_tiles_is_stored_by_vectors(rows: int, columns: int) -> None:
    """Not read and written again, number by number: Whisper would take 1.17 of the time."""
    tensors = torch.zeros(8, rows, 64), torch.zeros(8, columns, 64)
    flow = Lowered(lambda x, y: torch.bmm(x.sin(), y.transpose(1, 2)), *tensors)["linalg-to-flow"]
    for name in ("packed", "ukernels"):
        (flags,) = (c.flags for c in target_for("skylake-avx512").candidates if c.name == name)
        with IreeSession(CompileOptions(flags=flags)) as session:
            module = session.parse(flow)
            session.compile(module, begin="flow", end="executable-targets")
            with session.context:
                text = str(module)
        (product,) = re.findall(r"llvm\.func @\w*matmul.*?\n        }\n", text, re.DOTALL)
        assert count(r"store.*vector<16xf32>", product) > 0
        assert count(r"store %\w+, .* : f32,", product) == 0
        assert "iree_uk_unpack" not in product
