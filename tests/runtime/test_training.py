"""Training: the gradients of ops and layers are those of eager."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from tolerances import assert_same

pytestmark = pytest.mark.usefixtures("shared_cache")

INF = float("inf")


def gradients(function: Callable[..., Any], *inputs: Any) -> list[Any]:
    """Give the results and the gradients of (trees of) inputs, for fixed ones of the results."""
    leaves = pytree.tree_map(
        lambda x: x.detach().clone().requires_grad_(x.is_floating_point()), inputs
    )
    results = function(*leaves)
    flat = pytree.tree_leaves(results)
    weights = [torch.randn(y.shape, generator=torch.Generator().manual_seed(3)) for y in flat]
    torch.autograd.backward(flat, [w.to(y.dtype) for w, y in zip(weights, flat, strict=True)])
    return [
        pytree.tree_map(lambda y: y.detach(), results),
        pytree.tree_map(lambda x: x.grad, leaves),
    ]


def check(function: Callable[..., Any], *inputs: Any) -> None:
    compiled = torch.compile(function, backend="npu_iree")
    assert_same(gradients(compiled, *inputs), gradients(function, *inputs))


class Together(nn.Module):
    """Layers by name that are one program, each of an input of its own."""

    def __init__(self, layers: dict[str, nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)

    def forward(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: layer(inputs[name]) for name, layer in self.layers.items()}


MASK = torch.zeros(5, 7).index_put((torch.tensor([2]),), torch.tensor(-INF))  # row 2 sees nothing
ATTENTION: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "plain": ((2, 2, 5, 5), {}),
    "causal, fewer queries": ((3, 3, 4, 7), {"is_causal": True}),
    "mask and scale": ((3, 3, 5, 7), {"attn_mask": MASK, "scale": 0.3}),
    "boolean mask and groups": ((4, 2, 5, 7), {"attn_mask": MASK == 0, "enable_gqa": True}),
}


@pytest.mark.slow
def test_attention_has_eagers_gradients(counts: Counter[str]) -> None:
    def attend(inputs: dict[str, list[torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {
            name: F.scaled_dot_product_attention(*inputs[name], **options)
            for name, (_, options) in ATTENTION.items()
        }

    inputs = {}
    for name, ((heads, groups, queries, keys), _) in ATTENTION.items():
        shapes = [(2, heads, queries, 8), (2, groups, keys, 8), (2, groups, keys, 8)]
        inputs[name] = [torch.randn(shape) for shape in shapes]
    check(attend, inputs)
    assert counts["graphs"] == counts["regions"] == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_attention_has_eagers_gradients_in(dtype: torch.dtype) -> None:
    inputs = [torch.randn(2, 3, 5, 8).to(dtype) for _ in range(3)]
    check(F.scaled_dot_product_attention, *inputs)


def test_a_row_that_is_masked_as_a_whole_is_zero_in_inference_too() -> None:
    q, k, v = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 8)
    attend = torch.compile(F.scaled_dot_product_attention, backend="npu_iree")
    with torch.no_grad():
        result = attend(q, k, v, attn_mask=MASK)
        assert_same(result, F.scaled_dot_product_attention(q, k, v, attn_mask=MASK))
    assert bool((result[:, :, 2] == 0).all())


END_IS_NOT_READ: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "images": (nn.Conv2d(6, 8, 3, 2, 1), (4, 6, 2, 2)),
    "rows": (nn.Conv1d(6, 8, 3, 3, 1, 2), (4, 6, 5)),
    "images without bias": (nn.Conv2d(6, 8, 3, 2, 1, bias=False), (4, 6, 2, 5)),
    "of one place": (nn.Conv2d(6, 8, 1, 2), (4, 6, 2, 2)),
    "of a column": (nn.Conv2d(6, 8, (3, 1), 2, (1, 0)), (2, 6, 2, 2)),
}


@pytest.mark.parametrize(
    "names",
    [[*END_IS_NOT_READ][:2], pytest.param([*END_IS_NOT_READ][2:], marks=pytest.mark.sweep)],
    ids=", ".join,
)
def test_a_convolution_that_does_not_read_the_end_of_its_input(
    names: list[str], cold_counts: Counter[str]
) -> None:
    layers = Together({name: END_IS_NOT_READ[name][0] for name in names})
    check(layers, {name: torch.randn(END_IS_NOT_READ[name][1]) for name in names})
    assert cold_counts["healed_ops"] == 0


def test_a_convolution_with_one_amount_for_all_dimensions() -> None:
    x, weight = torch.randn(1, 3, 2, 3, 2), torch.randn(4, 3, 2, 2, 2)

    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.conv3d(x, weight, padding="valid")

    assert_same(torch.compile(function, backend="npu_iree")(x, weight), function(x, weight))


def test_the_elements_that_are_the_maximum_are_known_in_the_backward_pass() -> None:
    """They are norms of norms, which come out otherwise when they are computed beside other ops."""

    def largest(x: torch.Tensor) -> torch.Tensor:
        inner = F.instance_norm(x).permute(1, 2, 0)
        outer = F.batch_norm(inner, None, None, training=True)
        return outer + outer.amax(1, keepdim=True)

    check(largest, torch.randn(8, 8, 8, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("amounts", [(3, 1, 1), (2, 2, 0), (3, 2, 1)])
def test_an_average_pool_of_images_of_any_size(amounts: tuple[int, int, int]) -> None:
    def pooled(x: torch.Tensor) -> torch.Tensor:
        return F.avg_pool2d(x, *amounts)

    options = {"fallback": "error"}
    compiled = torch.compile(pooled, backend="npu_iree", dynamic=True, options=options)
    for shape in ((2, 4, 9, 9), (3, 4, 12, 8), (2, 3, 17, 15)):
        x = torch.randn(shape)
        assert_same(gradients(compiled, x), gradients(pooled, x))


@pytest.mark.sweep
def test_a_convolution_whose_padding_differs_on_both_sides() -> None:
    """Dynamic sizes: what is added on one side is a symbol, and negative in the backward pass."""

    def convolved(x: torch.Tensor) -> torch.Tensor:
        return F.conv1d(x.transpose(0, 2).flatten().view_as(x), x, padding="same") / x.shape[0]

    compiled = torch.compile(convolved, backend="npu_iree", dynamic=True)
    for size in (8, 10, 7):
        x = torch.randn(size, size, size, generator=torch.Generator().manual_seed(size))
        for _ in range(20):  # what was written beyond the end showed in later calls
            assert_same(gradients(compiled, x), gradients(convolved, x))


def test_a_pad_that_takes_away() -> None:
    amounts = [(1, -1), (-1, 1), (0, -1, 2, -3), (-1, 0), (3, -2, -1, 4)]

    def function(*inputs: torch.Tensor) -> dict[tuple[int, ...], list[torch.Tensor]]:
        return {pad: [F.pad(x, pad, value=1) + 1 for x in inputs] for pad in amounts}

    inputs = [(torch.randn(2, 3, 7, 6) * 10).to(dtype) for dtype in (torch.float32, torch.uint8)]
    assert_same(torch.compile(function, backend="npu_iree")(*inputs), function(*inputs))


class MeanOfChannelsLast(nn.Linear):
    """The end of a model that works on images whose channels come last."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.adaptive_avg_pool2d(super().forward(x).permute(0, 3, 1, 2), 1).flatten(1)


