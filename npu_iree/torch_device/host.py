"""What the device cannot run: PyTorch's CPU kernel on gathered inputs; the results go back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch._dynamo.utils import counters
from torch.utils import _pytree as pytree

from lowering.unfit import what_is_wrong
from npu_iree.errors import HostOp, UnsupportedOpError
from npu_iree.frozen import storage_id
from npu_iree.torch_device.calls import functional_of
from npu_iree.torch_device.current import CURRENT, FALLBACK, device, is_on_npu, user_line
from npu_iree.torch_device.fetch import as_lazy, on_host, strided
from npu_iree.torch_device.moves import order_for_writing, write
from npu_iree.torch_device.put import put_in_order, to_device
from npu_iree.torch_device.storage import as_bytes, blank_like, resize

log = logging.getLogger(__name__)
_CPU, _META = torch.device("cpu"), torch.device("meta")


def run_on_host(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], reason: str
) -> Any:
    """Run an op with PyTorch's CPU kernel.

    Args:
        op: the op.
        args: its arguments; tensors on "npu" are gathered behind one wait.
        kwargs: its arguments by name.
        reason: why it is not run on the device; empty if that is no loss (it reads no tensor).

    Raises:
        UnsupportedOpError: the host is forbidden. What PyTorch refuses is its own error, also then,
            if shapes and dtypes tell.
    """
    read = _given(op, args, kwargs, lambda argument: not argument.is_out)
    outs = _given(op, args, kwargs, lambda argument: argument.is_out)
    written = _given(op, args, kwargs, _is_written)
    written |= {key: out for key, out in outs.items() if key in read}  # add(x, 1, out=x)
    outs = {key: out for key, out in outs.items() if key not in read}
    targets = (*outs.values(), *written.values())
    if reason and _is_forbidden() and not _is_pytorchs_error(op, args, kwargs, targets):
        refuse(op, reason)
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    npu = [i for i, leaf in enumerate(leaves) if is_on_npu(leaf)]
    inputs = [leaves[i] for i in npu if id(leaves[i]) not in outs]
    host = dict(zip(map(id, inputs), _copies(op, inputs, written), strict=True))
    host |= {key: blank_like(out, _CPU) for key, out in outs.items() if is_on_npu(out)}
    given = {id(host[id(leaves[i])]): leaves[i] for i in npu}
    before = {key: (copy.shape, copy.stride()) for key, copy in host.items()}
    for i in npu:
        leaves[i] = host[id(leaves[i])]
    leaves = [_CPU if isinstance(leaf, torch.device) else leaf for leaf in leaves]
    host_args, host_kwargs = pytree.tree_unflatten(leaves, spec)
    with torch._C._DisableAutocast():  # that of the CPU: the op is one of "npu"
        result = _taking_numbers(op, args, kwargs)(*host_args, **host_kwargs)
    if reason:  # not before: of a call that PyTorch refuses, its own error is all there is to say
        tell(op, reason)
    for tensor in targets:
        if is_on_npu(tensor):
            copy = host[id(tensor)]
            if (copy.shape, copy.stride()) != before[id(tensor)]:
                resize(tensor, tuple(copy.shape), copy.stride())
            put_into(copy, tensor, "a result of the host", is_ours=True)
    return pytree.tree_map_only(
        torch.Tensor, lambda t: given[id(t)] if id(t) in given else _put(t, op, leaves), result
    )


def put_into(
    source: torch.Tensor,
    target: torch.Tensor,
    name: str = "a CPU tensor",
    *,
    is_ours: bool = False,
) -> None:
    """Write a CPU tensor to one on "npu".

    Args:
        source: the values.
        target: takes them, in its shape, dtype and memory order; lazily conjugated, or negative, if
            it is so itself.
        name: what they are, for ledger and errors.
        is_ours: nobody else holds their memory.
    """
    order = order_for_writing(target)
    value = source.detach().expand(target.shape).to(target.dtype)
    value = value.conj() if target.is_conj() else value
    value = value.neg() if target.is_neg() else value
    theirs = None if is_ours else source
    write(target, put_in_order(value, order, name, theirs=theirs), order)


def _is_pytorchs_error(
    op: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    targets: Sequence[torch.Tensor],
) -> bool:
    """Say whether PyTorch refuses a call, as far as that follows from what its tensors are.

    Then its CPU kernel is asked for the error. Of others' ops, nobody knows what they would do.
    """
    draws = torch.Tag.nondeterministic_seeded in op.tags
    if op.namespace != "aten" or draws or not all(map(is_on_npu, targets)):
        return False
    if what_is_wrong(functional_of(op) or op, args, kwargs):
        return True
    on_meta = partial(blank_like, device=_META)
    args, kwargs = pytree.tree_map_only(torch.Tensor, on_meta, (tuple(args), dict(kwargs)))
    args, kwargs = pytree.tree_map_only(torch.device, lambda _: _META, (args, kwargs))
    try:
        with torch._C._DisableAutocast():
            _taking_numbers(op, args, kwargs)(*args, **kwargs)
    except NotImplementedError:
        return False
    except (RuntimeError, IndexError, TypeError, ValueError):
        return True
    return False


def _taking_numbers(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Callable[..., Any]:
    """Return what takes a call: all overloads, where a number is in the place of a tensor.

    PyTorch makes such numbers tensors, and gives them to a device in Python as the numbers again.
    """
    for i, argument in enumerate(op._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        if isinstance(value, (complex, float, int)) and "Tensor" in str(argument.type):
            packet: torch._ops.OpOverloadPacket = op.overloadpacket
            return packet
    return op


def _is_forbidden() -> bool:
    return (FALLBACK.get() or CURRENT.fallback) == "error"


def refuse(op: torch._ops.OpOverload, reason: str) -> NoReturn:
    """Raise: the host is forbidden."""
    raise UnsupportedOpError(
        device().target.name,
        [HostOp(str(op), "unsupported", reason, user_line())],
        'torch.npu.set_fallback("error") forbids the host',
        'allow the host with torch.npu.set_fallback("host")',
    )


def tell(op: torch._ops.OpOverload, reason: str) -> None:
    """Say once an op that it runs on the host, or raise where that is forbidden."""
    if _is_forbidden():
        refuse(op, reason)
    name = str(op)
    counters["npu_iree"][f"host {name}"] += 1
    if name not in CURRENT.warned:
        CURRENT.warned.add(name)
        log.warning("%s runs on the host: %s\n      at %s", name, reason, user_line())


def _is_written(argument: Any) -> bool:
    info = argument.alias_info
    return info is not None and info.is_write and not argument.is_out


def _given(
    op: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    is_wanted: Callable[[Any], bool],
) -> dict[int, torch.Tensor]:
    """Return the tensors that were given for some arguments of an op, by their identity."""
    found: list[Any] = []
    for i, argument in enumerate(op._schema.arguments):
        if is_wanted(argument):
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found += value if isinstance(value, (list, tuple)) else [value]
    return {id(t): t for t in found if isinstance(t, torch.Tensor)}


def _copies(
    op: torch._ops.OpOverload, inputs: Sequence[torch.Tensor], written: Mapping[int, torch.Tensor]
) -> list[torch.Tensor]:
    """Gather tensors; those that share memory with one that is written to get memory of their own.

    That memory is the same for all of them, as it is on the device.
    """
    if not inputs:
        return []
    bytes_ = [as_bytes(t.untyped_storage()) for t in inputs]
    host = on_host(bytes_, str(op), "PyTorch's CPU kernel runs it")
    changed = set(map(storage_id, written.values()))
    own: dict[int, torch.Tensor] = {}
    copies = []
    for tensor, flat in zip(inputs, host, strict=True):
        storage = storage_id(tensor)
        if storage in changed:
            flat = own.setdefault(storage, flat.clone())
        copies.append(as_lazy(strided(flat, tensor, int(tensor.storage_offset())), tensor))
    return copies


def _put(tensor: torch.Tensor, op: torch._ops.OpOverload, leaves: Sequence[Any]) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        return tensor
    if tensor.is_nested:
        raise NotImplementedError(f"{op}: the device has no nested tensors; call it on the CPU")
    return to_device(tensor, str(op), is_ours=_is_fresh(tensor, op, leaves))


def _is_fresh(tensor: torch.Tensor, op: torch._ops.OpOverload, leaves: Sequence[Any]) -> bool:
    """Say whether a result is all of memory that nobody else has; ops of others may keep theirs.

    What `from_file` gives is the file.
    """
    is_new = op.namespace == "aten" and op is not torch.ops.aten.from_file.default
    if not is_new or tensor.nbytes != tensor.untyped_storage().nbytes():
        return False
    return all(
        storage_id(leaf) != storage_id(tensor)
        for leaf in leaves
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
    )
