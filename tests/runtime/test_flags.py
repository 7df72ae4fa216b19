"""The best set of flags is taken: where the compiler refuses it, speed is lost."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F

from npu_iree import DeviceError, TargetError, open_device
from npu_iree.executable import Executable
from npu_iree.runner import Runner
from npu_iree.targets import NPU_LOCAL

pytestmark = pytest.mark.usefixtures("shared_cache")

Program = tuple[Callable[..., torch.Tensor], tuple[tuple[int, ...], ...]]


def low_rank(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, r: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    return F.linear(F.linear(x, w, b) + r, down)


def split_rows(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w).unflatten(0, (-1, 13)) @ y


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=m)


def nanogpt(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    is_seen = torch.ones(17, 17).tril().bool().logical_or(m)[None, None]
    return (q @ k.mT).masked_fill(is_seen == 0, float("-inf")).softmax(-1) @ v


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (4, -1)).transpose(1, 2)


def attention_of_heads(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = F.scaled_dot_product_attention(heads(F.linear(x, w)), heads(x), heads(x * 2))
    return F.linear(y.transpose(1, 2).flatten(-2), w)


def part_of_a_cache(q: torch.Tensor, k: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    return (q @ k[:, :, : m.shape[0]].mT) * m


def chosen(x: torch.Tensor, w: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    return torch.where(m, x @ w, 0.0)


def steps_of(x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    for i, other in enumerate(others):
        x = torch.tanh(x) * 0.5 + other * (i + 1)
    return x


def steps_with_sums(x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    return steps_of(x, *(other.sum(-1, keepdim=True) for other in others)) + x


def shares_of_distances(x: torch.Tensor) -> torch.Tensor:
    far = x - x.mean(0)
    products = far.t() @ x
    return (products.abs() / products.abs().sum(1, keepdim=True)) @ far.t()


def few_features(x: torch.Tensor, w: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    return F.conv2d(F.conv2d(x, w, padding=1).relu(), last)


HEADS = ((2, 4, 17, 16),) * 3
PROGRAMS: dict[str, Program] = {
    "one row": (lambda x, w: F.linear(x.expand(2, 32), w), ((1, 32), (32, 32))),
    "one token": (
        lambda x, w: F.linear(x.repeat_interleave(6, 0), w),
        ((1, 1, 32), (32, 32)),
    ),
    "one place of an image": (
        lambda x, w: F.conv2d(x.expand(2, 8, 6, 6), w),
        ((2, 8, 1, 1), (16, 8, 1, 1)),
    ),
    "one row of all matrices": (
        lambda x, w: x.expand(2, 5, 32) @ w,
        ((1, 1, 32), (2, 32, 8)),
    ),
    "low rank": (low_rank, ((768, 256), (64, 256), (64,), (768, 64), (16, 64))),
    "low rank of many": (low_rank, ((256, 64), (128, 64), (128,), (256, 128), (8, 128))),
    "one mask for all heads": (attention, (*HEADS, (17, 17))),
    "a mask for each text": (attention, (*HEADS, (2, 1, 1, 17))),
    "one query and a mask": (attention, ((2, 4, 1, 64), (2, 4, 77, 64), (2, 4, 77, 64), (1, 77))),
    "a mask that is filled in": (nanogpt, (*HEADS, (17, 17))),
    "a mask of a product": (chosen, ((64, 32), (32, 48), (64, 48))),
    "part of a cache": (part_of_a_cache, ((2, 4, 17, 16), (2, 4, 50, 16), (40,))),
    "heads that are computed": (attention_of_heads, ((2, 136, 64), (64, 64))),
    "80 tensors": (steps_of, ((8, 16),) * 80),
    "sums of 40 tensors": (steps_with_sums, ((8, 16),) * 40),
    "sums of rows and columns": (shares_of_distances, ((19, 24),)),
    "few features of two images": (few_features, ((2, 8, 64, 64), (32, 8, 3, 3), (3, 32, 1, 1))),
    "split rows": (split_rows, ((26, 16), (32, 16), (2, 32, 8))),
}


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_first_set_of_flags_is_taken(name: str, dynamic: bool, counts: Counter[str]) -> None:
    function, shapes = PROGRAMS[name]
    args = [torch.randn(shape) for shape in shapes]
    if "mask" in name:
        args[-1] = args[-1] > -1
    found = torch.compile(function, backend="npu_iree", dynamic=dynamic)(*args)
    torch.testing.assert_close(found, function(*args), rtol=1e-4, atol=1e-4)
    assert (counts["refused_flags"], counts["host_ops"], counts["regions"]) == (0, 0, 1)


def test_the_first_set_of_flags_is_taken_for_one_text_of_any_length(counts: Counter[str]) -> None:
    args = torch.randn(1, 136, 64), torch.randn(64, 64)
    torch._dynamo.mark_dynamic(args[0], 1)
    found = torch.compile(attention_of_heads, backend="npu_iree")(*args)
    torch.testing.assert_close(found, attention_of_heads(*args), rtol=1e-4, atol=1e-4)
    assert (counts["refused_flags"], counts["host_ops"]) == (0, 0)


def first_token(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.linear(x[:, 0], w).tanh()


def gelu(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = F.linear(x, w, b)
    return 0.5 * y * (1 + torch.tanh(0.79788456 * (y + 0.044715 * y**3)))


def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    q, k, v = (heads(F.linear(x, part)) for part in w.chunk(3))
    y = (q @ k.mT * 0.25).softmax(-1) @ v
    return y.transpose(1, 2).flatten(-2)


def turned(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Of angles and their product; which angles are large is a mask that the gradient keeps."""
    return (x @ w).sum() + (x.sin() * 2).sum() * w.cos().sum()


