"""Kernels of the user's for custom ops: in the region, fused, checked, part of the cache key."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import npu_iree
from lowering.kernels import Kernel, KernelType
from npu_iree import KernelError, kernels
from npu_iree.offline.build import write_artifact
from tolerances import assert_same


@torch.library.custom_op("kernel_tests::blend", mutates_args=())
def blend(x: torch.Tensor, y: torch.Tensor, share: float, shift: int, flip: bool) -> torch.Tensor:
    return (y - x if flip else x - y) * share + shift


@blend.register_fake
def _(x: torch.Tensor, y: torch.Tensor, share: float, shift: int, flip: bool) -> torch.Tensor:
    return torch.empty_like(x)


def _backward(context: Any, grad: torch.Tensor) -> Any:
    zero = torch.zeros_like(grad)
    one = blend(grad, zero, context.share, 0, context.flip)
    return one, -one, None, None, None


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    *_, ctx.share, _, ctx.flip = inputs


blend.register_autograd(_backward, setup_context=_setup)


@torch.library.custom_op("kernel_tests::halves", mutates_args=())
def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    n = x.shape[0] // 2
    return x[:n].clone(), x[n : 2 * n].clone()


@halves.register_fake
def _(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    half = x.new_empty(x.shape[0] // 2)
    return half, torch.empty_like(half)


@torch.library.custom_op("kernel_tests::writes", mutates_args=("x",))
def writes(x: torch.Tensor) -> None:
    x.add_(1)


@torch.library.custom_op("kernel_tests::shapeless", mutates_args=())
def shapeless(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@torch.library.custom_op("kernel_tests::text", mutates_args=())
def text(x: torch.Tensor, how: str) -> torch.Tensor:
    return x + 1


def blend_function(element: str, rank: int = 2, name: str = "blend") -> str:
    """One function of a kernel of `blend`, in a form that tells its element type and rank."""
    kind = f"tensor<{'?x' * rank}{element}>"
    loops = ", ".join(f"d{i}" for i in range(rank))
    same = f"affine_map<({loops}) -> ({loops})>"
    sizes = [
        f"%c{i} = arith.constant {i} : index\n  %n{i} = tensor.dim %x, %c{i} : {kind}"
        for i in range(rank)
    ]
    lines = "\n  ".join(sizes)
    kinds = ", ".join(['"parallel"'] * rank)
    convert = "arith.truncf %share : f64 to f32" if element == "f32" else "arith.mulf %share, %one"
    convert += "" if element == "f32" else " : f64"
    return f"""
