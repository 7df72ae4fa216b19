"""Arguments that make a call one for the host: eager refuses them, or one is a mask for an index.

PyTorch's fake kernels take such calls, and compilers stumble over them. As a host op, the call is
PyTorch's own error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from lowering.dtypes import dtype_name
from lowering.sizes import is_static

aten = torch.ops.aten
_MASKS = (torch.bool, torch.uint8)
_PLACES = (torch.int32, torch.int64)
_HALVES = (torch.float16, torch.bfloat16)
_COMPLEX = (torch.complex64, torch.complex128)
_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
_WHOLE = (torch.bool, torch.uint8, *_SIGNED)
# What is wrong with the arguments of a call, without and with names; nothing if it is right.
_Rule = Callable[[Sequence[Any], Mapping[str, Any]], str]


def why_refused(node: fx.Node) -> str | None:
    """Return why eager refuses a call, if PyTorch's fake kernels would not say so; or None.

    Args:
        node: a call of an ATen op; its arguments have values.
    """
    wrong = what_is_wrong(node.target, *_given(node)) if node.target in _REFUSED else ""
    return f"{wrong}: eager raises an error" if wrong else None


def what_is_wrong(op: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return what eager refuses of arguments that PyTorch's fake kernels take; empty if nothing."""
    return _REFUSED[op](args, kwargs) if op in _REFUSED else ""


