"""What models are run with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Backend:
    """What a model is run with.

    Attributes:
        name: for `torch.compile`; empty: eager.
        module: is imported first, if it is not PyTorch's own.
    """

    name: str
    module: str = ""


BACKENDS = {
    "eager": Backend(""),
    "npu_iree": Backend("npu_iree"),
    "inductor": Backend("inductor"),
    "aot_eager": Backend("aot_eager"),
    "openvino": Backend("openvino", "openvino.torch"),
    "turbine": Backend("turbine_cpu", "iree.turbine.dynamo.backends.cpu"),
}
