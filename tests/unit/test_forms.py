"""Ops in other words: with numbers that are tensors they compute what PyTorch does with numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from npu_iree.torch_device.calls import functional_of
from npu_iree.torch_device.forms import FORMS
from tolerances import assert_same

aten = torch.ops.aten
X = torch.linspace(-2, 3, 24).view(4, 6)
INTEGERS = torch.arange(24).view(4, 6)
ROWS = torch.tensor([[0, 1, 2, 0, 3, 1]])
CASES: list[tuple[Any, tuple[Any, ...], dict[str, float]]] = [
    (aten.scatter.value, (X, 0, ROWS), {"value": 0.1}),
    (aten.scatter.value, (INTEGERS, 0, ROWS), {"value": 1.7}),
    (aten.index_fill.int_Scalar, (X, 0, ROWS[0]), {"value": 0.1}),
    (aten.constant_pad_nd.default, (X, [1, 2, -1, 1]), {"value": float("inf")}),
    (aten.constant_pad_nd.default, (INTEGERS, [0, 1]), {"value": 7}),
    (aten.triu.default, (X,), {"diagonal": 2}),
    (aten.tril.default, (X > 0,), {"diagonal": -1}),
    (aten.pow.Tensor_Scalar, (X,), {"exponent": 1.3}),
    (aten.leaky_relu.default, (X,), {"negative_slope": 0.3}),
    (aten.leaky_relu.default, (X.bfloat16(),), {"negative_slope": 0.3}),
    (aten.leaky_relu_backward.default, (X, X - 1), {"negative_slope": 0.3}),
    (aten.addmm.default, (X[0, :4], X, X.t()), {"beta": 0.3, "alpha": 1.7}),
    (aten.addmm.default, (INTEGERS[:, :4], INTEGERS, INTEGERS.t()), {"beta": 2}),
    (aten.addmm.default, (X[:, :4].half(), X.half(), X.t().half()), {"beta": 1e5, "alpha": 0.1}),
    (aten.addmv.default, (X[:, 0], X, X[0]), {"alpha": 0.3}),
    (aten.baddbmm.default, (X[None, :, :4], X[None], X.t()[None]), {"beta": 0.3}),
]
REST = {aten.leaky_relu_backward.default: {"self_is_result": False}}
IDS = [f"{op}-{args[0].dtype}-{[*numbers]}" for op, args, numbers in CASES]


@pytest.mark.parametrize(("op", "args", "numbers"), CASES, ids=IDS)
def test_a_number_may_be_a_tensor(op: Any, args: tuple[Any, ...], numbers: dict[str, Any]) -> None:
    form = FORMS[op]
    assert all(name in form.numbers and form.travels(v) for name, v in numbers.items())
    real = torch.float64 if form.keeps_digits else torch.float32
    tensors = {
        name: torch.tensor(v, dtype=real if isinstance(v, float) else torch.int64)
        for name, v in numbers.items()
    }
    result, expected = form.function(*args, **tensors), op(*args, **numbers, **REST.get(op, {}))
    torch.testing.assert_close(result, expected, equal_nan=True)


@pytest.mark.parametrize("alpha", [0, 0.0, 1, 2])
@pytest.mark.parametrize("beta", [0, 1, torch.tensor(0.5)])
def test_what_is_weighed_by_nothing_is_left_out_but_looked_at(alpha: float, beta: Any) -> None:
    weighed, weights = FORMS[aten.addmm.default].function, {"beta": beta, "alpha": alpha}
    x = X[:, :4] if beta else torch.full((4, 4), float("inf"))
    one = X if alpha else torch.full((4, 6), float("inf"))
    expected = torch.addmm(x, one, X.t(), beta=float(beta), alpha=alpha)
    torch.testing.assert_close(weighed(x, one, X.t(), **weights), expected)
    with pytest.raises(RuntimeError, match="size"):
        weighed(x[:, :2], one, X.t(), **weights)


def test_a_backward_pass_of_a_negative_slope_wants_what_was_there() -> None:
    backward = FORMS[aten.leaky_relu_backward.default].function
    with pytest.raises(TypeError, match="sign"):
        backward(X, X, -0.3, True)
    torch.testing.assert_close(backward(X, X, 0.3, True), backward(X, X, 0.3, False))


KEPT = [
    (aten.constant_pad_nd.default, 0.0),
    (aten.addmm.default, 0),
    (aten.addmm.default, 1.0),
    (aten.pow.Tensor_Scalar, 3),
    (aten.pow.Tensor_Scalar, 2.0),
    (aten.pow.Tensor_Scalar, -0.5),
    (aten.leaky_relu_backward.default, -0.1),
]


@pytest.mark.parametrize(("op", "number"), KEPT, ids=str)
def test_a_number_of_another_meaning_or_speed_is_compiled_in(op: Any, number: float) -> None:
    assert not FORMS[op].travels(number)


ONES, WEIGHT = torch.ones(6), torch.linspace(1, 2, 6)
NORMS: dict[Any, tuple[Any, ...]] = {
    aten._native_batch_norm_legit.no_stats: (WEIGHT, None, True, 0.1, 1e-5),
    aten._native_batch_norm_legit_functional.default: (WEIGHT, None, ONES, ONES, True, 0.1, 1e-5),
    aten._native_batch_norm_legit_no_training.default: (WEIGHT, None, ONES, ONES, 0.1, 1e-5),
    aten.native_group_norm.default: (WEIGHT, None, 4, 6, 5, 2, 1e-5),
    aten.native_layer_norm.default: ([6], WEIGHT, None, 1e-5),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", NORMS, ids=str)
def test_norms_of_halves_give_statistics_in_the_floats_of_their_weights(
    op: Any, dtype: torch.dtype
) -> None:
    x = torch.linspace(-2, 5, 120, dtype=dtype).view(4, 5, 6)
    x = x if op is aten.native_layer_norm.default else x.mT.contiguous()
    results, expected = (f(x, *NORMS[op]) for f in (FORMS[op].function, op))
    for one, other in zip(results, expected, strict=True):
        if other.numel():
            assert_same(one, other)


def test_what_writes_to_its_argument_by_a_name_of_pythons_computes_what_another_op_does() -> None:
    assert functional_of(aten.__ilshift__.Tensor) is aten.__lshift__.Tensor
    assert functional_of(aten.__irshift__.Scalar) is aten.__rshift__.Scalar