def with_refused(table: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """Leave calls that eager refuses whole, whose decompositions would compute something.

    Args:
        table: decompositions, by op.

    Returns:
        What takes the place of some of them.
    """
    return {op: _unless(rule, table[op]) for op, rule in _REFUSED.items() if op in table}


def _unless(rule: _Rule, decomposition: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(decomposition)
    def decomposed(*args: Any, **kwargs: Any) -> Any:
        return NotImplemented if rule(args, kwargs) else decomposition(*args, **kwargs)

    return decomposed


def masks_of(node: fx.Node) -> list[torch.Tensor]:
    """Return the indices of `aten.index_put` that are truths, and no places."""
    if node.target is not aten.index_put.default:
        return []
    (_, indices, *_), _ = _given(node)
    return [i for i in indices if i is not None and i.dtype in _MASKS]


def _unfit_to_put(args: Sequence[Any], _: Mapping[str, Any]) -> str:
    x, indices, values = args[:3]
    given = [i for i in indices if i is not None]
    if any(i.dtype in _MASKS for i in given):  # how many places there are is not known
        return ""
    if wrong := _no_places(given, _PLACES):
        return wrong
    if values.dtype != x.dtype:
        return f"with values of {dtype_name(values.dtype)} for {dtype_name(x.dtype)}"
    if is_static(x, values, *given) and not _fit(x, indices, values):
        return f"with values of {list(values.shape)}, which do not fit in where the indices say"
    return ""


def _fit(x: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor) -> bool:
    """Say whether the indices go together, and values can be expanded to what they select."""
    found = {d: i.shape for d, i in enumerate(indices) if i is not None}
    if len(indices) > x.dim() or not found:
        return False
    try:
        shape = torch.broadcast_shapes(*found.values())  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
    are_adjacent = max(found) - min(found) < len(found)
    rest = [size for d, size in enumerate(x.shape) if d not in found]
    at = min(found) if are_adjacent else 0  # indices that are not side by side come first
    places = [*rest[:at], *shape, *rest[at:]]
    pairs = zip(reversed(values.shape), reversed(places), strict=False)
    return values.dim() <= len(places) and all(size in (1, place) for size, place in pairs)


def _of_several_dtypes(args: Sequence[Any], _: Mapping[str, Any]) -> str:
    dtypes = dict.fromkeys(a.dtype for a in args if isinstance(a, torch.Tensor))
    return f"on tensors of {' and '.join(map(dtype_name, dtypes))}" if len(dtypes) > 1 else ""


def _no_elements(args: Sequence[Any], _: Mapping[str, Any]) -> str:
    return "on tensors without elements" if is_static(args[0]) and not args[0].numel() else ""


def _no_places(indices: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> str:
    wrong = [i.dtype for i in indices if i.dtype not in dtypes]
    return f"with an index of {dtype_name(wrong[0])}" if wrong else ""


def _of_two_dtypes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    return _of_several_dtypes(args[:2], kwargs)


def _unfit_to_sample(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    has_elements = is_static(*args[:2]) and all(x.numel() for x in args[:2])
    return _of_two_dtypes(args, kwargs) if has_elements else ""


def _unfit_for_softmax(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    if kwargs.get("half_to_float") or any(args[2:]):
        return f"from {dtype_name(args[0].dtype)} to f32"
    return _no_such_dimension(args, kwargs)


def _unfit_to_add(*dtypes: torch.dtype) -> _Rule:
    """Return what looks at an index, and whether the source is of the dtype of what it goes to."""
    by_index = _index_of(*dtypes, at=2)
    return lambda args, kwargs: by_index(args, kwargs) or _of_two_dtypes(args[::3], kwargs)


def _index_of(*dtypes: torch.dtype, at: int) -> _Rule:
    return lambda args, _: _no_places(args[at : at + 1], dtypes)


def _no_such_dimension(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    x, dim = args[0], kwargs.get("dim", args[1] if len(args) > 1 else -1)
    rank = max(1, x.dim())
    return "" if -rank <= dim < rank else f"along dimension {dim} of {x.dim()}"


def _no_mask(args: Sequence[Any], _: Mapping[str, Any]) -> str:
    dtype = args[1].dtype
    return "" if dtype is torch.bool else f"with a mask of {dtype_name(dtype)}"


def _no_vector_of_boundaries(args: Sequence[Any], _: Mapping[str, Any]) -> str:
    return "" if args[1].dim() == 1 else f"with boundaries of {list(args[1].shape)}"


def _negative_beta(args: Sequence[Any], _: Mapping[str, Any]) -> str:
    beta = args[3] if len(args) > 3 else 1.0
    return f"with a beta of {beta}" if beta < 0 else ""


def _truth_as_factor(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    alpha = kwargs.get("alpha", args[2] if len(args) > 2 else 1)
    is_fit = type(alpha) is not bool or all(map(_is_truth, args[:2]))
    return "" if is_fit else f"with an alpha of {alpha}"


def _unfit_to_subtract(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    return "on truths" if any(map(_is_truth, args[:2])) else _truth_as_factor(args, kwargs)


def _on(*dtypes: torch.dtype, count: int = 1) -> _Rule:
    """Return what looks at the dtype that the first arguments, so many, are computed in."""

    def rule(args: Sequence[Any], _: Mapping[str, Any]) -> str:
        dtype = torch.result_type(args[0], args[count - 1])
        return f"on numbers of {dtype_name(dtype)}" if dtype in dtypes else ""

    return rule


_on_no_floats = _on(*_WHOLE, *_COMPLEX)
_on_no_floats_but_bytes = _on(torch.bool, *_SIGNED, *_COMPLEX)
_on_truths_or_complex = _on(torch.bool, *_COMPLEX)
_on_whole_numbers = _on(*_WHOLE, count=2)
_of_two_on_no_floats = _on(*_WHOLE, *_COMPLEX, count=2)


def _unfit_for_huber(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Look at a loss that is of the first argument's dtype, whatever it is computed in."""
    return _on_no_floats(args, kwargs) or _of_two_on_no_floats(args, kwargs)


def _unfit_for_smooth_l1(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    return _of_two_on_no_floats(args, kwargs) or _negative_beta(args, kwargs)


def _unfit_to_cross(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    return _of_two_dtypes(args, kwargs) or _of_truths(args, kwargs)


def _unfit_to_normalize(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Look at weights: they are of the dtype of what is normalized; of halves, they may be f32."""
    x, *weights = (a.dtype for a in args if isinstance(a, torch.Tensor))
    fit = (x, torch.float32) if x in _HALVES else (x,)
    if len({*weights}) > 1 or not all(weight in fit for weight in weights):
        return f"of {dtype_name(x)} with weights of {' and '.join(map(dtype_name, weights))}"
    return _on_no_floats(args, kwargs)


def _of_truths(args: Sequence[Any], _: Mapping[str, Any]) -> str:
    return "on truths" if all(map(_is_truth, args[:2])) else ""


def _unfit_to_divide(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    return _of_truths(args, kwargs) if kwargs.get("rounding_mode") else ""


def _truths_as_exponents(args: Sequence[Any], _: Mapping[str, Any]) -> str:
    x, exponent = args
    return "with truths as exponents" if x.is_floating_point() and _is_truth(exponent) else ""


def _unfit_for_vectors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Look at a product of a matrix and a vector, which come last: of no truths there is one."""
    is_empty = bool(_no_elements(args[-2:], kwargs))
    return _of_several_dtypes(args, kwargs) or ("" if is_empty else _of_truths(args, kwargs))


def _is_truth(value: Any) -> bool:
    return type(value) is bool or (isinstance(value, torch.Tensor) and value.dtype is torch.bool)


def _given(node: fx.Node) -> tuple[Any, Any]:
    """Return the arguments of a call: values in the place of the nodes that give them."""
    return fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta.get("val"))


# What eager refuses and PyTorch's fake kernels do not, by op: says what is wrong, or nothing.
_REFUSED: dict[Any, _Rule] = {
    aten._index_put_impl.default: _unfit_to_put,
    aten._log_softmax.default: _unfit_for_softmax,
    aten._prelu_kernel.default: _on_no_floats,
    aten._softmax.default: _unfit_for_softmax,
    aten.add.Scalar: _truth_as_factor,
    aten.add.Tensor: _truth_as_factor,
    aten.addmm.default: _of_several_dtypes,
    aten.addmv.default: _unfit_for_vectors,
    aten.binary_cross_entropy.default: _of_two_dtypes,
    aten.bucketize.Tensor: _no_vector_of_boundaries,
    aten.celu.default: _on_no_floats,
    aten.div.Scalar_mode: _unfit_to_divide,
    aten.div.Tensor_mode: _unfit_to_divide,
    aten.dot.default: _of_truths,
    aten.elu.default: _on_no_floats,
    aten.frac.default: _on_no_floats,
    aten.glu.default: _on_no_floats,
    aten.grid_sampler_2d.default: _unfit_to_sample,
    aten.hardshrink.default: _on_no_floats,
    aten.hardsigmoid.default: _on_no_floats,
    aten.hardswish.default: _on_no_floats,
    aten.heaviside.default: _of_two_dtypes,
    aten.huber_loss.default: _unfit_for_huber,
    aten.hypot.default: _of_two_on_no_floats,
    aten.index_add.default: _unfit_to_add(*_PLACES),
    aten.index_copy.default: _unfit_to_add(torch.int64),
    aten.index_fill.int_Scalar: _index_of(torch.int64, at=2),
    aten.index_fill.int_Tensor: _index_of(torch.int64, at=2),
    aten.index_put.default: _unfit_to_put,
    aten.index_select.default: _index_of(*_PLACES, at=2),
    aten.ldexp.Tensor: _truths_as_exponents,
    aten.linalg_cross.default: _unfit_to_cross,
    aten.log_sigmoid_forward.default: _on_no_floats,
    aten.logaddexp.default: _on_whole_numbers,
    aten.logaddexp2.default: _on_whole_numbers,
    aten.masked_scatter.default: _no_mask,
    aten.max.default: _no_elements,
    aten.max_pool2d_with_indices.default: _on_truths_or_complex,
    aten.max_pool3d_with_indices.default: _on_truths_or_complex,
    aten.min.default: _no_elements,
    aten.mish.default: _on_no_floats,
    aten.mm.default: _of_several_dtypes,
    aten.mse_loss.default: _of_two_on_no_floats,
    aten.mv.default: _unfit_for_vectors,
    aten.native_group_norm.default: _unfit_to_normalize,
    aten.native_layer_norm.default: _unfit_to_normalize,
    aten.nll_loss2d_forward.default: _index_of(torch.int64, at=1),
    aten.nll_loss_forward.default: _index_of(torch.int64, torch.uint8, at=1),
    aten.rsub.Scalar: _unfit_to_subtract,
    aten.rsub.Tensor: _unfit_to_subtract,
    aten.silu.default: _on(*_WHOLE),
    aten.smooth_l1_loss.default: _unfit_for_smooth_l1,
    aten.softplus.default: _on_no_floats,
    aten.sort.default: _no_such_dimension,
    aten.sort.stable: _no_such_dimension,
    aten.sub.Scalar: _unfit_to_subtract,
    aten.sub.Tensor: _unfit_to_subtract,
    aten.threshold.default: _on_truths_or_complex,
    aten.upsample_bicubic2d.default: _on_no_floats_but_bytes,
    aten.upsample_bicubic2d.vec: _on_no_floats_but_bytes,
    aten.upsample_bilinear2d.default: _on_no_floats_but_bytes,
    aten.upsample_bilinear2d.vec: _on_no_floats_but_bytes,
    aten.upsample_linear1d.default: _on_no_floats,
    aten.upsample_linear1d.vec: _on_no_floats,
    aten.upsample_nearest1d.default: _on_no_floats_but_bytes,
    aten.upsample_nearest1d.vec: _on_no_floats_but_bytes,
    aten.upsample_nearest2d.default: _on_no_floats_but_bytes,
    aten.upsample_nearest2d.vec: _on_no_floats_but_bytes,
    aten.upsample_nearest3d.default: _on_no_floats_but_bytes,
    aten.upsample_nearest3d.vec: _on_no_floats_but_bytes,
    aten.upsample_trilinear3d.default: _on_no_floats,
    aten.upsample_trilinear3d.vec: _on_no_floats,
    aten.vdot.default: _of_truths,
}
