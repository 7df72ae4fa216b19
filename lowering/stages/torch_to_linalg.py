"""Stage 2: torch dialect to linalg on tensors."""

from __future__ import annotations

import re

from lowering.stages import CompileOptions, Stage
from lowering.stages.torch_mlir_context import TorchMlirContext

PIPELINE = (
    "builtin.module("
    "torchdynamo-export-to-torch-backend-pipeline,"
    "torch-backend-to-linalg-on-tensors-backend-pipeline)"
)
_CHECK = "torch-verify-linalg-on-tensors-backend-contract"  # it knows no calls
_TORCH_OP = re.compile(r"(?:= |^\s*)\"?(torch(?:_c)?\.[\w.]+)", re.MULTILINE)


def torch_to_linalg(torch_asm: str, options: CompileOptions) -> str:
    """Lower torch-dialect IR to linalg on tensors.

    Before: %1 = torch.aten.relu %0 : !torch.vtensor<[4,8],f32> -> !torch.vtensor<[4,8],f32>
    After:  %1 = linalg.generic {...} ins(%0 : tensor<4x8xf32>) outs(...)

    Args:
        torch_asm: one module in the torch dialect; ranks static, sizes may be `?`.
        options: with `kernels`, the module may call functions that it only declares.

    Raises:
        RuntimeError: a pass failed; the text is what it said.
    Source: torch-mlir pipelines `torchdynamo-export-to-torch-backend-pipeline` and
        `torch-backend-to-linalg-on-tensors-backend-pipeline`.
    """
    return lowered_to_linalg(torch_asm, options)


def lowered_to_linalg(
    torch_asm: str, options: CompileOptions, *, with_locations: bool = False
) -> str:
    """Do what `torch_to_linalg` does; the text has the locations of the ops if it is to."""
    from torch_mlir import ir

    with TorchMlirContext() as mlir:
        with mlir.context:
            module = ir.Module.parse(torch_asm)
        mlir.run(module, mlir.pipeline(PIPELINE, _CHECK) if options.kernels else PIPELINE)
        return str(module.operation.get_asm(enable_debug_info=with_locations))


def only_linalg(asm: str) -> str | None:
    """Name an op of the torch dialect that is left in the module, if any."""
    left = _TORCH_OP.search(asm)
    return f"{left[1]} was not lowered" if left else None


TORCH_TO_LINALG = Stage("torch-to-linalg", "linalg.mlir", torch_to_linalg, only_linalg)
