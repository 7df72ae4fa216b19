"""What AOTAutograd is asked for: functional, decomposed graphs, forward and backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.schemas import MutationType
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import CheckpointPolicy

from lowering.decompositions.losses import replace_pytorchs
from lowering.plan import Plan
from lowering.sizes import size_hint
from lowering.target import CompileTarget
from npu_iree.aot_cache import trace
from npu_iree.empty_sizes import may_be_empty
from npu_iree.errors import EagerOnlyError
from npu_iree.options import Options
from npu_iree.saved_images import save_channels_last
from npu_iree.torch_device.current import is_on_npu

# What AOTAutograd says of an argument such as `x.expand(3, 4)` that the graph writes to in part: it
# would write all of it. Eager writes to the part, or refuses, too, to write to all.
_SHARED_MEMORY = "refers to a single memory location"


def aot_backend(
    options: Options,
    compile: Callable[..., Callable[..., Any]],
    when_new: Callable[[], object] = lambda: None,
) -> Callable[..., Any]:
    """Return a backend of Dynamo's that hands functional graphs to a compiler.

    What a graph writes to its inputs stays in the graph, at its end (`lowering.capture`). Between
    forward and backward as little is saved as can be computed again at no cost. What was traced
    before comes out of PyTorch's cache (`npu_iree.aot_cache`).

    Args:
        options: of the `torch.compile` call.
        compile: compiles a graph, given its inputs and its `kind`: `forward` (of training),
            `backward`, or `inference` (without gradients).
        when_new: called before a graph is traced that would have been kept, had it been before.

    The backend raises `EagerOnlyError` for a graph of tensors on other devices, and for one that
    AOTAutograd cannot trace.
    """
    asked: dict[str, Any] = {
        "fw_compiler": functools.partial(compile, kind="forward"),
        "bw_compiler": functools.partial(compile, kind="backward"),
        "inference_compiler": functools.partial(compile, kind="inference"),
        "partition_fn": functools.partial(_partition, options.target_value.compile),
        "keep_inference_input_mutations": True,
    }
    return functools.partial(_trace, options, asked, when_new)


def _trace(
    options: Options,
    asked: dict[str, Any],
    when_new: Callable[[], object],
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
) -> Callable[..., Any]:
    _check_devices(inputs)
    replace_pytorchs()
    try:
        traced: Callable[..., Any] = trace(options, asked, when_new, graph_module, inputs)
    except RuntimeError as error:
        if _SHARED_MEMORY not in str(error):
            raise
        raise EagerOnlyError(f"it writes to an expanded tensor: {error}") from error
    return traced


def _check_devices(inputs: Sequence[Any]) -> None:
    """Refuse a graph of tensors that are neither on the CPU nor on "npu".

    Raises:
        EagerOnlyError: it is one; names their devices.
    """
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    others = {str(t.device) for t in tensors if t.device.type != "cpu" and not is_on_npu(t)}
    if others:
        raise EagerOnlyError(
            f"its inputs are on {', '.join(sorted(others))}, and npu_iree compiles for those on "
            "the CPU or npu"
        )


def metadata() -> Any:
    """Return what AOTAutograd has found out about the graph being compiled, or None.

    Source: `ViewAndMutationMeta` in torch/_functorch/_aot_autograd/schemas.py.
    """
    context = TracingContext.try_get()
    return context.fw_metadata if context is not None else None


def needs_no_wrapper(plan: Plan, graph_module: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Say whether AOTAutograd's wrapper does nothing around the calls of an inference graph.

    It costs a tenth of a call that computes little. It counts versions of what is written to, makes
    views of what is returned, sees to duplicates and subclasses of tensors, answers for fake ones,
    and keeps autograd and autocast from PyTorch's kernels; of all these there must be none.

    Args:
        plan: of the graph.
        graph_module: Dynamo's graph.
        inputs: its inputs.
    """
    found = metadata()
    if found is None or plan.host_segments or any(map(may_be_empty, plan.regions.values())):
        return False
    (results,) = graph_module.graph.output_node().args
    values = [r.meta.get("example_value") for r in pytree.tree_leaves(results) if _is_node(r)]
    return (
        all(type(value) in _PLAIN for value in inputs)
        and not any(map(is_traceable_wrapper_subclass, values))
        and len(plan.inputs) == len(found.input_info) == len(inputs)
        and len(plan.outputs) == len(found.output_info)
        and all(info.mutation_type is MutationType.NOT_MUTATED for info in found.input_info)
        and not (found.num_outputs_aliased or found.num_intermediate_bases or found.tokens)
        and not found.dynamic_outputs
        and found.grad_enabled_mutation is None
    )


