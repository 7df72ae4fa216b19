"""What PyTorch's graph machinery can do: breaks, control flow, transforms, modes, dtypes."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F

import npu_iree
from npu_iree.transforms import TANGENTS, teller
from tolerances import assert_same

pytestmark = pytest.mark.usefixtures("shared_cache")


def data(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def check(function: Callable[..., Any], *args: Any, **how: Any) -> None:
    compiled = torch.compile(function, backend="npu_iree", **how)
    for _ in range(2):
        assert_same(compiled(*args), function(*args))


def test_graph_breaks(counts: Counter[str]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x)
        torch._dynamo.graph_break()
        y = y * 2 if float(y.sum()) > 0 else y - 1
        return y.exp()

    check(function, data(3, 4))
    assert counts["graphs"] >= 2


def test_fullgraph_refuses_a_break() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1

    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(function, backend="npu_iree", fullgraph=True)(data(3))


def test_disable_runs_in_eager(counts: Counter[str]) -> None:
    @torch.compiler.disable
    def outside(x: torch.Tensor) -> torch.Tensor:
        assert not torch.compiler.is_compiling()
        return x * 3

    check(lambda x: outside(x + 1).relu(), data(3))
    assert counts["graphs"] == 2


def test_cond(counts: Counter[str]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        z = torch.cond(y.sum() > 0, lambda t: t.sin() + 1, lambda t: t.cos() * 2, (y,))
        return z + x

    compiled = torch.compile(function, backend="npu_iree", fullgraph=True)
    for sign in (1, -1, 1):
        x = data(3, 4).abs() * sign
        assert_same(compiled(x), function(x))
    assert counts["graphs"] == 1
    assert counts["regions"] >= 1


def test_cond_has_gradients() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        def squeezed(t: torch.Tensor) -> torch.Tensor:
            return (t[None].sin() * 2).squeeze(0)

        return torch.cond(x.sum() > 0, squeezed, lambda t: t.exp(), (x * 1.5,)).sum()

    compiled = torch.compile(function, backend="npu_iree", fullgraph=True)
    for sign in (1, -1):
        grads = []
        for call in (compiled, function):
            x = (data(5).abs() * sign).requires_grad_()
            call(x).backward()
            grads.append(x.grad)
        assert_same(*grads)


def test_while_loop() -> None:
    from torch._higher_order_ops import while_loop

    def function(n: torch.Tensor, x: torch.Tensor) -> Any:
        i, y = while_loop(
            lambda i, y: i < 5, lambda i, y: (i + 1, y * 1.5 + i), (n.clone(), torch.relu(x))
        )
        return i, y + 1

    check(function, torch.tensor(2), data(3), fullgraph=True)


@torch.library.custom_op("feature_tests::host_only", mutates_args=())
def host_only(x: torch.Tensor) -> torch.Tensor:
    return x.flip(0) * 2


@host_only.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("feature_tests::adds_in_place", mutates_args=("x",))
def adds_in_place(x: torch.Tensor, y: torch.Tensor) -> None:
    x.add_(y)


def test_custom_ops_run_on_the_host_between_regions(target: str, counts: Counter[str]) -> None:
    check(
        lambda x: host_only(torch.relu(x)).exp(), data(3, 4), fullgraph=True,
        options={"target": target},
    )  # fmt: skip
    assert (counts["regions"], counts["host_ops"]) == (2, 1)


def test_a_custom_op_that_writes_to_its_argument(target: str) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = y * 2
        adds_in_place(x, z)
        return x.relu() + z

    outcomes = []
    compiled = torch.compile(function, backend="npu_iree", options={"target": target})
    for call in (compiled, function):
        x, y = data(3, 4), data(3, 4, seed=1)
        outcomes.append([call(x, y), call(x, y), x])
    assert_same(*outcomes)


def test_nested_compile_regions(counts: Counter[str]) -> None:
    @torch.compiler.nested_compile_region
    def block(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) * 2 - 1

    check(lambda x: block(block(x + 1)).sum(0), data(3, 4), fullgraph=True)
    assert counts["graphs"] == 1


def test_transforms() -> None:
    weight = data(4, 4)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ weight).pow(2).sum()

    def every(rows: torch.Tensor, x: torch.Tensor) -> dict[str, Any]:
        return {
            "vmap": torch.func.vmap(lambda x: torch.softmax(x @ weight, 0))(rows),
            "grad": torch.func.grad(loss)(x),
            "vmap of grad": torch.func.vmap(torch.func.grad(loss))(rows),
            "jvp": torch.func.jvp(loss, (x,), (x,)),
            "jacfwd of jacfwd": torch.func.jacfwd(torch.func.jacfwd(loss))(x),
            "jacrev": torch.func.jacrev(lambda x: torch.tanh(x @ weight))(x),
        }

    check(every, data(5, 4), data(4), fullgraph=True)


def test_transforms_from_outside_run_in_eager_and_are_told(
    counts: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * x

    def every(function: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
        x, rows = data(3).requires_grad_(), torch.eye(3)
        y = function(x)
        (batch,) = torch.autograd.grad(y, x, rows, is_grads_batched=True, retain_graph=True)
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(function(forward_ad.make_dual(x, rows[0]))).tangent
            (of_dual,) = torch.autograd.grad(y, x, forward_ad.make_dual(rows[0], rows[1]))
            return [batch, tangent, *forward_ad.unpack_dual(of_dual)]

    compiled = torch.compile(function, backend="npu_iree")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert_same(every(compiled), every(function))
    assert counts["regions"] >= 2
    assert counts["eager_calls"] == 6
    assert caplog.text.count("gradients come in batches") == 1
    assert 1 <= caplog.text.count("arguments carry tangents") <= 3  # of each graph
    with pytest.raises(npu_iree.NpuIreeError, match="carry tangents"):
        teller("error")(TANGENTS)


def test_inference_mode(target: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.GELU())
    ours, eagers = copy.deepcopy(model), copy.deepcopy(model)
    compiled = torch.compile(ours, backend="npu_iree", options={"target": target})
    with torch.inference_mode():
        for i in range(2):
            actual = compiled(data(3, 4, seed=i))
            assert_same(actual, eagers(data(3, 4, seed=i)))
            assert actual.is_inference()
    assert_same(list(ours.buffers()), list(eagers.buffers()))


def test_what_inference_mode_made_is_written_to_in_that_mode_only() -> None:
    add_one = torch.compile(lambda x: x.add_(1), backend="npu_iree")
    with torch.inference_mode():
        x = torch.zeros(4)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="inference tensor outside InferenceMode"):
            add_one(x)
    with torch.inference_mode():
        assert_same(add_one(x.zero_()), torch.ones(4))
    ours = torch.inference_mode()(lambda x: x.mul_(2))
    in_the_mode = torch.compile(ours, backend="npu_iree", fullgraph=True)
    with npu_iree.record_transfers() as transfers:
        assert_same(in_the_mode(x), torch.full((4,), 2.0))
    assert transfers.entries, "the device has written it"


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"is_causal": True},
        {"attn_mask": "bool"},
        {"attn_mask": "float"},
        {"scale": 0.3},
        {"enable_gqa": True},
    ],
    ids=str,
)
def test_attention_in_its_forms(how: dict[str, Any]) -> None:
    masks = {"bool": data(5, 5) > 0, "float": data(5, 5)}
    masks["bool"].fill_diagonal_(True)
    options = {k: masks[v] if k == "attn_mask" else v for k, v in how.items()}
    heads = 2 if "enable_gqa" in how else 4
    q, k, v = data(2, 4, 5, 8), data(2, heads, 5, 8, seed=1), data(2, heads, 5, 8, seed=2)
    check(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options), q, k, v)


def _small(kind: str) -> nn.Module:
    sizes = {
        "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "max_position_embeddings": 32,
    }  # fmt: skip
    torch.manual_seed(0)
    if kind == "bert":
        return transformers.BertModel(transformers.BertConfig(**sizes))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, use_cache=False))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_models_in_low_precision(kind: str, dtype: torch.dtype) -> None:
    model = _small(kind).to(dtype).eval()
    compiled = torch.compile(model, backend="npu_iree")
    tokens = torch.randint(0, 32, (2, 7))
    with torch.no_grad():
        actual, expected = compiled(tokens)[0], model(tokens)[0]
        exact = copy.deepcopy(model).float()(tokens)[0]
    assert actual.dtype is dtype
    # as near to what more digits give as eager is, and as near to eager as the dtype tells apart
    ours, eagers = ((t.float() - exact).abs().max() for t in (actual, expected))
    assert float(ours) < 2 * float(eagers) + 1e-3
    assert float((actual - expected).abs().max()) < 0.1


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, capturable=False),
    "adam, one by one": lambda p: torch.optim.Adam(p, lr=0.05, foreach=False),
}


@pytest.mark.slow
@pytest.mark.parametrize("foreach", [False, True])
def test_optimizers_of_many_parameters_are_one_region(foreach: bool, counts: Counter[str]) -> None:
    outcomes = []
    for is_compiled in (False, True):
        parameters = [nn.Parameter(data(3, 4, seed=i)) for i in range(9)]  # 36 tensors
        optimizer = torch.optim.AdamW(parameters, lr=0.1, foreach=foreach)

        def step(made: torch.optim.Optimizer = optimizer, all_of: Any = parameters) -> None:
            nn.utils.clip_grad_norm_(all_of, 0.5, foreach=foreach)
            made.step()

        for i, parameter in enumerate(parameters):
            parameter.grad = data(3, 4, seed=-i)
        for _ in range(2):
            (torch.compile(step, backend="npu_iree") if is_compiled else step)()
        outcomes.append([p.detach() for p in parameters])
    assert_same(*outcomes)
    assert counts["host_ops"] == 0
    assert counts["regions"] == counts["graphs"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_compiled_optimizer_steps(name: str) -> None:
    outcomes = []
    for is_compiled in (True, False):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = OPTIMIZERS[name](model.parameters())
        step: Any = optimizer.step
        if is_compiled:
            step = torch.compile(step, backend="npu_iree")
        for i in range(4):
            optimizer.zero_grad()
            model(data(3, 4, seed=i)).pow(2).sum().backward()
            step()
        outcomes.append([p.detach() for p in model.parameters()])
    assert_same(*outcomes)
