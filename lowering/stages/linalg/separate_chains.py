"""Keep IREE from computing with more tensors in one device program than it can take."""

from __future__ import annotations

from typing import Any

from lowering.stages.ir.barrier import read_behind_barrier
from lowering.stages.ir.structured import RESHAPES, inputs_of
from lowering.stages.ir.symbols import ops_of

# Of what a chain reads or makes; programs take more, with what stands beside the chain.
_MOST_VALUES = 24
_MOST_SIZES = 24  # that are not known


def separate_chains(function: Any) -> None:
    """Cut chains of ops that IREE may fuse, before they read too many tensors.

    IREE limits what one op reads, and not what a device program does: 40 tensors that are added
    to one another, with a `tanh` each, are read by one program, and its runtime loads none that
    takes more than 32, or than 64 words of sizes and numbers.

    Before: %1 = linalg.generic ins(%0, %a); ...; %40 = linalg.generic ins(%39, %z)
    After:  the same with %b = util.optimization_barrier %23; %24 = linalg.generic ins(%b, %y)
    """
    values: dict[Any, frozenset[Any]] = {}  # what the chain that ends in a result reads and makes
    for op in ops_of(function):
        if op.name in RESHAPES:
            values[op.results[0]] = values.get(op.operands[0], frozenset([op.operands[0]]))
        elif op.name.startswith("linalg."):
            chain = _joined(op, values)
            for result in op.results:
                is_kept = sum(1 for _ in result.uses) > 1
                values[result] = chain | {result} if is_kept else chain


def _joined(op: Any, values: dict[Any, frozenset[Any]]) -> frozenset[Any]:
    """Join what an op reads, and cut off the longest of the chains while that is too much."""
    read = {value: values.get(value, frozenset([value])) for value in inputs_of(op)}
    while _is_too_much(chain := frozenset[Any]().union(*read.values())):
        longest = max(read, key=lambda value: len(read[value]))
        if len(read[longest]) == 1:
            break  # one op reads so many
        read[longest] = values[longest] = frozenset([longest])
        read_behind_barrier(longest)
    return chain


def _is_too_much(chain: frozenset[Any]) -> bool:
    return len(chain) > _MOST_VALUES or sum(map(_unknown_sizes, chain)) > _MOST_SIZES


def _unknown_sizes(value: Any) -> int:
    from iree.compiler import ir

    kind = value.type
    return kind.shape.count(kind.get_dynamic_size()) if isinstance(kind, ir.RankedTensorType) else 1
