"""What AOTAutograd is asked for: functional, decomposed graphs, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

from lowering.decompositions import decomposition_table
from npu_iree.options import Options

_Compile = Callable[..., Any]


def aot_backend(
    options: Options, forward: _Compile, backward: _Compile, inference: _Compile
) -> Callable[..., Any]:
    """Return a backend of Dynamo's that hands functional graphs to three compilers.

    What a graph writes to its inputs stays in the graph, at its end (`lowering.capture`). Between
    forward and backward as little is saved as can be computed again at no cost.

    Args:
        options: of the `torch.compile` call.
        forward: compiles the forward graph of training.
        backward: compiles its backward graph.
        inference: compiles a graph without gradients.
    """
    keep = options.keep_ops | options.target_value.compile.keep_ops
    return aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=inference,
        decompositions=decomposition_table(keep, options.decompositions, options.rng),
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )
