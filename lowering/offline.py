"""Compile exported programs into one module that runs without PyTorch's compiler."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import fx
from torch.export import ExportedProgram

from lowering.bisect import diagnose
from lowering.build import Builder
from lowering.capabilities import Capabilities
from lowering.decompositions import decomposition_table
from lowering.dispatches import list_dispatches
from lowering.dtypes import dtype_name
from lowering.errors import ExportError, FlagError, StageError, UnsupportedOpError
from lowering.export import Export, capture_export
from lowering.functional import functional
from lowering.heal import Healer, refuses_everything
from lowering.kernels import Kernel
from lowering.key import compiler_build
from lowering.manifest import Manifest, Parameter
from lowering.nodes import is_scalar
from lowering.partition import why_host
from lowering.program import Program
from lowering.ranges import LEAST_TRACED
from lowering.stored import StoredNames, check_apart
from lowering.tensor_digest import is_same_value, tensor_digest


@dataclass(frozen=True)
class OfflineProgram:
    """What exported programs were compiled into.

    Attributes:
        module: the .vmfb, without the manifest.
        manifest: what it says of itself.
        tensors: the parameters and states by name, as they were exported.
    """

    module: bytes
    manifest: Manifest
    tensors: Mapping[str, torch.Tensor]


def capture_exports(
    programs: Mapping[str, ExportedProgram],
    keep_ops: frozenset[str] = frozenset(),
    least_size: int = LEAST_TRACED,
) -> list[Export]:
    """Capture programs that share their parameters, by memory and by name.

    Args:
        programs: by the name of their entry point.
        keep_ops: ops that are not decomposed.
        least_size: of sizes that PyTorch says are 2 or more.

    Raises:
        ExportError: they cannot be held by one artifact; says why.
    """
    table = decomposition_table(keep_ops)
    programs = {n: functional(p, table, least_size) for n, p in programs.items()}
    names = StoredNames(programs)
    exports = [capture_export(n, p, names) for n, p in programs.items()]
    written = {name for export in exports for name in export.states.values()}
    check_apart(stored_tensors(exports), written)
    return exports


def check_exports(
    exports: Sequence[Export],
    target: str,
    capabilities: Capabilities,
    kernels: Mapping[str, Kernel] | None = None,
) -> None:
    """Check that the target runs every op, custom ones by their kernels.

    Raises:
        UnsupportedOpError: it does not; lists all that it cannot run.
    """
    ops = []
    for export in exports:
        nodes = [n for n in export.captured.nodes if not is_scalar(n)]
        ops += list(why_host(nodes, capabilities, kernels=kernels).values())
    if ops:
        raise UnsupportedOpError(target, ops, *_NO_HOST)


def compile_exports(
    exports: Sequence[Export], builder: Builder, *, driver: str, parameter_file: str = ""
) -> OfflineProgram:
    """Compile captured programs into one module.

    Args:
        exports: the programs; `check_exports` has passed them.
        builder: gets the module, from its cache or its stages.
        driver: the IREE driver that runs it.
        parameter_file: name of the file that will hold the parameters beside the artifact; empty
            if the builder's flags compile them in.

    Raises:
        UnsupportedOpError: the compiler refused some ops; lists them.
        StageError: it refused the program, but none of its ops alone.
    """
    regions = {export.name: export.region() for export in exports}
    calls = {export.name: export.call(regions[export.name]) for export in exports}
    try:
        program = Program("+".join(regions), regions)
        entry = builder.program(program)
    except FlagError:
        raise
    except StageError as error:
        _blame(exports, builder, error)
        raise
    tensors = stored_tensors(exports)
    manifest = Manifest(
        entries=calls,
        parameters=_parameters(exports, tensors),
        states=tuple(sorted({name for e in exports for name in e.states.values()})),
        parameter_file=parameter_file,
        target=builder.target.name,
        driver=driver,
        cpu_features=entry.cpu_features,
        flags=entry.flags,
        versions=compiler_build(),
        dispatches=list_dispatches(program, builder.target, entry.flags, builder.toolchain),
    )
    return OfflineProgram(entry.vmfb, manifest, tensors)


def _blame(exports: Sequence[Export], builder: Builder, error: StageError) -> None:
    """Find out which ops the compiler refuses, and raise an error that lists them, if any."""
    if refuses_everything(builder):
        return
    ops = []
    for export in exports:
        blamed = _refused(export, builder)
        nodes = [n for n in export.captured.nodes if n in blamed]
        ops += list(why_host(nodes, _ANYTHING, failed=blamed).values())
    if ops:
        raise UnsupportedOpError(builder.target.name, ops, *_NO_HOST) from error


def _refused(export: Export, builder: Builder) -> dict[fx.Node, str]:
    healer = Healer(builder, None, export.captured)
    with tempfile.TemporaryDirectory(prefix="npu-iree-") as scratch:

        def attempt(nodes: Sequence[fx.Node]) -> StageError | None:
            return builder.attempt(healer.region(nodes), Path(scratch))

        nodes = export.segment.nodes
        error = attempt(nodes)
        blamed = diagnose(nodes, error, attempt).blamed if error is not None else {}
    return {node: f"the compiler refuses it: {e.summary}" for node, e in blamed.items()}


def stored_tensors(exports: Sequence[Export]) -> dict[str, torch.Tensor]:
    """Put together the tensors of all entry points, by the names that they are stored under.

    Raises:
        ExportError: two of them have different values under one name.
    """
    known: dict[str, torch.Tensor] = {}
    for export in exports:
        for name, tensor in export.tensors.items():
            first = known.setdefault(name, tensor)
            if first is not tensor and not is_same_value(first, tensor):
                raise ExportError(
                    f"parameter {name} is another tensor in entry point {export.name!r} than in "
                    "the ones before it; entry points of one artifact share their parameters"
                )
    found: dict[str, torch.Tensor] = {}
    for export in exports:
        for name, stored in export.stored.items():
            if name == stored:  # not where a tensor of that name is stored under another one
                found.setdefault(name, export.tensors[name])
    return found


def _parameters(
    exports: Sequence[Export], tensors: Mapping[str, torch.Tensor]
) -> tuple[Parameter, ...]:
    saved = frozenset().union(*(export.saved for export in exports))
    names: dict[str, set[str]] = defaultdict(set)
    for export in exports:
        for name, stored in export.stored.items():
            names[stored].add(name)
    return tuple(
        Parameter(
            name=name,
            dtype=dtype_name(tensor.dtype),
            shape=tuple(tensor.shape),
            sha256=tensor_digest(tensor),
            aliases=tuple(sorted(names[name] - {name})),
            is_saved=not saved.isdisjoint(names[name]),
        )
        for name, tensor in sorted(tensors.items())
    )


_NO_HOST = (
    "an artifact has no host to run them on",
    "make a bundle, which has one: npu-iree compile --host-ops allow --bundle",
)
_ANYTHING = Capabilities("", {}, {}, ())
