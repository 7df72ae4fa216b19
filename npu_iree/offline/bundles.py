"""A bundle on the command line: the model is compiled by torch.compile, called once, and saved."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.exc import BackendCompilerFailed

from lowering.errors import ALLOW_HOST
from npu_iree.errors import NpuIreeError, OptionError, UnsupportedOpError
from npu_iree.offline.sources import load_examples
from npu_iree.offline.verify import call_eager, compare_results, copied


def write_bundle(
    sources: Sequence[str], path: Path, options: dict[str, Any], *, dynamic: bool = False
) -> dict[str, Any]:
    """Compile a model with torch.compile, call it, and save what was built.

    Args:
        sources: one source (see `npu_iree.offline.sources`).
        path: where to write it.
        options: of `torch.compile`.
        dynamic: whether sizes may change.

    Returns:
        What is to be told of it; `difference` is to eager, relative to the largest value.

    Raises:
        OptionError: there is more than one model.
        UnsupportedOpError: `options` forbid the host, and it is needed.
        SourceError: eager fails at the example inputs.
        VerificationError: it does not give eager's numbers.
    """
    from npu_iree.bundles import save_bundle

    examples = {k: v for source in sources for k, v in load_examples(source).items()}
    if len(examples) != 1:
        raise OptionError(f"a bundle is made of one model, not of {len(examples)}")
    ((name, example),) = examples.items()
    compiled = torch.compile(
        example.model, backend="npu_iree", options=options, dynamic=dynamic or None
    )
    expected = call_eager(name, example)
    args, kwargs = copied((example.args, example.kwargs))
    try:
        with torch.no_grad():
            actual = compiled(*args, **kwargs)
    except BackendCompilerFailed as error:  # how Dynamo wraps what we raise
        if isinstance(error.inner_exception, NpuIreeError):
            raise _as_option(error.inner_exception) from error
        raise
    difference = compare_results(name, (actual, (args, kwargs)), expected)
    save_bundle(compiled, path)
    return {"output": str(path), "bytes": path.stat().st_size, "difference": difference}


def _as_option(error: NpuIreeError) -> NpuIreeError:
    """Name the option of the command line where that of `torch.compile` would be named."""
    if not isinstance(error, UnsupportedOpError) or error.hint != ALLOW_HOST:
        return error
    why, hint = "--host-ops forbid keeps them off the host", "allow the host with --host-ops allow"
    return UnsupportedOpError(error.target, error.ops, why, hint)
