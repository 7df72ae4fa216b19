"""What models are run with, and what for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

INFERENCE, TRAINING = "inference", "training"
STATIC, DYNAMIC = "static", "dynamic"  # sizes that are known, and that are not


@dataclass(frozen=True)
class Backend:
    """What a model is run with.

    Attributes:
        name: for `torch.compile`; empty: eager.
        module: is imported first, if it is not PyTorch's own.
        options: of `torch.compile`.
    """

    name: str
    module: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


_F32 = {"config": {"INFERENCE_PRECISION_HINT": "f32"}}  # by itself it computes in bf16
BACKENDS = {
    "eager": Backend(""),
    "npu_iree": Backend("npu_iree"),
    "inductor": Backend("inductor"),
    "aot_eager": Backend("aot_eager"),
    "openvino": Backend("openvino", "openvino.torch", _F32),
    "turbine": Backend("iree_turbine", "iree.turbine.dynamo.backends.base"),
}
