"""What the device cannot run: PyTorch's CPU kernel on gathered inputs; the results go back."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch.utils import _pytree as pytree

from lowering.errors import HostOp, UnsupportedOpError
from npu_iree.torch_device.current import CURRENT, device, user_line
from npu_iree.torch_device.fetch import on_host
from npu_iree.torch_device.put import put_dense, to_device
from npu_iree.torch_device.storage import resize, set_handle

log = logging.getLogger(__name__)


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
        UnsupportedOpError: the host is forbidden.
    """
    if reason:
        _tell(op, reason)
    written = _written(op, args, kwargs)
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    npu = [i for i, leaf in enumerate(leaves) if _is_npu(leaf)]
    inputs = [leaves[i] for i in npu]
    host = _copies(op, inputs, written)
    for i, tensor in zip(npu, host, strict=True):
        leaves[i] = tensor
    cpu = torch.device("cpu")
    leaves = [cpu if isinstance(leaf, torch.device) else leaf for leaf in leaves]
    host_args, host_kwargs = pytree.tree_unflatten(leaves, spec)
    before = {id(t): (t.shape, t.stride()) for t in host}
    result = op(*host_args, **host_kwargs)
    for tensor, copy in zip(inputs, host, strict=True):
        if id(tensor) in written:
            _write_back(tensor, copy, before[id(copy)])
    given = {id(copy): tensor for tensor, copy in zip(inputs, host, strict=True)}
    return pytree.tree_map_only(
        torch.Tensor, lambda t: given[id(t)] if id(t) in given else _put(t, op), result
    )


def _tell(op: torch._ops.OpOverload, reason: str) -> None:
    """Say once an op that it runs on the host, or raise where that is forbidden."""
    name = str(op)
    counters["npu_iree"][f"host {name}"] += 1
    if CURRENT.fallback == "error":
        line = user_line()
        raise UnsupportedOpError(
            device().target.name,
            [HostOp(name, "unsupported", reason, line)],
            'torch.npu.set_fallback("error") forbids the host',
            'allow the host with torch.npu.set_fallback("host")',
        )
    if name not in CURRENT.warned:
        CURRENT.warned.add(name)
        log.warning("%s runs on the host: %s\n      at %s", name, reason, user_line())


def _written(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[int, torch.Tensor]:
    """Return the tensors that an op writes to, by their identity."""
    found: list[Any] = []
    for i, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
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
    host = on_host([_everything(t) for t in inputs], str(op), "PyTorch's CPU kernel runs it")
    changed = {t.untyped_storage()._cdata for t in written.values()}
    own: dict[int, torch.Tensor] = {}
    copies = []
    for tensor, flat in zip(inputs, host, strict=True):
        storage = tensor.untyped_storage()._cdata
        if storage in changed:
            flat = own.setdefault(storage, flat.clone())
        view = torch.empty(0, dtype=tensor.dtype).set_(
            flat.untyped_storage(), int(tensor.storage_offset()), tensor.shape, tensor.stride()
        )
        view = torch._conj(view) if tensor.is_conj() else view
        copies.append(torch._neg_view(view) if tensor.is_neg() else view)
    return copies


def _everything(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's whole storage, as bytes."""
    count = tensor.untyped_storage().nbytes()
    return bytes_view(tensor, count)


def bytes_view(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Return the first bytes of a tensor's storage as a tensor on "npu"."""
    empty = torch._C._acc.create_empty_tensor((0,), torch.uint8)
    resize(empty, (count,), (1,), tensor.untyped_storage())
    return empty


def _write_back(tensor: torch.Tensor, copy: torch.Tensor, before: tuple[Any, Any]) -> None:
    if (copy.shape, copy.stride()) != before:
        resize(tensor, tuple(copy.shape), copy.stride())
    storage = copy.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
    set_handle(tensor, put_dense(flat, "a result of the host", is_ours=True))


def _put(tensor: torch.Tensor, op: torch._ops.OpOverload) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        return tensor
    return to_device(tensor, str(op))


def _is_npu(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "npu"
