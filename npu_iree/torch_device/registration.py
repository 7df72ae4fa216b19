"""`register_device()`: PyTorch learns the device "npu", its ops and its module `torch.npu`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from lowering.decompositions import rnn
from lowering.decompositions.losses import replace_pytorchs
from npu_iree.device import open_device
from npu_iree.errors import NpuIreeError, TargetError
from npu_iree.targets import Target
from npu_iree.torch_device import module
from npu_iree.torch_device.autocast import register_autocast
from npu_iree.torch_device.backward import register_backward
from npu_iree.torch_device.current import CURRENT, NAME
from npu_iree.torch_device.dynamo import register_dynamo
from npu_iree.torch_device.fakes import register_fakes
from npu_iree.torch_device.forms import WHOLE
from npu_iree.torch_device.guard import DeviceGuard
from npu_iree.torch_device.methods import register_methods
from npu_iree.torch_device.ops import EagerOp
from npu_iree.torch_device.sending import register_reductions
from npu_iree.torch_device.tensors import DIFFERENTIABLE, ON_CPU, OWN
from npu_iree.versions import check_versions

_UNNAMED = "privateuseone"
_KEY = "PrivateUse1"
_PARTS: list[torch.library.Library] = []  # registrations last as long as these

_NO_SPARSE = (
    "the device has no sparse tensors; keep them on the CPU, or use dense ones (of nn.Embedding, "
    "sparse=False)"
)
# Kinds of tensors of which the device has none: what their ops say.
_NOT_HELD = {
    "NestedTensor": "the device has no strided nested tensors; take layout=torch.jagged",
    "Quantized": "npu has no quantized tensors; leave it on the CPU, or call dequantize() first",
    "Sparse": _NO_SPARSE,
    "SparseCsr": _NO_SPARSE,
}


def register_device(target: Target | str = "npu-local") -> torch.device:
    """Make `torch.device("npu")` a device of PyTorch's; again and again is fine.

    Args:
        target: what is behind it, an installed target or its name.

    Returns:
        The device.

    Raises:
        NpuIreeError: another package has registered a device of its own (PyTorch has room for
            one), or "npu" is already registered for another target.
        TargetError: there is no such target, or it has no device here.
    """
    check_versions("torch", "iree-base-runtime")
    if target == NAME:
        raise TargetError(f"{NAME!r} is the device's name; register_device takes a target's")
    opened = open_device(target)
    if CURRENT.device is not None:
        if CURRENT.device is not opened:
            raise NpuIreeError(
                f'"npu" is registered for {CURRENT.device.target.name}, and stays so in this '
                f"process; it cannot become {opened.target.name}"
            )
        return torch.device(NAME)
    taken = torch._C._get_privateuse1_backend_name()
    if taken != _UNNAMED or hasattr(torch, NAME):
        other = taken if taken != _UNNAMED else f"torch.{NAME}"
        raise NpuIreeError(
            f"PyTorch has room for one device from outside, and {other!r} is there already; "
            "npu_iree's cannot be registered in this process"
        )
    _setup_privateuseone_for_python_backend(NAME, module, device_guard=DeviceGuard())
    _register_ops()
    register_methods()
    register_backward()
    register_dynamo()
    register_fakes()
    register_reductions()
    replace_pytorchs()
    CURRENT.device = opened
    return torch.device(NAME)


def _register_ops() -> None:
    library: Any = torch.library.Library
    aten, cpu, others = library("aten", "IMPL"), library("aten", "IMPL"), library("_", "IMPL")
    for name, function in OWN.items():
        aten.impl(name, function, _KEY)
    for name, op in _overloads():
        makes_out = torch._C._dispatch_has_kernel_for_dispatch_key(
            f"aten::{name}", "CompositeExplicitAutogradNonFunctional"
        )
        if name not in OWN and (makes_out or name in WHOLE):
            aten.impl(name, EagerOp(op), _KEY)
    found: dict[Any, EagerOp] = {}

    def fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
        if op not in found:
            found[op] = EagerOp(op)
        return found[op](*args, **kwargs)

    others.fallback(fallback, _KEY)
    _refuse_kinds(aten, others)
    for lazy in ("Conjugate", "Negative"):  # else PyTorch resolves them by a copy, and so for ever
        aten.impl("_copy_from", torch.library.fallthrough_kernel, lazy)
    for name, function in DIFFERENTIABLE.items():
        aten.impl(name, function, f"Autograd{_KEY}")
    for name, function in ON_CPU.items():
        cpu.impl(name, function, "CPU")
    for cell, shapes in rnn.DECOMPOSITIONS.items():  # PyTorch's ask for biases, or are missing
        cell.py_kernels[torch._C.DispatchKey.Meta] = shapes  # type: ignore[assignment]
        cell._dispatch_cache.clear()
    _PARTS.extend((aten, others, cpu, *register_autocast()))


def _refuse_kinds(aten: Any, others: Any) -> None:
    """Let tensors of which the device has none say so, and making compressed sparse ones.

    Of the latter PyTorch has a kernel for all devices, which comes before a fallback.
    """
    for kind, why in _NOT_HELD.items():
        others.fallback(partial(_refuse, why), f"{kind}{_KEY}")
    name = "_sparse_compressed_tensor_unsafe"
    op = getattr(torch.ops.aten, name).default
    aten.impl(name, partial(_refuse, _NO_SPARSE, op), f"SparseCsr{_KEY}")


def _refuse(why: str, op: Any, *args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError(f"{op}: {why}")


def _overloads() -> Iterator[tuple[str, torch._ops.OpOverload]]:
    """Give every op of ATen with its name as a library has it, e.g. `add.Tensor`."""
    for full in torch._C._dispatch_get_all_op_names():
        space, _, name = full.partition("::")
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if space == "aten" and op is not None:
            yield name, op