LAYERS: dict[str, dict[str, tuple[nn.Module, tuple[int, ...]]]] = {
    "norms": {
        "mean of channels last": (MeanOfChannelsLast(6, 6), (2, 4, 4, 6)),
        "batch norm": (nn.BatchNorm2d(4), (2, 4, 8, 8)),
        "batch norm of statistics": (nn.BatchNorm2d(4).eval(), (2, 4, 8, 8)),
        "group norm": (nn.GroupNorm(2, 4), (2, 4, 8, 8)),
        "layer norm": (nn.LayerNorm(8), (2, 4, 8)),
        "activations": (nn.Sequential(nn.GELU(), nn.SiLU(), nn.ELU(), nn.Softplus()), (4, 8)),
    },
    "pools": {
        "max pool": (nn.MaxPool2d(3, 2, 1), (2, 4, 8, 8)),
        "average pool over the end": (nn.AvgPool2d(3, 2, ceil_mode=True), (2, 4, 8, 8)),
        "adaptive pool": (nn.AdaptiveAvgPool2d((1, 1)), (2, 4, 8, 8)),
        "edges repeated": (nn.ReplicationPad2d((2, 1, 0, 3)), (2, 4, 5, 6)),
    },
    "other pools": {
        "average pool": (nn.AvgPool2d(2), (2, 4, 8, 8)),
        "average pool in 3 dimensions": (nn.AvgPool3d(2, 1, 1), (2, 3, 4, 4, 4)),
        "max pool in 3 dimensions": (nn.MaxPool3d(3, 2, 1), (2, 3, 4, 5, 6)),
        "adaptive pool of windows of two lengths": (nn.AdaptiveAvgPool2d((3, 5)), (2, 4, 8, 8)),
        "adaptive max pool": (nn.AdaptiveMaxPool2d((3, 4)), (2, 4, 8, 8)),
        "adaptive max pool in 3 dimensions": (nn.AdaptiveMaxPool3d((3, 2, 5)), (2, 3, 4, 4, 6)),
    },
    "convolutions": {
        "in groups": (nn.Conv2d(4, 8, 3, groups=2, padding=1), (2, 4, 8, 8)),
        "of volumes": (nn.Conv3d(3, 8, 3, (1, 2, 1), 1), (2, 3, 5, 6, 4)),
        "in groups in 3 dimensions": (nn.Conv3d(4, 8, 3, 2, 1, groups=2), (2, 4, 5, 4, 3)),
        "transposed": (nn.ConvTranspose2d(4, 8, 3, 2, 1), (2, 4, 8, 8)),
        "transposed, in groups": (nn.ConvTranspose2d(4, 8, 3, 2, 1, 1, 2), (2, 4, 8, 8)),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "norms",
        "pools",
        pytest.param("other pools", marks=pytest.mark.sweep),
        pytest.param("convolutions", marks=pytest.mark.sweep),
    ],
)
def test_a_layer_trains_like_eagers(kind: str, counts: Counter[str]) -> None:
    layers, shapes = ({name: pair[i] for name, pair in LAYERS[kind].items()} for i in range(2))
    ours = Together(copy.deepcopy(layers))
    eagers = copy.deepcopy(ours)
    inputs = {name: torch.randn(shape) for name, shape in shapes.items()}
    compiled = torch.compile(ours, backend="npu_iree")
    assert_same(gradients(compiled, inputs), gradients(eagers, inputs))
    for of in (nn.Module.named_parameters, nn.Module.named_buffers):
        changed = [{name: (t.detach(), t.grad) for name, t in of(m)} for m in (ours, eagers)]
        assert_same(*changed)
    assert counts["unsupported_ops"] == 0


