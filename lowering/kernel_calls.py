"""A graph's calls of custom ops, as their kernels see them: types of arguments and results."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from lowering.dtypes import dtype_name
from lowering.kernels import Kernel, KernelError, KernelType
from lowering.signature import NUMBERS

# What a schema calls a number -> what a kernel takes for it.
_NUMBERS = {**{kind.__name__: name for name, kind in NUMBERS.items()}, "SymInt": "i64"}


def check_schema(op: torch._ops.OpOverload, kernel: Kernel) -> None:
    """Check that a kernel's functions are what its op says in its schema.

    Raises:
        KernelError: the op takes what no kernel can, writes to its arguments, or a function takes
            or gives something else.
    """
    schema = op._schema
    if schema.is_mutable:
        raise KernelError(f"{op} writes to its arguments ({schema}); a kernel gives new tensors")
    wanted = [_schema_type(op, argument) for argument in schema.arguments]
    tensors = [str(r.type) for r in schema.returns]
    if set(tensors) != {"Tensor"}:
        raise KernelError(f"{op} gives {', '.join(tensors) or 'nothing'}; a kernel gives tensors")
    for function in kernel.functions:
        found = [None if t.shape is not None else t.element for t in function.arguments]
        if found != wanted or len(function.results) != len(tensors):
            expected = ", ".join(f"a {w}" if w else "a tensor" for w in wanted)
            raise KernelError(
                f"function @{function.name} of the kernel of {op} is {function}; by its schema "
                f"({schema}) it takes {expected}, and gives {len(tensors)} tensors"
            )


def why_no_kernel(node: fx.Node, kernel: Kernel) -> str | None:
    """Return why no function of its kernel can run a call, or None if one can."""
    arguments = _argument_types(node)
    known = [t for t in arguments if t is not None]
    function = kernel.function_for(known) if len(known) == len(arguments) else None
    if function is None:
        types = ", ".join("something else" if t is None else str(t) for t in arguments)
        taken = "; ".join(map(str, kernel.functions))
        return f"its kernel is for {taken}, and this call has ({types})"
    value = node.meta["val"]
    results = [_tensor_type(v) for v in (value if isinstance(value, (list, tuple)) else (value,))]
    pairs = zip(function.results, results, strict=True)
    if any(not ours.is_like(shape_functions) for ours, shape_functions in pairs):
        types = ", ".join(map(str, results))
        return f"its kernel is {function}, and its shape function gives ({types})"
    return None


def _schema_type(op: torch._ops.OpOverload, argument: Any) -> str | None:
    """Return what a kernel takes for an argument: the name of a number, or None for a tensor."""
    kind = str(argument.real_type)
    if kind == "Tensor":
        return None
    if kind not in _NUMBERS:
        raise KernelError(
            f"{op} takes {argument.name!r}, a {kind}; kernels take tensors and numbers "
            f"({', '.join(_NUMBERS)})"
        )
    return _NUMBERS[kind]


def _argument_types(node: fx.Node) -> list[KernelType | None]:
    """Return the types of a call's arguments in the order of the schema; None: no tensor."""
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    types: list[KernelType | None] = []
    for i, argument in enumerate(target._schema.arguments):
        kind = str(argument.real_type)
        if kind in _NUMBERS:
            types.append(KernelType(_NUMBERS[kind]))
            continue
        value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
        meta = value.meta.get("val") if isinstance(value, fx.Node) else None
        types.append(_tensor_type(meta) if isinstance(meta, torch.Tensor) else None)
    return types


def _tensor_type(tensor: torch.Tensor) -> KernelType:
    sizes = [size if isinstance(size, int) else None for size in tensor.shape]
    return KernelType.of(dtype_name(tensor.dtype), sizes)