func.func @{name}(%x: {kind}, %y: {kind}, %share: f64, %shift: i64, %flip: i1) -> {kind} {{
  %one = arith.constant 1.0 : f64
  %s = {convert}
  %t = arith.sitofp %shift : i64 to {element}
  {lines}
  %empty = tensor.empty({", ".join(f"%n{i}" for i in range(rank))}) : {kind}
  %0 = linalg.generic {{indexing_maps = [{same}, {same}, {same}], iterator_types = [{kinds}]}}
      ins(%x, %y : {kind}, {kind}) outs(%empty : {kind}) {{
  ^bb0(%a: {element}, %b: {element}, %unused: {element}):
    %1 = func.call @difference_{name}(%a, %b, %flip) : ({element}, {element}, i1) -> {element}
    %2 = arith.mulf %1, %s : {element}
    %3 = arith.addf %2, %t : {element}
    linalg.yield %3 : {element}
  }} -> {kind}
  return %0 : {kind}
}}
// what `flip` turns round: a private function, which is ours to call
func.func private @difference_{name}(%a: {element}, %b: {element}, %flip: i1) -> {element} {{
  %0 = arith.subf %a, %b : {element}
  %1 = arith.subf %b, %a : {element}
  %2 = arith.select %flip, %1, %0 : {element}
  return %2 : {element}
}}
"""


HALVES = """
func.func @halves(%x: tensor<?xf32>) -> (tensor<?xf32>, tensor<?xf32>) {
  %zero = arith.constant 0 : index
  %two = arith.constant 2 : index
  %all = tensor.dim %x, %zero : tensor<?xf32>
  %n = arith.divui %all, %two : index
  %0 = tensor.extract_slice %x[0] [%n] [1] : tensor<?xf32> to tensor<?xf32>
  %1 = tensor.extract_slice %x[%n] [%n] [1] : tensor<?xf32> to tensor<?xf32>
  return %0, %1 : tensor<?xf32>, tensor<?xf32>
}
"""


@pytest.fixture(autouse=True)
def _no_kernels() -> Iterator[None]:
    kernels._KERNELS.clear()
    yield
    kernels._KERNELS.clear()


def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    mixed: torch.Tensor = torch.ops.kernel_tests.blend(torch.relu(x), y, 0.25, x.shape[0], True)
    return mixed * 2 + blend(x, y, -1.5, 3, False)


def test_a_kernel_runs_on_the_device_fused_with_its_neighbours(
    target: str, counts: Counter[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_IREE_DUMP", str(tmp_path))
    npu_iree.register_kernel("kernel_tests::blend", blend_function("f32"))
    options = {"target": target, "fallback": "error"}
    compiled = torch.compile(function, backend="npu_iree", options=options)
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    assert_same(compiled(x, y), function(x, y))
    assert (counts["regions"], counts["host_ops"]) == (1, 0)
    (flow,) = tmp_path.rglob("*.flow.mlir")
    assert len(re.findall(r"flow\.executable private", flow.read_text())) == 1


def test_a_kernel_serves_all_sizes(target: str, counts: Counter[str]) -> None:
    npu_iree.register_kernel(torch.ops.kernel_tests.blend, blend_function("f32"))
    npu_iree.register_kernel(torch.ops.kernel_tests.halves.default, HALVES)

    def both(x: torch.Tensor, y: torch.Tensor) -> Any:
        first, second = halves(function(x, y).flatten())
        return first + 1, second, first @ second

    options = {"target": target, "fallback": "error"}
    compiled = torch.compile(both, backend="npu_iree", options=options, dynamic=True)
    for rows, columns in ((3, 4), (5, 2), (2, 7), (6, 6)):
        x, y = torch.randn(rows, columns), torch.randn(rows, columns)
        assert_same(compiled(x, y), both(x, y))
    assert counts["compiles"] == 1


def test_a_call_takes_the_function_of_its_dtype_and_rank(counts: Counter[str]) -> None:
    parts = [("f32", 2), ("f64", 2), ("f32", 1)]
    texts = [blend_function(e, r, f"{e}_{r}") for e, r in parts]
    npu_iree.register_kernel("kernel_tests::blend", "module {" + "\n".join(texts) + "}")
    compiled = torch.compile(function, backend="npu_iree")
    for x in (torch.randn(3, 4), torch.randn(3, 4).double(), torch.randn(5)):
        assert_same(compiled(x, x + 1), function(x, x + 1))
    assert counts["host_ops"] == 0
    half = torch.randn(3, 4).half()
    assert_same(compiled(half, half + 1), function(half, half + 1))
    assert counts["host_ops"] == 2


def test_a_kernel_is_used_in_training(counts: Counter[str]) -> None:
    npu_iree.register_kernel("kernel_tests::blend", blend_function("f32"))
    compiled = torch.compile(function, backend="npu_iree", options={"fallback": "error"})
    outcomes = []
    for call in (compiled, function):
        x, y = (torch.randn(3, 4, generator=torch.Generator().manual_seed(i)) for i in range(2))
        call(x.requires_grad_(), y.requires_grad_()).pow(2).sum().backward()
        outcomes.append([x.grad, y.grad])
    assert_same(*outcomes)
    assert counts["regions"] == 2


def test_a_kernel_may_branch(counts: Counter[str]) -> None:
    branches = """
      cf.cond_br %odd, ^more, ^end(%0, %1 : tensor<?xf32>, tensor<?xf32>)
    ^more:
      cf.br ^end(%0, %1 : tensor<?xf32>, tensor<?xf32>)
    ^end(%a: tensor<?xf32>, %b: tensor<?xf32>):
      return %a, %b"""
    odd = "%rest = arith.remui %all, %two : index\n  %odd = arith.cmpi ugt, %rest, %zero : index\n"
    npu_iree.register_kernel(
        "kernel_tests::halves", HALVES.replace("  return %0, %1", f"  {odd}{branches}")
    )
    compiled = torch.compile(lambda x: halves(x * 2), backend="npu_iree", dynamic=True)
    for size in (6, 9):
        assert_same(compiled(torch.ones(size)), halves(torch.ones(size) * 2))
    assert counts["host_ops"] == 0


def test_without_a_kernel_the_op_runs_on_the_host_and_says_so(
    counts: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    with caplog.at_level(logging.WARNING, "npu_iree"):
        assert_same(torch.compile(function, backend="npu_iree")(x, y), function(x, y))
    assert counts["host_ops"] == 2
    assert "a custom op without a kernel (register_kernel)" in caplog.text


def test_explain_tells_which_calls_a_kernel_is_not_for() -> None:
    npu_iree.register_kernel("kernel_tests::blend", blend_function("f64"))
    explanation = npu_iree.explain(function, torch.randn(3, 4), torch.randn(3, 4))
    reasons = {op.reason for op in explanation.host_ops}
    assert reasons == {
        "its kernel is for (tensor<?x?xf64>, tensor<?x?xf64>, f64, i64, i1) -> (tensor<?x?xf64>), "
        "and this call has (tensor<3x4xf32>, tensor<3x4xf32>, f64, i64, i1)"
    }


def test_a_kernel_that_gives_something_else_than_its_shape_function_is_not_used() -> None:
    seven = HALVES.replace("(tensor<?xf32>, tensor<?xf32>)", "(tensor<?xf32>, tensor<7xf32>)")
    text = seven.replace(
        "return %0, %1 : tensor<?xf32>, tensor<?xf32>",
        "%2 = tensor.cast %1 : tensor<?xf32> to tensor<7xf32>\n"
        "  return %0, %2 : tensor<?xf32>, tensor<7xf32>",
    )
    npu_iree.register_kernel("kernel_tests::halves", text)
    explanation = npu_iree.explain(lambda x: halves(x), torch.randn(8))
    assert "its shape function gives (tensor<4xf32>, tensor<4xf32>)" in str(explanation)
    assert_same(torch.compile(halves, backend="npu_iree")(torch.ones(8)), halves(torch.ones(8)))


def test_the_text_of_a_kernel_is_part_of_the_cache_key(
    counts: Counter[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_IREE_CACHE", str(tmp_path))
    x = torch.ones(2, 3)
    right = blend_function("f32")
    doubled = right.replace("arith.mulf %1, %s", "arith.addf %1, %s")

    def call(kernel: str) -> torch.Tensor:
        torch._dynamo.reset()
        npu_iree.register_kernel("kernel_tests::blend", kernel)
        result: torch.Tensor = torch.compile(blend, backend="npu_iree")(x, x * 3, 0.5, 1, True)
        return result

    assert_same(call(right), torch.full((2, 3), 2.0))
    assert_same(call(doubled), torch.full((2, 3), 3.5))
    assert (counts["compiles"], counts["cache_hits"]) == (2, 0)
    assert_same(call(right), torch.full((2, 3), 2.0))
    assert (counts["compiles"], counts["cache_hits"]) == (2, 1)


def test_an_artifact_holds_kernels(tmp_path: Path) -> None:
    npu_iree.register_kernel("kernel_tests::blend", blend_function("f32"))

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return blend(x * 2, x, 0.5, 1, False) + 1

    x = torch.randn(3, 4)
    write_artifact({"main": torch.export.export(Model(), (x,))}, tmp_path / "model.vmfb")
    kernels._KERNELS.clear()
    assert_same(npu_iree.load(tmp_path / "model.vmfb")(x), Model()(x))


TYPES = "tensor<?xf32>, %y: tensor<?xf32>, %share: f64, %shift: i64, %flip: i1"
WRONG = {
    "no such op": ("kernel_tests::blen", HALVES, "Did you mean 'kernel_tests::blend'?"),
    "no name": ("blend", HALVES, "there is no op 'blend'"),
    "it writes": ("kernel_tests::writes", HALVES, "writes to its arguments"),
    "no shape function": (
        "kernel_tests::shapeless",
        "func.func @f(%x: tensor<?xf32>) -> tensor<?xf32> { return %x : tensor<?xf32> }",
        "torch.library.register_fake",
    ),
    "an argument that is no number": ("kernel_tests::text", HALVES, "takes 'how', a str"),
    "another count": ("kernel_tests::blend", HALVES, "a tensor, a tensor, a f64, a i64, a i1"),
    "another number": (
        "kernel_tests::blend",
        blend_function("f32").replace("%shift: i64", "%shift: f64"),
        "is (tensor<?x?xf32>, tensor<?x?xf32>, f64, f64, i1)",
    ),
    "one result": (
        "kernel_tests::halves",
        "func.func @f(%x: tensor<?xf32>) -> tensor<?xf32> { return %x : tensor<?xf32> }",
        "gives 2 tensors",
    ),
    "a type that no op has": (
        "kernel_tests::blend",
        "func.func @f(%x: memref<?xf32>) -> tensor<?xf32> { return }",
        "'memref<?xf32>' in its signature",
    ),
    "nothing public": ("kernel_tests::blend", "func.func private @f()", "no public func.func"),
    "no MLIR": (
        "kernel_tests::halves",
        HALVES.replace("arith.divui", "arith.dividui"),
        "arith.dividui",
    ),
    "other types inside": (
        "kernel_tests::halves",
        HALVES.replace("return %0, %1", "return %0, %0, %1"),
        "is no MLIR",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_refused_when_it_is_registered(name: str) -> None:
    op, text, said = WRONG[name]
    with pytest.raises(KernelError, match=re.escape(said)):
        npu_iree.register_kernel(op, text)
    assert not kernels.registered_kernels()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("func.func @f(%a: tensor<4x?xi1>) -> (tensor<f16>)", "(tensor<4x?xi1>) -> (tensor<f16>)"),
        (
            "func.func public @f(%a: tensor<2xcomplex<f32>> {x.y = dense<[1, 2]> : tensor<2xi64>},"
            "\n %b: i1) -> tensor<?xbf16> attributes {z = 1} {",
            "(tensor<2xcomplex<f32>>, i1) -> (tensor<?xbf16>)",
        ),
        ("func.func @f() -> tensor<1xi8>\n{", "() -> (tensor<1xi8>)"),
    ],
)
def test_signatures_are_read_as_mlir_writes_them(text: str, expected: str) -> None:
    (found,) = Kernel.parse("x.y.default", text).functions
    assert str(found) == expected


def test_a_static_size_takes_only_itself() -> None:
    some, four = KernelType("f32", (None,)), KernelType("f32", (4,))
    assert some.takes(four)
    assert four.takes(four)
    assert not four.takes(some)
    assert not four.takes(KernelType("f32", (3,)))
    assert not KernelType("f64").takes(KernelType("f64", ()))
