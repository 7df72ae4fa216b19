"""An artifact, or a bundle, against the eager model that it was made from."""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from npu_iree.errors import FOREIGN, SourceError, VerificationError
from npu_iree.offline.arguments import is_same_constant
from npu_iree.offline.load import load
from npu_iree.offline.sources import Example, load_examples
from npu_iree.tolerances import largest_difference, tolerance


def verify_artifact(sources: Sequence[str], path: Path) -> float:
    """Run each entry point with the example inputs of its source.

    Returns:
        The largest difference, relative to the largest value of its tensor.

    Raises:
        VerificationError: a result is not eager's.
        SourceError: there are no example inputs, or eager fails at them.
    """
    worst = 0.0
    for source in sources:
        for name, example in load_examples(source).items():
            worst = max(worst, _compare(name, example, load(path)[name]))
    return worst


def _compare(name: str, example: Example, function: Any) -> float:
    expected, arguments = call_eager(name, example)
    args, kwargs = copied((example.args, example.kwargs))
    actual = function(*args, **kwargs)
    return compare_results(name, (actual, (args, kwargs)), (expected, arguments))


def call_eager(name: str, example: Example) -> tuple[Any, Any]:
    """Call a copy of an example's model; return its result, and what it makes of the arguments.

    Raises:
        SourceError: it fails.
    """
    args, kwargs = copied((example.args, example.kwargs))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PyTorch warns of what it does itself
        try:
            model = copy.deepcopy(example.model)  # its state, like the artifact's, is as exported
            return model(*args, **kwargs), (args, kwargs)
        except FOREIGN as error:
            raise SourceError(f"eager fails at the example inputs of {name!r}: {error}") from error


def compare_results(name: str, actual: tuple[Any, Any], expected: tuple[Any, Any]) -> float:
    """Compare what calls have given, and what they have made of their arguments.

    Args:
        name: of the entry point.
        actual: the result and the arguments.
        expected: the same of eager.

    Returns:
        The largest difference, relative to the largest value of its tensor.

    Raises:
        VerificationError: they differ by more than the tolerance of their dtype, or in anything
            else.
    """
    worst = 0.0
    for what, one, other in zip(("result", "argument"), actual, expected, strict=True):
        leaves, structure = pytree.tree_flatten(one)
        wanted, its_structure = pytree.tree_flatten(other)
        if not _is_same_structure(structure, its_structure):
            raise VerificationError(
                f"{name}: its {what}s are {structure}, and eager's are {its_structure}"
            )
        for i, pair in enumerate(zip(leaves, wanted, strict=True)):
            worst = max(worst, _difference(f"{name}: {what} {i}", *pair))
    return worst


def copied(tree: Any) -> Any:
    """Copy all tensors of a structure."""
    return pytree.tree_map_only(torch.Tensor, torch.clone, tree)


def _difference(place: str, actual: Any, expected: Any) -> float:
    if not isinstance(actual, torch.Tensor) or not isinstance(expected, torch.Tensor):
        if not is_same_constant(actual, expected):
            raise VerificationError(f"{place} is {actual!r}, and eager's is {expected!r}")
        return 0.0
    rtol, atol = tolerance(expected.dtype)
    is_alike = (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    try:
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError as error:
        if not (is_alike and largest_difference(actual, expected) <= rtol):  # it may be NaN
            raise VerificationError(f"{place} is not eager's: {error}") from error
    return largest_difference(actual, expected)


def _is_same_structure(one: pytree.TreeSpec, other: pytree.TreeSpec) -> bool:
    """Say whether two structures are the same; an artifact makes a dict of a defaultdict."""
    children = zip(one.children(), other.children(), strict=False)
    return (
        _kind(one) == _kind(other)
        and one.num_children == other.num_children
        and all(_is_same_structure(*pair) for pair in children)
    )


def _kind(structure: pytree.TreeSpec) -> tuple[Any, Any]:
    if structure.type is defaultdict:
        return dict, structure.context[1]
    return structure.type, structure.context
