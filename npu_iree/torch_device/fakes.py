"""What PyTorch takes for granted of results on "npu" while it traces: what it does on the CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from npu_iree.torch_device.current import is_on_npu
from npu_iree.torch_device.storage import blank_like

aten = torch.ops.aten
# Of these, PyTorch lays out the results by the name of the device; ours are those of the CPU.
_LAID_OUT_BY_DEVICE = (
    aten.convolution.default,
    aten.convolution_backward.default,
    aten.pixel_shuffle.default,
)


def register_fakes() -> None:
    """Have results of the ops above laid out as on the CPU; their own rules come next."""
    rule = (_LAID_OUT_BY_DEVICE.__contains__, _as_on_the_cpu)
    fake_impls.op_implementations_checks.insert(0, rule)


def _as_on_the_cpu(
    mode: FakeTensorMode, op: torch._ops.OpOverload, *args: Any, **kwargs: Any
) -> Any:
    place = next((t.device for t in pytree.tree_leaves((args, kwargs)) if is_on_npu(t)), None)
    if place is None:
        return NotImplemented
    with mode:
        on_the_cpu, back = (partial(blank_like, device=where) for where in ("cpu", place))
        args, kwargs = pytree.tree_map_only(torch.Tensor, on_the_cpu, (args, kwargs))
        return pytree.tree_map_only(torch.Tensor, back, op(*args, **kwargs))
