"""`npu_iree.register_kernel`: MLIR for a custom op of `torch.library`, to run on the device."""

from __future__ import annotations

import types
from collections.abc import Mapping

import torch
from torch._library.utils import has_fake_kernel

from lowering.kernel_calls import check_schema
from lowering.kernels import Kernel, KernelError
from lowering.key import package_version
from lowering.service import Limits
from lowering.stages import CompileOptions
from lowering.suggest import suggested
from npu_iree.errors import StageError
from npu_iree.targets import NPU_LOCAL
from npu_iree.workers import compile_service

Op = torch._ops.OpOverload | torch._ops.OpOverloadPacket | str

_CALLS_NOTHING = "func.func @main(%x: tensor<1xf32>) -> tensor<1xf32> { return %x : tensor<1xf32> }"
_KERNELS: dict[str, Kernel] = {}


def register_kernel(op: Op, mlir: str) -> None:
    """Supply what a custom op is on the device; without it, the op runs on the host.

    The kernel becomes part of the region that calls it, where the compiler fuses it with its
    neighbours, and part of the region's cache key. Graphs that were compiled before stay as they
    are. A later kernel for the same op takes the place of the first.

    Args:
        op: a custom op of `torch.library`, such as `"mylib::scale"`, with a fake (meta) kernel: the
            sizes of its results come from there.
        mlir: a module. Each public `func.func` is the op for the types that it takes: tensors with
            `?` for sizes that may be anything, and an `i64`, `f64` or `i1` for each Python number,
            in the order of the op's schema. A call takes the first that fits; where none does, it
            runs on the host. Private functions are theirs to call. Integers have no sign.

    Raises:
        KernelError: there is no such op, it has no fake kernel, it takes or gives what no kernel
            can, or the text cannot be parsed or has other arguments than the op.

    Example:
        npu_iree.register_kernel("mylib::twice", '''
          func.func @twice(%x: tensor<?xf32>) -> tensor<?xf32> {
            %0 = arith.addf %x, %x : tensor<?xf32>
            return %0 : tensor<?xf32>
          }''')
    """
    overload = _overload(op)
    kernel = Kernel.parse(str(overload), mlir)
    check_schema(overload, kernel)
    if not has_fake_kernel(overload):
        raise KernelError(
            f"{overload} has no shape function; give it one with torch.library.register_fake"
        )
    _check_text(kernel)
    _KERNELS[kernel.op] = kernel


def registered_kernels() -> Mapping[str, Kernel]:
    """Return the kernels that there are now, by their ops."""
    return types.MappingProxyType(dict(_KERNELS))


def _overload(op: Op) -> torch._ops.OpOverload:
    if isinstance(op, torch._ops.OpOverload):
        return op
    if isinstance(op, torch._ops.OpOverloadPacket):
        return op.default
    namespace, _, name = op.partition("::")
    name, _, overload = name.partition(".")
    packet = getattr(getattr(torch.ops, namespace), name, None) if namespace and name else None
    found = getattr(packet, overload or "default", None)
    if not isinstance(found, torch._ops.OpOverload):
        known = sorted(o for o in torch._C._dispatch_get_all_op_names() if not o.startswith("aten"))
        raise KernelError(
            f"there is no op {op!r}; it is defined with torch.library first.{suggested(op, known)}"
        )
    return found


def _check_text(kernel: Kernel) -> None:
    """Let the compiler read a kernel; a machine that only runs has none, and needs none."""
    if package_version("iree-base-compiler") == "not installed":
        return
    flags = NPU_LOCAL.compile.flag_sets[-1]
    options = CompileOptions(flags=flags, kernels={kernel.op: kernel.text})
    try:
        compile_service().run("linalg-to-flow", _CALLS_NOTHING, options, Limits())
    except StageError as error:
        raise KernelError(f"the kernel of {kernel.op} is no MLIR: {error.diagnostics}") from error
