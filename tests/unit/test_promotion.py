"""Decompositions promote as the ops do: any two dtypes, with dimensions and without."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lowering.decompositions import decomposition_table
from tolerances import assert_same

TABLE = decomposition_table()
DTYPES = (
    torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float32, torch.complex64,
)  # fmt: skip
OPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add,
    "addcmul": lambda a, b: torch.addcmul(a, b, b, value=2),
    "atan2": torch.atan2,
    "copysign": torch.copysign,
    "div": torch.div,
    "div, truncated": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "div, rounded down": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "fmod": torch.fmod,
    "hypot": torch.hypot,
    "ldexp": torch.ldexp,
    "logaddexp": torch.logaddexp,
    "logaddexp2": torch.logaddexp2,
    "maximum": torch.maximum,
    "mul": torch.mul,
    "pow": torch.pow,
    "remainder": torch.remainder,
    "where": lambda a, b: torch.where(a != 0, a, b),
    "xlogy": torch.xlogy,
}
aten = torch.ops.aten
NORMS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]] = {
    "batch": lambda x, w, b: aten._native_batch_norm_legit_functional(x, w, b, b, w, True, 0.1, 1),
    "batch, alone": lambda x, w, b: aten._native_batch_norm_legit(x, w, b, True, 0.1, 1),
    "batch, inference": lambda x, w, b: aten._native_batch_norm_legit_no_training(
        x, w, b, b, w, 0.1, 1
    ),
    "group": lambda x, w, b: aten.native_group_norm(x, w, b, 3, 4, 4, 2, 1),
    "layer": lambda x, w, b: aten.native_layer_norm(x, [4], None, b, 1),
}


class Decomposed(TorchDispatchMode):
    """Runs ops as they are traced, but keeps no graph, which takes longer than all the rest."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        with self:
            for decompose in (TABLE.get(func), func.decompose):
                result = decompose(*args, **kwargs or {}) if decompose else NotImplemented
                if result is not NotImplemented:
                    return result
        return func(*args, **kwargs or {})


def values(dtype: torch.dtype, *, is_number: bool) -> torch.Tensor:
    return torch.tensor(2 if is_number else [1, 2, 3], dtype=dtype)


@pytest.mark.parametrize("name", OPS)
def test_any_two_dtypes(name: str) -> None:
    op, cases = OPS[name], dict[str, tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]]()
    for dtypes in itertools.product(DTYPES, DTYPES):
        for are_numbers in ((False, False), (False, True), (True, False)):
            a, b = (values(d, is_number=n) for d, n in zip(dtypes, are_numbers, strict=True))
            with contextlib.suppress(RuntimeError, NotImplementedError):
                cases[f"{a.dtype} {list(a.shape)}, {b.dtype} {list(b.shape)}"] = (a, b), op(a, b)

    found = {}
    for case, (arguments, _) in cases.items():
        with Decomposed():
            try:
                found[case] = op(*arguments)
            except Exception as error:
                raise AssertionError(f"of {case}: {error}") from error
    assert len(found) > 20
    for case, (_, expected) in cases.items():
        assert found[case].dtype is expected.dtype, case
        torch.testing.assert_close(found[case], expected, msg=lambda m, c=case: f"of {c}: {m}")


def test_statistics_of_halves_are_floats_as_the_weights_are() -> None:
    x = torch.randn(3, 4, 4).bfloat16()
    weight, bias = torch.rand(2, 4)

    def norms() -> dict[str, Any]:
        return {name: norm(x, weight, bias) for name, norm in NORMS.items()}

    with Decomposed():
        found = norms()
    assert_same(found, norms())
