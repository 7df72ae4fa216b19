"""`npu_iree.save_bundle`: what one `torch.compile` call has built, saved to run elsewhere."""

from __future__ import annotations

import gc
import inspect
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import CellType
from typing import Any

import torch
from torch._dynamo import eval_frame

from lowering.bundle import BuiltGraph, Origin, bundle_bytes, needed_features, write_bundle
from npu_iree.compiled_call import wrapper_locals
from npu_iree.errors import NpuIreeError


@dataclass(frozen=True)
class Caller:
    """One call of `torch.compile`.

    Attributes:
        context: Dynamo's object for it.
        backend: backend, mode, options and `dynamic`, compared by value, as Dynamo does.
        code: what is compiled: the code of a function, or the structure of a module. Identities,
            not references: code keeps what Dynamo built for it alive, which keeps this alive.
    """

    context: weakref.ref[object]
    backend: object
    code: object

    def shares_with(self, other: Caller) -> bool:
        """Say whether what was built for one may run for the other.

        Dynamo keeps what it built with the code, not with the call: where backend and code are
        equal, the second `torch.compile` finds what the first one has built.
        """
        if self.context() is not None and self.context() is other.context():
            return True
        return bool(self.backend == other.backend) and self.code == other.code


@dataclass(frozen=True)
class _Built:
    caller: Caller | None
    origin: Origin
    graph: BuiltGraph


# runner -> what it was built from; gone with the runner, that is, when Dynamo drops its graph.
_BUILT: weakref.WeakKeyDictionary[Callable[..., Any], _Built] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


def remember(
    runner: Callable[..., Any], caller: Caller | None, origin: Origin, graph: BuiltGraph
) -> None:
    """Keep what a graph was built from for as long as its runner lives."""
    with _LOCK:
        _BUILT[runner] = _Built(caller, origin, graph)


def save_bundle(compiled: Callable[..., Any], path: str | os.PathLike[str]) -> Path:
    """Save what `torch.compile(..., backend="npu_iree")` has built in this process.

    Call `compiled` first, in each way in which the bundle is to be used: with these shapes, with
    gradients (and `backward()`) or without. `options={"bundle": path, "compile": "never"}` then
    runs it in a process that has no compiler.

    Args:
        compiled: what `torch.compile` returned, or a module after `module.compile(...)`.
        path: where to write; by convention it ends in `.npub`.

    Returns:
        The path.

    Raises:
        NpuIreeError: nothing was built for it.
        ArtifactError: the file cannot be written.
    """
    asked = _caller_of(compiled)
    gc.collect()  # what Dynamo has dropped is gone then, and only then
    with _LOCK:
        found = [b for b in _BUILT.values() if b.caller is not None and b.caller.shares_with(asked)]
    if not found:
        raise NpuIreeError(
            "nothing was built for this in this process yet: call it first, as it will be called, "
            'and save it then. (It must be compiled with backend="npu_iree", and '
            "torch._dynamo.reset() forgets what was built.)"
        )
    write_bundle(Path(path), *_content(found))
    return Path(path)


def built_bytes(runner: Callable[..., Any]) -> bytes:
    """Return what one runner was built from, as the bytes of a bundle."""
    with _LOCK:
        built = _BUILT[runner]
    return bundle_bytes(*_content([built]))


def _content(found: Sequence[_Built]) -> tuple[Origin, Sequence[BuiltGraph]]:
    graphs = [built.graph for built in found]
    return replace(found[0].origin, cpu_features=needed_features(graphs)), graphs


def caller() -> Caller | None:
    """Return the call of torch.compile on whose behalf Dynamo asks for a graph now.

    None: the backend was called in another way.
    """
    found = wrapper_locals()
    return _caller(found["self"], found["fn"]) if found is not None else None


def _caller_of(compiled: Any) -> Caller:
    """Return the same for what torch.compile has returned."""
    wrapper = compiled
    if isinstance(compiled, eval_frame.OptimizedModule):
        wrapper = getattr(compiled, "_forward", compiled.forward)
    elif isinstance(compiled, torch.nn.Module):  # module.compile()
        wrapper = compiled._compiled_call_impl
    names = getattr(getattr(wrapper, "__code__", None), "co_freevars", ())
    cells: tuple[CellType, ...] = getattr(wrapper, "__closure__", None) or ()
    found = {name: cell.cell_contents for name, cell in zip(names, cells, strict=False)}
    if not {"self", "fn"} <= found.keys():
        raise NpuIreeError(
            f"save_bundle takes what torch.compile returned, not {type(compiled).__name__}"
        )
    return _caller(found["self"], found["fn"])


def _caller(context: Any, function: Any) -> Caller:
    backend = eval_frame.innermost_backend(context.callback)
    return Caller(weakref.ref(context), backend, _code(inspect.unwrap(function)))


def _code(function: Any) -> object:
    """Return what Dynamo shares by: the code of a function; of a module also what guards see."""
    owner = function if isinstance(function, torch.nn.Module) else None
    owner = owner or getattr(function, "__self__", None)
    if isinstance(owner, torch.nn.Module):
        shapes = [(p.shape, p.dtype) for p in owner.parameters()]
        return (tuple(id(type(module)) for module in owner.modules()), tuple(shapes))
    return id(getattr(function, "__code__", function))
