"""Measure what rewrites of graphs and loops, and IREE's way with odd rows, cost or gain.

Each case is compiled twice, without and with what is to pay, and run in turn in one process.

python ci/bench_rewrites.py                 every case
python ci/bench_rewrites.py conv1d softmax  those whose names begin so
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import statistics
import time
import unittest.mock
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.utils import _pytree as pytree

from benching.turns import turns
from lowering.abi import ENTRY
from lowering.artifact import Artifact, EntryPoint
from lowering.capabilities import load_capabilities
from lowering.capture import capture_aot
from lowering.decompositions import attention, decomposition_table
from lowering.partition import partition
from lowering.pipeline import compile_program
from lowering.program import Program
from lowering.region import Region, extract_region
from lowering.rewrites import convolutions
from lowering.stages import flow_to_vmfb, iree_session, linalg_to_flow
from lowering.stages.code import read_ahead
from lowering.stages.linalg import read_in_panels
from npu_iree.array import DeviceArray
from npu_iree.device import open_device
from npu_iree.executable import Executable
from npu_iree.targets import NPU_LOCAL
from npu_iree.tolerances import largest_difference

BEFORE, AFTER = "before", "after"
LIMIT = 1e-3  # how far results may be from eager's
# What of IREE's flags for the whole process is left out before.
_FLAGS = {
    "peeling": "--iree-llvmcpu-vector-pproc-strategy",
    "tiles": "--iree-llvmcpu-matmul-tile-bytes",
}
# What does nothing before.
_FUNCTIONS: Mapping[str, Sequence[tuple[Any, str]]] = {
    "reading ahead": [(flow_to_vmfb, "read_ahead")],
    "next panel": [(read_ahead, "read_next_panel")],
    "merging": [(flow_to_vmfb, "sort_rows")],
    "firsts": [(linalg_to_flow, "read_first")],
    "rows ahead": [(flow_to_vmfb, "read_rows_ahead")],
    "few rows": [(linalg_to_flow, "mark_few_rows")],
    "row programs": [(linalg_to_flow, "join_rows")],
    "panels": [(linalg_to_flow, "read_in_panels")],
    "moved": [(read_in_panels, "_is_moved")],
    "channels last": [(linalg_to_flow, "put_channels_last")],
    "registers": [(flow_to_vmfb, "block_convolutions")],
    "whole tiles": [(flow_to_vmfb, "pack_whole_tiles")],
    "groups": [
        (linalg_to_flow, "mark_convolutions"),
        (linalg_to_flow, "mark_weight_gradients"),
    ],
    "packing": [(linalg_to_flow, "separate_packing")],
    "putting rows": [(linalg_to_flow, "put_rows")],
    "packing in shape": [(linalg_to_flow, "pack_in_shape")],
    "several images": [
        (linalg_to_flow, "mark_convolutions"),
        (convolutions, "is_left_to_blocks"),
    ],
    "halves": [(linalg_to_flow, "multiply_halves"), (linalg_to_flow, "keep_widened")],
    "matrix unit": [(read_in_panels, "has_tiles")],
}


@dataclass(frozen=True)
class Case:
    """A function, the shapes of its arguments, and what is left out of it before.

    Attributes:
        function: of tensors.
        shapes: of its arguments.
        without: `blocks` of attention, what `_FLAGS` and `_FUNCTIONS` name, or a rewrite.
    """

    function: Callable[..., Any]
    shapes: Sequence[Sequence[int]]
    without: str


def _conv(stride: int = 1, padding: int = 1, groups: int = 1) -> Callable[..., Any]:
    def convolve(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return functional.conv1d(x, weight, bias, stride, padding, 1, groups)

    return convolve


def _conv_gradients(*mask: bool, transposed: bool = False) -> Callable[..., Any]:
    def differentiate(gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Any:
        two, one, zero = ([n] * (x.dim() - 2) for n in (2, 1, 0))
        window = two, one, one, transposed, zero, 1
        backward = torch.ops.aten.convolution_backward.default
        made = backward(gradient, x, weight, None, *window, [*mask, False])
        return tuple(itertools.compress(made, mask))

    return differentiate


def _grouped(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    twice = [t.repeat_interleave(2, 1) for t in (key, value)]
    return functional.scaled_dot_product_attention(query, *twice)


def _scan_step(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply neighbours in time, as a parallel scan does first."""
    decay = torch.exp(a * b).permute(1, 0, 2)
    return decay[0::2] * decay[1::2]


