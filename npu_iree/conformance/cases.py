"""What is tried: the entries of PyTorch's operator database (`op_db`), in several dtypes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from lowering.dtypes import DTYPES


@dataclass(frozen=True)
class Case:
    """One entry of `op_db` in one dtype.

    Attributes:
        name: e.g. `nn.functional.pad.constant`.
        position: its place in `op_db`.
        dtype: of its inputs.
        samples: how many of its sample inputs to take, evenly; 0: all.
        backward: whether its gradients are compared too.
    """

    name: str
    position: int
    dtype: str
    samples: int
    backward: bool

    @property
    def key(self) -> str:
        """What a journal knows it by."""
        return f"{self.name}[{self.dtype}]"


# Entries whose gradients are sums of terms that cancel: how many times the tolerance they have.
LOOSER = {"nn.functional.scaled_dot_product_attention": 4}
# Elementwise operators that the database has no class of entries for.
ELEMENTWISE = frozenset(
    {
        "logaddexp2",
        "nn.functional.gelu",
        "nn.functional.glu",
        "nn.functional.hardswish",
        "nn.functional.leaky_relu",
        "outer",
    }
)
# Their results are whatever was in memory, or are no tensors' values: there is nothing to compare.
VALUELESS = re.compile(r"(new_)?empty(_like|_strided|_permuted)?")
EVERYTHING = re.compile("")
# Cases that no backend can be right in, which are not tried, and why.
SKIPPED: dict[str, str] = dict.fromkeys(
    ("_batch_norm_with_update[bf16]", "_batch_norm_with_update[f16]"),
    "PyTorch's fake kernel says f32 of statistics that its CPU kernel gives in halves",
)


@cache
def database() -> Sequence[Any]:
    """Return PyTorch's operator database.

    Raises:
        ImportError: `expecttest` is missing, which PyTorch's testing modules need.
    """
    from torch.testing._internal import common_methods_invocations as invocations

    # Entries of random ops seed themselves in a way that Dynamo leaves out of the graph; whoever
    # runs them here has seeded.
    invocations.wrapper_set_seed = _call  # type: ignore[attr-defined]
    return list(invocations.op_db)


def is_elementwise(case: Case) -> bool:
    """Say whether each number of a result comes of one number of each input."""
    from torch.testing._internal.opinfo.core import BinaryUfuncInfo, UnaryUfuncInfo

    if case.name in ELEMENTWISE:
        return True
    return isinstance(database()[case.position], (UnaryUfuncInfo, BinaryUfuncInfo))


def _call(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


def cases(
    dtypes: Sequence[str],
    *,
    pattern: re.Pattern[str] = EVERYTHING,
    samples: int = 4,
    backward: Sequence[str] = ("f32",),
) -> Iterator[Case]:
    """List the cases.

    Args:
        dtypes: names of dtypes.
        pattern: a regular expression that a name has to hold.
        samples: how many sample inputs of an entry; 0: all.
        backward: the dtypes in which gradients are compared.
    """
    for dtype in dtypes:
        for position, info in enumerate(database()):
            name = f"{info.name}.{info.variant_test_name}".rstrip(".")
            if VALUELESS.fullmatch(info.name) or not pattern.search(name):
                continue
            trains = dtype in backward and info.supports_autograd
            case = Case(name, position, dtype, samples, trains)
            if info.supports_dtype(DTYPES[dtype], "cpu"):
                yield case
