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


# Which of equal elements the indices of these point at is open, as their documentation says: they
# are compared by what they point at. All take (x, k, dim=-1) and give (values, indices).
OPEN_TIES = frozenset({"topk"})
# Entries whose gradients are sums of terms that cancel: how many times the tolerance they have.
LOOSER = {"nn.functional.scaled_dot_product_attention": 4}
# Their results are whatever was in memory, or are no tensors' values: there is nothing to compare.
VALUELESS = re.compile(r"(new_)?empty(_like|_strided|_permuted)?")
EVERYTHING = re.compile("")
# Entries that cannot be tried in any backend, and why; checked to be there.
SKIPPED: dict[str, str] = {}


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
            if name in SKIPPED or VALUELESS.fullmatch(info.name):
                continue
            if pattern.search(name) and info.supports_dtype(DTYPES[dtype], "cpu"):
                trains = dtype in backward and info.supports_autograd
                yield Case(name, position, dtype, samples, trains)
