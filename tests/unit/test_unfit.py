"""What is said to be refused by eager, is refused by eager; and nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

from lowering.capabilities import load_capabilities
from lowering.dtypes import DTYPE_NAMES
from lowering.partition import why_host
from lowering.unfit import what_is_wrong, why_refused

aten = torch.ops.aten
_DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64)


def _is_refused(op: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    try:
        op(*args, **kwargs)
    except (RuntimeError, IndexError):
        return True
    return False


def _why_refused(op: Callable[..., Any], *args: Any) -> str | None:
    return why_refused(_node(op, *args))


def _node(op: Callable[..., Any], *args: Any) -> torch.fx.Node:
    graph = torch.fx.Graph()

    def placed(tensor: torch.Tensor) -> torch.fx.Node:
        node = graph.placeholder("x")
        node.meta["val"] = tensor
        return node

    return graph.call_function(op, tree_map_only(torch.Tensor, placed, args))


_ALL_DTYPES = (*DTYPE_NAMES,)
_IMAGES = {1: (1, 1, 4), 2: (1, 1, 4, 4), 3: (1, 1, 4, 4, 4)}
# Of one dtype, by op: sizes, and the other arguments.
_OF_ONE: dict[Any, tuple[tuple[int, ...], tuple[Any, ...]]] = {
    aten.celu.default: ((4,), ()),
    aten.elu.default: ((4,), ()),
    aten.frac.default: ((4,), ()),
    aten.glu.default: ((4,), ()),
    aten.hardshrink.default: ((4,), ()),
    aten.hardsigmoid.default: ((4,), ()),
    aten.hardswish.default: ((4,), ()),
    aten.log_sigmoid_forward.default: ((4,), ()),
    aten.max_pool2d_with_indices.default: (_IMAGES[2], ([2, 2],)),
    aten.max_pool3d_with_indices.default: (_IMAGES[3], ([2, 2, 2],)),
    aten.mish.default: ((4,), ()),
    aten.silu.default: ((4,), ()),
    aten.softplus.default: ((4,), ()),
    aten.threshold.default: ((4,), (0, 0)),
    aten.upsample_bicubic2d.default: (_IMAGES[2], ([8, 8], False)),
    aten.upsample_bilinear2d.default: (_IMAGES[2], ([8, 8], False)),
    aten.upsample_bilinear2d.vec: (_IMAGES[2], ([8, 8], False, None)),
    aten.upsample_linear1d.default: (_IMAGES[1], ([8], False)),
    aten.upsample_linear1d.vec: (_IMAGES[1], ([8], False, None)),
    aten.upsample_nearest1d.default: (_IMAGES[1], ([8],)),
    aten.upsample_nearest2d.default: (_IMAGES[2], ([8, 8],)),
    aten.upsample_nearest3d.default: (_IMAGES[3], ([8, 8, 8],)),
    aten.upsample_trilinear3d.default: (_IMAGES[3], ([8, 8, 8], False)),
}


@pytest.mark.parametrize("op", _OF_ONE, ids=str)
def test_numbers_that_an_op_has_no_kernel_for(op: Any) -> None:
    shape, others = _OF_ONE[op]
    for dtype in _ALL_DTYPES:
        call = (op, torch.ones(shape, dtype=dtype), *others)
        assert bool(_why_refused(*call)) == _is_refused(*call), dtype


@pytest.mark.parametrize(
    "op",
    [
        aten.huber_loss.default,
        aten.hypot.default,
        aten.linalg_cross.default,
        aten.mse_loss.default,
        aten.smooth_l1_loss.default,
    ],
    ids=str,
)
def test_two_tensors_that_an_op_has_no_kernel_for(op: Any) -> None:
    for dtypes in itertools.product(_ALL_DTYPES, repeat=2):
        call = (op, *(torch.ones(3, dtype=dtype) for dtype in dtypes))
        assert bool(_why_refused(*call)) == _is_refused(*call), dtypes


def test_weights_are_of_the_dtype_of_what_is_normalized_or_f32_of_halves() -> None:
    some = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)
    x, weight = torch.ones(2, 4), torch.ones(4)
    for dtype, *kinds in itertools.product((*some, torch.complex64), (None, *some), (None, *some)):
        weights = [None if kind is None else weight.to(kind) for kind in kinds]
        for call in (
            (aten.native_layer_norm.default, x.to(dtype), [4], *weights, 1e-5),
            (aten.native_group_norm.default, x.to(dtype), *weights, 2, 4, 1, 2, 1e-5),
        ):
            assert bool(_why_refused(*call)) == _is_refused(*call), (dtype, kinds)


_PRODUCTS: dict[Any, tuple[tuple[int, ...], ...]] = {
    aten.mm.default: ((2, 2), (2, 2)),
    aten.mv.default: ((2, 2), (2,)),
    aten.addmm.default: ((2,), (2, 2), (2, 2)),
    aten.addmv.default: ((2,), (2, 2), (2,)),
    aten.binary_cross_entropy.default: ((2,), (2,)),
    aten.grid_sampler_2d.default: ((1, 1, 2, 2), (1, 2, 2, 2)),
}
_MORE = {aten.grid_sampler_2d.default: (0, 0, False)}


@pytest.mark.parametrize("op", _PRODUCTS, ids=str)
def test_products_of_several_dtypes(op: Any) -> None:
    shapes = _PRODUCTS[op]
    for dtypes in itertools.product(_DTYPES, repeat=len(shapes)):
        args = [torch.ones(s, dtype=d) for s, d in zip(shapes, dtypes, strict=True)]
        args += _MORE.get(op, ())
        assert bool(_why_refused(op, *args)) == (len({*dtypes}) > 1), dtypes
        assert _is_refused(op, *args) or not _why_refused(op, *args), dtypes


_X = torch.ones(2, 4)
_INDEXED: dict[Any, Callable[[torch.Tensor], tuple[Any, ...]]] = {
    aten.index_add.default: lambda i: (_X, 0, i, _X),
    aten.index_copy.default: lambda i: (_X, 0, i, _X),
    aten.index_fill.int_Scalar: lambda i: (_X, 0, i, 1.0),
    aten.index_fill.int_Tensor: lambda i: (_X, 0, i, _X[0, 0]),
    aten.index_select.default: lambda i: (_X, 0, i),
    aten.nll_loss2d_forward.default: lambda i: (
        _X.view(1, 4, 1, 2),
        i.view(1, 1, 2),
        None,
        1,
        -100,
    ),
    aten.nll_loss_forward.default: lambda i: (_X, i, None, 1, -100),
}


@pytest.mark.parametrize("op", _INDEXED, ids=str)
def test_indices_that_say_no_place(op: Any) -> None:
    for dtype in (*_DTYPES, torch.int16, torch.uint8, torch.bool):
        args = _INDEXED[op](torch.zeros(2, dtype=dtype))
        assert bool(_why_refused(op, *args)) == _is_refused(op, *args), dtype


@pytest.mark.parametrize("op", [aten.index_add.default, aten.index_copy.default], ids=str)
def test_sources_of_another_dtype(op: Any) -> None:
    for dtype in _DTYPES:
        call = (op, _X, 0, torch.tensor([0, 1]), _X.to(dtype))
        assert bool(_why_refused(*call)) == _is_refused(*call), dtype


def test_samples_of_nothing_may_be_of_several_dtypes() -> None:
    call = (aten.grid_sampler_2d.default, _X.view(1, 1, 2, 4), torch.ones(1, 0, 2, 2).double())
    assert not _is_refused(*call, 0, 0, False)
    assert not _why_refused(*call, 0, 0, False)


@pytest.mark.parametrize("op", [aten._softmax.default, aten._log_softmax.default], ids=str)
def test_halves_that_become_floats_on_the_way(op: Any) -> None:
    for is_asked in (False, True):
        call = (op, _X.half(), -1, is_asked)
        assert bool(_why_refused(*call)) == _is_refused(*call) == is_asked


@pytest.mark.parametrize("op", [aten.sort.default, aten._softmax.default], ids=str)
def test_dimensions_that_are_not_there(op: Any) -> None:
    for x, dim in itertools.product((torch.ones(3, 4), torch.tensor(1.0)), range(-4, 4)):
        call = (op, x, dim, False)
        assert bool(_why_refused(*call)) == _is_refused(*call), dim


@pytest.mark.parametrize("op", [aten.max.default, aten.min.default], ids=str)
def test_the_largest_of_no_elements(op: Any) -> None:
    for size in (2, 1, 0):
        call = (op, _X[:size])
        assert bool(_why_refused(*call)) == _is_refused(*call) == (not size)


@pytest.mark.parametrize("op", [aten.add, aten.sub, aten.rsub], ids=str)
def test_truths_are_not_subtracted_and_multiply_truths_alone(op: Any) -> None:
    for x, y in itertools.product((_X, _X.long(), _X > 0), (2, True, _X, _X > 0)):
        overload = op.Tensor if isinstance(y, torch.Tensor) else op.Scalar
        assert bool(_why_refused(overload, x, y)) == _is_refused(overload, x, y), (x, y)
        wrong = what_is_wrong(overload, (x, y), {"alpha": True})
        assert bool(wrong) == _is_refused(overload, x, y, alpha=True), (x, y)


_OF_PAIRS: list[tuple[Any, dict[str, Any]]] = [
    (aten.heaviside.default, {}),
    (aten.hypot.default, {}),
    (aten.ldexp.Tensor, {}),
    (aten.logaddexp.default, {}),
    (aten.logaddexp2.default, {}),
    *((aten.div.Tensor_mode, {"rounding_mode": mode}) for mode in (None, "trunc", "floor")),
]


@pytest.mark.parametrize(("op", "options"), _OF_PAIRS, ids=str)
def test_pairs_of_dtypes_that_an_op_has_no_kernel_for(op: Any, options: dict[str, Any]) -> None:
    sides = [torch.ones(2, dtype=dtype) for dtype in (torch.bool, *_DTYPES)]
    sides += [sides[0][0], sides[1].half()]
    for call in itertools.product(sides, repeat=2):
        assert bool(what_is_wrong(op, call, options)) == _is_refused(op, *call, **options), call


def test_truths_are_divided_by_no_truth() -> None:
    for y, mode in itertools.product((True, 2, 0.5), ("trunc", "floor", None)):
        call = (aten.div.Scalar_mode, _X > 0, y)
        wrong = what_is_wrong(call[0], call[1:], {"rounding_mode": mode})
        assert bool(wrong) == _is_refused(*call, rounding_mode=mode), (y, mode)


def test_products_of_truths() -> None:
    for dtype, size in itertools.product((torch.bool, *_DTYPES), (0, 2)):
        x = torch.ones(3, size, dtype=dtype)
        for call in (
            (aten.dot.default, x[0], x[0]),
            (aten.vdot.default, x[0], x[0]),
            (aten.mv.default, x, x[0]),
            (aten.addmv.default, x.new_ones(3), x, x[0]),
        ):
            assert bool(_why_refused(*call)) == _is_refused(*call), call


def test_a_beta_below_zero() -> None:
    for beta in (0.0, 0.5, -0.5):
        call = (aten.smooth_l1_loss.default, torch.ones(3), torch.ones(3), 1, beta)
        assert bool(_why_refused(*call)) == _is_refused(*call), beta


def test_values_that_do_not_fit_where_indices_say() -> None:
    x, i = torch.ones(2, 3, 4), torch.tensor([0, 1])
    every = list[torch.Tensor | None]
    indices: list[every] = [
        [i],
        [None, i],
        [i, None, i],
        [i, i[:, None]],
        [i, i, i, i],
        [None, None],
        [i.float()],
    ]
    indices += [
        [i, torch.tensor([0, 1, 0])],
        [torch.ones(2, dtype=torch.bool)],
        [i.to(torch.int32)],
    ]
    shapes = ((), (2,), (1, 3, 4), (2, 3, 4), (2, 2, 4), (2, 4, 2), (2, 3), (4,), (3, 4), (1,) * 4)
    for where, shape, dtype in itertools.product(indices, shapes, _DTYPES[:2]):
        call = (aten.index_put.default, x, where, torch.ones(shape, dtype=dtype))
        if where[0] is not None and where[0].dtype is torch.bool:
            assert not _why_refused(*call), "how many places there are is not known"
        else:
            assert bool(_why_refused(*call)) == _is_refused(*call), (where, shape, dtype)


def test_that_an_index_is_of_truths_is_said() -> None:
    x = torch.ones(3)
    node = _node(aten.index_put.default, x, [x > 0], x)
    node.meta["val"] = x
    (host_op,) = why_host([node], load_capabilities("npu-local.toml")).values()
    assert "an index of truths" in host_op.reason


@pytest.mark.parametrize("mask", [torch.bool, torch.uint8, torch.int64])
def test_masks_are_of_truths(mask: torch.dtype) -> None:
    args = aten.masked_scatter.default, _X, (_X > 0).to(mask), _X
    assert bool(_why_refused(*args)) == _is_refused(*args)


@pytest.mark.parametrize("shape", [(), (4,), (2, 2), (0,)])
def test_boundaries_are_a_vector(shape: tuple[int, ...]) -> None:
    args = aten.bucketize.Tensor, _X, torch.ones(shape)
    assert bool(_why_refused(*args)) == _is_refused(*args)