GRADIENTS: dict[str, Program] = {
    "turned": (turned, ((3, 4), (4, 2))),
    "first token": (first_token, ((2, 136, 64), (64, 64))),
    "gelu": (gelu, ((2, 136, 64), (144, 64), (144,))),
    "attention": (layer, ((2, 136, 64), (192, 64))),
}


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.sweep)])
def test_the_first_set_of_flags_is_taken_for_gradients(dynamic: bool, counts: Counter[str]) -> None:
    def every(given: dict[str, list[torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {name: function(*given[name]) for name, (function, _) in GRADIENTS.items()}

    given = {
        name: [torch.randn(shape, requires_grad=True) for shape in shapes]
        for name, (_, shapes) in GRADIENTS.items()
    }
    compiled = torch.compile(every, backend="npu_iree", dynamic=dynamic)
    losses = [sum(y.sin().sum() for y in f(given).values()) for f in (compiled, every)]
    leaves = [x for args in given.values() for x in args]
    grads = [torch.autograd.grad(loss, leaves) for loss in losses]
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-3)
    assert counts["refused_flags"] == 0


def test_code_that_the_device_cannot_load_is_told_with_the_flags_that_made_it(
    compile_function: Callable[..., Runner],
) -> None:
    runner = compile_function(torch.relu, torch.ones(3))
    ((name, executable),) = runner.executables.items()
    spoilt = executable.artifact.vmfb.replace(b"\x7fELF", b"none")
    told = f"(?s)^{re.escape(name)} failed.*'npu-local' cannot load it.*ELF.*flags.*local-task"
    with pytest.raises(DeviceError, match=told):
        Executable(open_device(), replace(executable.artifact, vmfb=spoilt))


def test_a_device_that_is_not_there_is_told_before_anything_is_compiled(
    compile_function: Callable[..., Runner],
    counts: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compile_ = replace(NPU_LOCAL.compile, name="absent")
    absent = replace(NPU_LOCAL, compile=compile_, driver="nosuch")
    table = import_module("npu_iree.targets")  # `npu_iree.targets` is the function
    monkeypatch.setattr(table, "targets", lambda: {"absent": absent})
    with pytest.raises(TargetError, match="no driver 'nosuch'"):
        compile_function(torch.relu, torch.ones(3), target="absent")
    assert not counts