def _rows(function: Callable[[torch.Tensor], Any], length: int) -> Case:
    return Case(function, [(900, length)], "peeling")


def _softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def _conv_case(x: Sequence[int], weight: Sequence[int], **window: int) -> Case:
    return Case(_conv(**window), [x, weight, weight[:1]], "convolutions")


def _conv2d(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.conv2d(x, weight, padding=1)


def _few_features(x: torch.Tensor, weight: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    return functional.conv2d(_conv2d(x, weight).relu(), last)


def _bottleneck(x: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return (functional.conv2d(functional.conv2d(x, down).relu(), up) + x).relu()


def _residual(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, weight) + y


def _heads(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Multiply queries and keys of 12 heads, which are packed as they are taken apart."""
    query, key = (x.unflatten(-1, (12, -1)).transpose(1, 2) for x in (query, key))
    return query * 0.125 @ key.mT


CASES = {
    "softmax 1500": _rows(_softmax, 1500),
    "softmax 1504": _rows(_softmax, 1504),
    "softmax 197": _rows(_softmax, 197),
    "softmax 7": _rows(_softmax, 7),
    "softmax of 2000x1504 in one program": Case(_softmax, [(2000, 1504)], "row programs"),
    "softmax of 2000x1500 in one program": Case(_softmax, [(2000, 1500)], "row programs"),
    "softmax of 2304x197 in one program": Case(_softmax, [(2304, 197)], "row programs"),
    "softmax of 1536x128 in one program": Case(_softmax, [(1536, 128)], "row programs"),
    "layer_norm of 1024x768 in one program": Case(
        lambda x: functional.layer_norm(x, x.shape[-1:]), [(1024, 768)], "row programs"
    ),
    "attention of 1500 in row programs": Case(
        functional.scaled_dot_product_attention, [(1, 8, 1500, 64)] * 3, "row programs"
    ),
    "log_softmax 1500": _rows(lambda x: torch.log_softmax(x, -1), 1500),
    "softmax of columns 1500": _rows(lambda x: torch.softmax(x, 0), 1500),
    "argmax 1500": _rows(lambda x: torch.argmax(x, -1), 1500),
    "sum 1500": _rows(lambda x: x.sum(-1), 1500),
    "layer_norm 1500": _rows(lambda x: functional.layer_norm(x, x.shape[-1:]), 1500),
    "gelu 1500": _rows(functional.gelu, 1500),
    "linear 4096 of one row": Case(functional.linear, [(1, 4096), (4096, 4096)], "products"),
    "grouped keys, one query": Case(_grouped, [(1, 16, 1, 64), *[(1, 8, 512, 64)] * 2], "products"),
    "scan of 32x1024x16": Case(_scan_step, [(1024, 1, 16), (1024, 32, 1)], "broadcasts"),
    "mm 64x1024x32000": Case(functional.linear, [(64, 1024), (32000, 1024)], "tiles"),
    "mm 64x1024x2816": Case(functional.linear, [(64, 1024), (2816, 1024)], "tiles"),
    "mm 128x768x3072": Case(functional.linear, [(128, 768), (3072, 768)], "reading ahead"),
    "mm 64x2816x1024": Case(functional.linear, [(64, 2816), (1024, 2816)], "reading ahead"),
    "mm 32x1024x32000 next panel": Case(
        functional.linear, [(32, 1024), (32000, 1024)], "next panel"
    ),
    "mm 128x1024x32000 next panel": Case(
        functional.linear, [(128, 1024), (32000, 1024)], "next panel"
    ),
    "mm 1x1024x32000 by rows": Case(functional.linear, [(1, 1024), (32000, 1024)], "rows ahead"),
    "mm 1x4096x4096 by rows": Case(functional.linear, [(1, 4096), (4096, 4096)], "rows ahead"),
    "bmm 32x2x128x1024 by rows": Case(
        lambda x, w: torch.bmm(x, w.mT), [(32, 2, 128), (32, 1024, 128)], "few rows"
    ),
    "bmm 32x2x1024x128 by rows": Case(torch.bmm, [(32, 2, 1024), (32, 1024, 128)], "few rows"),
    "mm 128x768x768 in panels": Case(functional.linear, [(128, 768), (768, 768)], "panels"),
    "mm 197x768x3072 in panels": Case(functional.linear, [(197, 768), (3072, 768)], "panels"),
    "mm 1500x512x512 in panels": Case(functional.linear, [(1500, 512), (512, 512)], "panels"),
    "mm 1376x256 of 512 rows, moved": Case(
        lambda g, x: g.t() @ x, [(512, 1376), (512, 256)], "moved"
    ),
    "bmm 8x250x1500x64 in panels": Case(torch.bmm, [(8, 250, 1500), (8, 1500, 64)], "panels"),
    "mm 128x768x3072 by a unit": Case(functional.linear, [(128, 768), (3072, 768)], "matrix unit"),
    "mm 64x1024x2816 by a unit": Case(functional.linear, [(64, 1024), (2816, 1024)], "matrix unit"),
    "mm 1500x384x1536 by a unit": Case(
        functional.linear, [(1500, 384), (1536, 384)], "matrix unit"
    ),
    "mm 197x768x768": Case(torch.mm, [(197, 768), (768, 768)], "peeling"),
    "attention 197": Case(
        functional.scaled_dot_product_attention, [(1, 12, 197, 64)] * 3, "peeling"
    ),
    "queries 8x197 by keys, 12 heads": Case(_heads, [(8, 197, 768)] * 2, "whole tiles"),
    "attention 1500 in blocks": Case(
        functional.scaled_dot_product_attention, [(1, 8, 1500, 64)] * 3, "blocks"
    ),
    "conv1d 80-384 k3": _conv_case((1, 80, 3000), (384, 80, 3)),
    "conv1d 384-384 k3 s2": _conv_case((1, 384, 3000), (384, 384, 3), stride=2),
    "conv1d 64-64 k3 batch 8": _conv_case((8, 64, 256), (64, 64, 3)),
    "conv1d 4-8 k3 of 16": _conv_case((2, 4, 16), (8, 4, 3)),
    "conv1d gradients 384 k3 s2": Case(
        _conv_gradients(True, True), [(1, 384, 750), (1, 384, 1500), (384, 384, 3)], "convolutions"
    ),
    "conv2d gradient 64-128 k3 s2": Case(
        _conv_gradients(True, False),
        [(8, 128, 28, 28), (8, 64, 56, 56), (128, 64, 3, 3)],
        "convolutions",
    ),
    "conv2d transposed gradients 64-32 k4 s2": Case(
        _conv_gradients(True, True, transposed=True),
        [(1, 32, 64, 64), (1, 64, 32, 32), (64, 32, 4, 4)],
        "convolutions",
    ),
    "conv2d depthwise 576 of 14": Case(
        lambda x, w: functional.conv2d(x, w, None, 1, 1, 1, 576),
        [(1, 576, 14, 14), (576, 1, 3, 3)],
        "channels last",
    ),
    "conv2d depthwise 96 k7 of 56": Case(
        lambda x, w: functional.conv2d(x, w, None, 1, 3, 1, 96),
        [(1, 96, 56, 56), (96, 1, 7, 7)],
        "channels last",
    ),
    "conv2d 64 in 4 groups k3 of 28": Case(
        lambda x, w: functional.conv2d(x, w, None, 1, 1, 1, 4),
        [(2, 64, 28, 28), (64, 16, 3, 3)],
        "groups",
    ),
    "conv2d 256 in 32 groups k3 s2 of 56": Case(
        lambda x, w: functional.conv2d(x, w, None, 2, 1, 1, 32),
        [(1, 256, 56, 56), (256, 8, 3, 3)],
        "groups",
    ),
    "conv2d 1-20 k5 of 64x28": Case(
        lambda x, w: functional.conv2d(x, w, None, 1, 2),
        [(64, 1, 28, 28), (20, 1, 5, 5)],
        "groups",
    ),
    "conv2d 64-3 k3 of 64": Case(
        lambda x, w: functional.conv2d(x, w, None, 1, 1),
        [(1, 64, 64, 64), (3, 64, 3, 3)],
        "groups",
    ),
    "conv2d gradient of the weight, 4 groups": Case(
        lambda x, g: torch.nn.grad.conv2d_weight(x, (64, 16, 3, 3), g, 1, 1, 1, 4),
        [(2, 64, 28, 28), (2, 64, 28, 28)],
        "groups",
    ),
    "conv3d 16-32 k3 of 16x32x32": Case(
        lambda x, w: functional.conv3d(x, w, padding=1),
        [(1, 16, 16, 32, 32), (32, 16, 3, 3, 3)],
        "convolutions",
    ),
    "conv2d 128 k3 of 28": Case(_conv2d, [(1, 128, 28, 28), (128, 128, 3, 3)], "registers"),
    "conv2d 64 k3 of 56": Case(_conv2d, [(1, 64, 56, 56), (64, 64, 3, 3)], "registers"),
    "conv2d 512 k3 of 7, 8 images": Case(
        _conv2d, [(8, 512, 7, 7), (512, 512, 3, 3)], "several images"
    ),
    "conv2d 256 k3 of 14, 4 images": Case(
        _conv2d, [(4, 256, 14, 14), (256, 256, 3, 3)], "several images"
    ),
    "conv2d 64 k3 of 56, 8 images": Case(
        _conv2d, [(8, 64, 56, 56), (64, 64, 3, 3)], "several images"
    ),
    "conv2d 16 k3 of 32, 32 images": Case(
        _conv2d, [(32, 16, 32, 32), (16, 16, 3, 3)], "several images"
    ),
    "conv2d 64-32-3 of 64, 2 images": Case(
        _few_features, [(2, 64, 64, 64), (32, 64, 3, 3), (3, 32, 1, 1)], "packing"
    ),
    "5000 rows of 64 added into 100": Case(
        lambda x, y: x.index_add(0, torch.arange(5000) % 100, y),
        [(100, 64), (5000, 64)],
        "putting rows",
    ),
    "mel 80x201 by 2x201x300": Case(
        lambda x, y: torch.matmul(x, y.square()), [(80, 201), (2, 201, 300)], "packing in shape"
    ),
    "bottleneck 256-64 of 56": Case(
        _bottleneck, [(1, 256, 56, 56), (64, 256, 1, 1), (256, 64, 1, 1)], "channels_last"
    ),
    "product of f16": Case(
        lambda x, w: torch.mm(x.half(), w.half()), [(128, 512), (512, 1024)], "halves"
    ),
    "sort 64 rows of 1000": Case(lambda x: x.sort(-1), [(64, 1000)], "merging"),
    "sort 1000 rows by columns": Case(lambda x: x.sort(0)[0], [(1000, 64)], "merging"),
    "top 8 of 1024 rows of 256": Case(lambda x: x.topk(8), [(1024, 256)], "firsts"),
    "residual of 8x128x768": Case(
        _residual, [(8, 128, 768), (8, 128, 768), (768, 768)], "matrices"
    ),
    "conv1d depthwise 1536 k4": _conv_case((1, 1536, 128), (1536, 1, 4), padding=3, groups=1536),
}


def region_of(case: Case, when: str = AFTER) -> Region:
    """Capture a case as one region."""
    if when == BEFORE and case.without == "blocks":
        with unittest.mock.patch.object(attention, "_BLOCK_BYTES", float("inf")):
            return region_of(case)
    inputs = [torch.zeros(shape) for shape in case.shapes]
    with torch.no_grad():
        graph = make_fx(case.function, decomposition_table=decomposition_table())(*inputs)
    parts = partition(capture_aot(graph), load_capabilities(NPU_LOCAL.compile.capabilities))
    (segment,) = parts.regions
    return extract_region(segment, ())


def compiled(name: str, when: str) -> bytes:
    """Compile a case in a process of its own, whose flags are not those of others."""
    case, target = CASES[name], NPU_LOCAL.compile
    if when == BEFORE and case.without in _FLAGS:
        dropped = _FLAGS[case.without]
        flags = tuple(f for f in iree_session.global_flags() if not f.startswith(dropped))
        iree_session.global_flags = lambda: flags  # type: ignore[assignment]
    elif when == BEFORE and case.without in _FUNCTIONS:
        for module, name in _FUNCTIONS[case.without]:
            setattr(module, name, lambda *args: ())
    elif when == BEFORE:
        target = replace(target, rewrites=tuple(r for r in target.rewrites if r != case.without))
    return compile_program(Program.of(region_of(case, when)), target).vmfb


def call_of(
    vmfb: bytes, region: Region, inputs: Sequence[torch.Tensor]
) -> Callable[[], list[DeviceArray]]:
    """Load a module; give a call that waits for its results."""
    device = open_device(NPU_LOCAL)
    artifact = Artifact(region.name, vmfb, {ENTRY: EntryPoint(region.signature)})
    function = Executable(device, artifact).functions[ENTRY]
    handles = [device.put(tensor) for tensor in inputs]

    def call() -> list[DeviceArray]:
        results = list(function(*handles))
        for result in results:
            result.wait()
        return results

    return call


def check(call: Callable[[], Any], results: Sequence[DeviceArray]) -> None:
    """Compare results with eager's, by the largest number of each.

    Raises:
        SystemExit: they are others, and what takes how long to compute them says nothing.
    """
    expected = [t for t in pytree.tree_leaves(call()) if isinstance(t, torch.Tensor)]
    for one, other in zip(results, expected, strict=True):
        if not (off := largest_difference(one.to_host(), other)) < LIMIT:
            raise SystemExit(f"a result of {list(other.shape)} is off by {off:.1e} of the largest")


def measure(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Time calls in turn: milliseconds a call, by round; short ones are repeated."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for name in turns(list(calls), rounds):
        started, count = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - started) < 0.02 or not count:
            calls[name]()
            count += 1
        times[name].append(elapsed / count * 1e3)
    return times


def main() -> None:
    """Measure the cases that were asked for and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", help="how their names begin")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    names = [n for n in CASES if not args.cases or n.startswith(tuple(args.cases))]
    print(f"{'case':28} {'eager':>10} {'before':>10} {'after':>10} {'after/before':>13} (ms)")
    processes = multiprocessing.get_context("spawn")
    for name in names:
        torch.manual_seed(0)
        case, region = CASES[name], region_of(CASES[name])
        inputs = [torch.randn(shape) for shape in case.shapes]
        calls: dict[str, Callable[[], Any]] = {"eager": lambda c=case, i=inputs: c.function(*i)}  # type: ignore[misc]
        for when in (BEFORE, AFTER):
            with ProcessPoolExecutor(1, processes) as pool:
                vmfb = pool.submit(compiled, name, when).result()
            calls[when] = call_of(vmfb, region, inputs)
        with torch.no_grad():
            for when in (BEFORE, AFTER):
                check(calls["eager"], calls[when]())
            times = measure(calls, args.rounds)
        medians = " ".join(f"{statistics.median(values):10.3f}" for values in times.values())
        ratios = [a / b for a, b in zip(times[AFTER], times[BEFORE], strict=True)]
        print(f"{name:28} {medians} {statistics.median(ratios):13.3f}", flush=True)


if __name__ == "__main__":
    main()