def test_a_loss_that_pytorch_decomposes_wrongly() -> None:
    target = torch.tensor([[1, 0, -1, 2], [3, -1, 0, 0], [0, 1, 2, 3]])
    check(lambda x: F.multilabel_margin_loss(x, target, reduction="none"), torch.randn(3, 4))
    compiled = torch.compile(F.huber_loss, backend="npu_iree", dynamic=True)
    x, wide = torch.randn(3, 4), torch.randn(3, 4, dtype=torch.float64)
    assert_same(compiled(x, wide), F.huber_loss(x, wide))


def test_the_gradient_of_dropout_is_its_mask() -> None:
    x = torch.ones(64, 64, requires_grad=True)
    result = torch.compile(lambda x: F.dropout(x * 1.0, 0.25), backend="npu_iree")(x)
    result.sum().backward()
    assert x.grad is not None
    assert torch.equal(result.detach(), x.grad)
    kept = float((result > 0).float().mean())
    assert abs(kept - 0.75) < 0.03


@pytest.mark.sweep
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_place_of_a_maximum_is_inside_the_image(counts: Counter[str], dynamic: bool) -> None:
    """Also of NaN, and where all is -inf, and padding beside it: the gradient is written there."""

    def pool(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.max_pool2d(x.exp(), 3, 2, 1), F.max_pool2d(x, 3, 2, 1, return_indices=True)[1]

    compiled = torch.compile(pool, backend="npu_iree", dynamic=dynamic)
    for shape in [(2, 4, 9, 12), (3, 4, 15, 7)]:
        x = torch.randn(shape)
        x[0, 0], x[0, 1], x[1, 2, :4, :4] = float("nan"), -float("inf"), -float("inf")
        x[-1, 3, 4] = float("nan")
        of_eager, of_ours = x.clone().requires_grad_(), x.clone().requires_grad_()
        expected, actual = pool(of_eager), compiled(of_ours)
        torch.testing.assert_close(actual, expected, equal_nan=True)
        expected[0].sum().backward()
        actual[0].sum().backward()
        torch.testing.assert_close(of_ours.grad, of_eager.grad, equal_nan=True)
    assert counts["host_ops"] == 0


def test_the_first_batch_is_not_kept() -> None:
    layer = nn.Linear(4, 4)
    compiled, batch = torch.compile(layer, backend="npu_iree"), torch.randn(3, 4)
    compiled(batch).sum().backward()
    alive = weakref.ref(batch)
    del batch
    gc.collect()
    assert alive() is None
