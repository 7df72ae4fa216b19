"""Prefetches in device code: written, and into which cache, by what a CPU makes of them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from lowering.cpu import best_for

FIRST_CACHE, SECOND_CACHE = 3, 2  # where to keep what is asked for, as LLVM counts
# AMD's have sse4a; from Zen 5 on, they have avxvnni, too, and read ahead well enough by themselves:
# with prefetches, T5 takes 1.10 of the time, MLP and Llama's decoding 1.06 to 1.14.
_CACHES: dict[frozenset[str], int | None] = {
    frozenset({"sse4a", "avxvnni"}): None,
    frozenset({"sse4a"}): SECOND_CACHE,
    frozenset(): FIRST_CACHE,
}
_BYTE, _WORD = 8, 32  # bits


def cache_for(features: Collection[str]) -> int | None:
    """Return where a CPU is to keep what it is asked for ahead; None: it is not to be asked."""
    return best_for(features, _CACHES)


def prefetch(before: Any, pointer: Any, ahead: int, cache: int) -> None:
    """Ask for what lies some bytes after where a pointer points to, before an op."""
    from iree.compiler import ir

    word = ir.IntegerType.get_signless(_WORD)

    def number(value: int) -> Any:
        return ir.IntegerAttr.get(word, value)

    with ir.InsertionPoint(before), ir.Location.unknown():
        place = ir.Operation.create(
            "llvm.getelementptr",
            results=[pointer.type],
            operands=[pointer],
            attributes={
                "elem_type": ir.TypeAttr.get(ir.IntegerType.get_signless(_BYTE)),
                "noWrapFlags": number(0),
                "rawConstantIndices": ir.DenseI32ArrayAttr.get([ahead]),
            },
        )
        ir.Operation.create(
            "llvm.intr.prefetch",
            operands=[place.result],
            attributes={"rw": number(0), "hint": number(cache), "cache": number(1)},  # read, data
        )