_PLAIN = (torch.Tensor, torch.nn.Parameter, int, float, bool)


def _is_node(value: object) -> bool:
    return isinstance(value, fx.Node)


def allow_second_backward() -> None:
    """Let a backward graph that is compiled in this context be called with `retain_graph=True`.

    AOTAutograd refuses that where a backend may overwrite the activations that were saved. Ours
    are freed when their last reader ends, if nobody else holds them; they are not overwritten.
    """
    if (found := metadata()) is not None:
        found.bw_donated_idxs = []


def _partition(
    target: CompileTarget, joint: fx.GraphModule, inputs: Any, **kwargs: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cut a joint graph into forward and backward."""
    results = kwargs["num_fwd_outputs"]
    _read_before_written(joint.graph)
    _save_compared(joint.graph, results)
    _read_again(joint.graph)
    forward, backward = min_cut_rematerialization_partition(joint, inputs, **kwargs)
    save_channels_last(forward, backward, results, target)
    return forward, backward


def _save_compared(graph: fx.Graph, results: int) -> None:
    """Have the backward pass compare the numbers that the forward pass had.

    The gradient of a maximum goes to the elements that are equal to it. Computed again, beside
    other ops, they may differ from it in their last bit: then none is, and the gradient is NaN.

    Args:
        graph: forward and backward.
        results: how many of its outputs are the forward's.
    """
    (outputs,) = graph.output_node().args
    forward = _needed_for(pytree.tree_leaves(outputs)[:results])
    compared = graph.find_nodes(op="call_function", target=torch.ops.aten.eq.Tensor)
    floats = [n for n in compared if n.args[0].meta["val"].dtype.is_floating_point]
    for node in _needed_for(floats, but_not_beyond=forward) & forward:
        if node.op == "call_function":
            node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)


def _read_again(graph: fx.Graph) -> None:
    """Have the backward pass read again what is read by index, and is more than what it is read of.

    Of the matrices of a mixture of experts, each block of rows reads one: several times all there
    are would be kept.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.index_select.default):
        read, source = (n.meta["val"].numel() for n in (node, node.all_input_nodes[0]))
        if size_hint(read) > size_hint(source):
            node.meta.setdefault("recompute", CheckpointPolicy.PREFER_RECOMPUTE)


def _needed_for(values: Sequence[Any], but_not_beyond: Collection[fx.Node] = ()) -> set[fx.Node]:
    """Return these nodes and what they are computed from."""
    waiting = [value for value in values if _is_node(value)]
    needed = set(waiting)
    for node in waiting:
        if node not in but_not_beyond:
            more = [source for source in node.all_input_nodes if source not in needed]
            needed.update(more)
            waiting.extend(more)
    return needed


def _read_before_written(graph: fx.Graph) -> None:
    """Let all that reads an input which the graph writes to read a copy of the old value.

    The partitioner takes an input for what the backward pass can have for nothing, and computes
    again from it what is cheap; by then, the new value is there. (PyTorch's own backends do so.)

    Before: %1 = sin(%b); %2 = add(%b, 1); copy_(%b, %2)       backward: cos(%b), with the new value
    After:  %c = clone(%b); %1 = sin(%c); %2 = add(%c, 1); copy_(%b, %2)         backward: cos(%c)
    """
    copies = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    for written in dict.fromkeys(copy.args[0] for copy in copies):
        if not isinstance(written, fx.Node) or written.op != "placeholder":
            continue
        first = graph.find_nodes(op="placeholder")[-1]
        with graph.inserting_after(first):
            old = graph.call_function(torch.ops.aten.clone.default, (written,))
        old.meta = {"val": written.meta["val"], "recompute": CheckpointPolicy.MUST_SAVE}

        def is_read(user: fx.Node, old: fx.Node = old) -> bool:
            return user is not old and user.op != "output" and user not in copies

        written.replace_all_uses_with(old, delete_user_cb=is_read)
        for copy in copies:  # what is written may be the old value of another
            if copy.args[1] is written:
                copy.update_arg(1, old)
