"""Keep IREE from computing all single numbers of a region in one device program."""

from __future__ import annotations

import itertools
from typing import Any

from lowering.stages.ir.barrier import behind_barrier
from lowering.stages.ir.structured import inputs_of
from lowering.stages.ir.symbols import ops_of

_MOST_VALUES = 24  # that the chains of one program read or make; each may be a binding


def separate_scalars(function: Any) -> None:
    """Let chains of ops on single numbers wait for each other, where there are many.

    IREE puts all of them into one device program, and its runtime loads none that takes more than
    32 tensors: the steps of an optimizer, which count themselves, are one for each parameter.

    Before: %0 = linalg.generic ins(%a : tensor<f32>); %1 = linalg.generic ins(%b : tensor<f32>)
    After:  %0 = linalg.generic ins(%a : tensor<f32>); %c, %_ = util.optimization_barrier %b, %0
            %1 = linalg.generic ins(%c : tensor<f32>)
    """
    from iree.compiler import ir

    chains = _chains(function)
    if sum(map(_values, chains)) <= _MOST_VALUES:
        return
    count = 0
    group: list[list[Any]] = []
    ahead: list[list[Any]] = []
    for chain in chains:
        count += _values(chain)
        if count > _MOST_VALUES:
            count, group, ahead = _values(chain), [], group
        group.append(chain)
        for op in chain if ahead else ():
            before = [[o for o in other if o.is_before_in_block(op)] for other in ahead]
            last = [ops[-1].results[0] for ops in before if ops]
            if last and inputs_of(op):
                with op.location, ir.InsertionPoint(op):
                    op.operands[0] = behind_barrier(op.operands[0], after=last)


def _values(chain: list[Any]) -> int:
    return len({value for op in chain for value in (*inputs_of(op), *op.results)})


def _chains(function: Any) -> list[list[Any]]:
    """Find the ops on single numbers, those that read each other together."""
    chains: dict[Any, list[Any]] = {}  # by the values that are made
    for op in ops_of(function):
        if op.name != "linalg.generic" or len(op.attributes["iterator_types"]):
            continue
        read = {id(chains[v]): chains[v] for v in inputs_of(op) if v in chains}
        chain = [*itertools.chain.from_iterable(read.values()), op]
        chains.update((result, chain) for maker in chain for result in maker.results)
    return list({id(chain): chain for chain in chains.values()}.values())
