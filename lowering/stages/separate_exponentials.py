"""Keep IREE from computing the exponentials of a softmax twice."""

from __future__ import annotations

import itertools
from typing import Any

from lowering.stages.barrier import behind_barrier
from lowering.stages.dispatch_work import walk


def separate_exponentials(function: Any) -> None:
    """Put a barrier behind exponentials that are added up, and read once more.

    IREE makes one program of a softmax, in which each row's exponentials are computed once for
    their sum and once more for the result. In programs of their own it takes half the time, of rows
    of 128 to 1024 floats.

    Before: %e = exp(%x); %s = sum of %e; %y = %e / %s
    After:  %e = exp(%x); %b = util.optimization_barrier %e; %s = sum of %b; %y = %b / %s
    """
    from iree.compiler import ir

    ops = list(function.regions[0].blocks[0].operations)
    for op, following in itertools.pairwise(ops):
        if op.operation.name != "linalg.generic" or not _is_exponential(op):
            continue
        value = op.results[0]
        readers = [use.owner for use in value.uses]
        if len(readers) > 1 and any(map(_is_reduction, readers)):
            with ir.InsertionPoint(following):
                barrier = behind_barrier(value)
            for reader in readers:
                for i, operand in enumerate(reader.operands):
                    if operand == value:
                        reader.operation.operands[i] = barrier


def _is_exponential(op: Any) -> bool:
    return any(inner.name == "math.exp" for inner in walk(op.operation))


def _is_reduction(op: Any) -> bool:
    attributes = op.operation.attributes
    return "iterator_types" in attributes and "reduction" in str(attributes["iterator_types"])
