"""An artifact, or a bundle, against the eager model that it was made from."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from npu_iree.errors import VerificationError
from npu_iree.offline.load import load
from npu_iree.offline.sources import Example, load_examples
from npu_iree.tolerances import largest_difference, tolerance


def verify_artifact(sources: Sequence[str], path: Path) -> float:
    """Run each entry point with the example inputs of its source.

    Returns:
        The largest difference, relative to the largest value of its tensor.

    Raises:
        VerificationError: a result is not eager's, or there are no example inputs.
    """
    worst = 0.0
    for source in sources:
        for name, example in load_examples(source).items():
            worst = max(worst, _compare(name, example, load(path)[name]))
    return worst


def _compare(name: str, example: Example, function: Any) -> float:
    if not example.args and not example.kwargs:
        raise VerificationError(f"{name}: its source has no example inputs to verify with")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PyTorch warns of what it does itself
        model = copy.deepcopy(example.model)  # its state, like the artifact's, is as exported
        expected = model(*_copied(example.args), **_copied(example.kwargs))
    actual = function(*_copied(example.args), **_copied(example.kwargs))
    return compare_results(name, actual, expected)


def compare_results(name: str, actual: Any, expected: Any) -> float:
    """Compare trees of results.

    Returns:
        The largest difference, relative to the largest value of its tensor.

    Raises:
        VerificationError: they differ by more than the tolerance of their dtype.
    """
    worst = 0.0
    pairs = zip(_tensors(actual), _tensors(expected), strict=True)
    for i, (one, other) in enumerate(pairs):
        rtol, atol = tolerance(other.dtype)
        try:
            torch.testing.assert_close(one, other, rtol=rtol, atol=atol, equal_nan=True)
        except AssertionError as error:
            difference = largest_difference(one, other) if one.shape == other.shape else None
            if difference is None or difference > rtol:
                raise VerificationError(f"{name}: result {i} is not eager's: {error}") from error
        worst = max(worst, largest_difference(one, other))
    return worst


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _copied(tree: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, torch.clone, tree)
