"""The decomposition table: PyTorch's core ATen set, what our lowering adds, and the user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, get_decompositions

from lowering import randomness
from lowering.decompositions import (
    adaptive,
    attention,
    bags,
    batch_norm,
    convolution,
    division,
    elementary,
    exact,
    foreach,
    group_norm,
    grouped,
    indexing,
    losses,
    maxima,
    ordering,
    overlaps,
    padding,
    pooling,
    powers,
    quantized,
    refused,
    rnn,
    sampling,
    scans,
    scatters,
    shifts,
    triangular,
    trilinear,
    views,
    weight_norm,
)
from lowering.decompositions.halves import with_halves
from lowering.decompositions.layouts import with_layouts
from lowering.decompositions.narrow import with_narrow
from lowering.decompositions.scalars import with_scalars
from lowering.decompositions.tables import Table
from lowering.op_names import matches
from lowering.unfit import with_refused

aten = torch.ops.aten
OpOverload = torch._ops.OpOverload
DecompositionTable = Mapping[OpOverload, Callable[..., Any]]

# Beyond core ATen: torch-mlir lowers the pieces, and lowers them better than the whole.
EXTRA_OPS = (
    aten._euclidean_dist,
    aten._log_softmax,
    aten._native_batch_norm_legit,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_functional,
    aten._native_batch_norm_legit_no_training,
    aten._to_copy,
    aten.addmm,
    aten.addmv,
    aten.baddbmm,
    aten.diag,
    aten.full,
    aten.logsumexp,
    aten.native_layer_norm,
    aten.scaled_dot_product_attention,
    aten.upsample_bilinear2d.vec,
)

# In core ATen's table, but torch-mlir has a direct lowering that is right where the pieces are not.
KEPT_OPS = frozenset(
    {
        "aten.all",
        "aten.empty_like",
        "aten.eye",
        "aten.isclose",
        "aten.isfinite",
        "aten.linalg_norm",
        "aten.linalg_slogdet",
        "aten.linalg_vector_norm",
        "aten.norm",
        "aten.one_hot",
        "aten.rms_norm",
    }
)

# Their decompositions draw uniform numbers where eager's kernels draw others.
EAGERS_RANDOM_OPS = frozenset({"aten.bernoulli.default"})


# An op is decomposed by one of them.
_MODULES: Sequence[ModuleType] = (
    adaptive,
    attention,
    bags,
    batch_norm,
    convolution,
    division,
    elementary,
    exact,
    foreach,
    group_norm,
    grouped,
    indexing,
    losses,
    maxima,
    ordering,
    overlaps,
    padding,
    pooling,
    powers,
    randomness,
    refused,
    rnn,
    sampling,
    scans,
    scatters,
    shifts,
    triangular,
    trilinear,
    views,
    weight_norm,
)


@cache
def _default_table() -> Table:
    ours = {op: fn for module in _MODULES for op, fn in module.DECOMPOSITIONS.items()}
    pytorchs = {**core_aten_decompositions(), **get_decompositions(EXTRA_OPS)}
    taken = {op: fn for op, fn in pytorchs.items() if not matches(str(op), KEPT_OPS)}
    table = {**taken, **ours}
    table |= with_layouts(table)
    table |= with_scalars(table)
    table |= with_halves(table)
    table |= with_narrow(table)
    return {**table, **with_refused(table)}


def decomposition_table(
    keep_ops: Iterable[str] = (), user: DecompositionTable | None = None, rng: str = "default"
) -> Table:
    """Build the table that AOTAutograd decomposes with.

    Args:
        keep_ops: ops to leave whole, by `aten.name.overload`, `aten.name` or `name`.
        user: decompositions of the user's own; they win over ours and over `keep_ops`.
        rng: `host` leaves random ops whole where their pieces draw other numbers than eager.

    Returns:
        op overload -> a function on tensors that computes the same, or returns `NotImplemented`,
        with which PyTorch keeps the op whole.
    """
    keep = {*keep_ops, *(EAGERS_RANDOM_OPS if rng == "host" else ())}
    of_libraries = {**grouped.of_libraries(), **quantized.of_libraries()}
    every = {**_default_table(), **exact.of_dynamo(), **of_libraries}
    table = {op: fn for op, fn in every.items() if not matches(str(op), keep)}
    return {**table, **(user or {})}
