"""What `npu-iree compile` takes: `.pt2` files, and functions that return a model and its inputs."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import logging
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.export import Dim, ExportedProgram
from torch.utils._sympy.value_ranges import ValueRanges

from lowering.digest import file_digest
from lowering.errors import first_line
from lowering.ranges import LEAST_TRACED
from npu_iree.errors import FOREIGN, OptionError, SourceError

# A number of up to 18 digits fits into 64 bits.
_DYNAMIC = re.compile(
    r"(?P<input>\w+):(?P<dim>\d{1,18})(=(?P<low>\d{1,18})\.\.(?P<high>\d{0,18}))?"
)
# What PyTorch says of a type that this process has not registered.
_UNREGISTERED = re.compile(r"Deserializing (?P<type>\S+) in pytree is not registered")
_SHARED_SIZES = "Of inputs that share a size, each must be given: --dynamic ids:1 --dynamic mask:1"
_FUNCTION = re.compile(r"(?P<module>.+):(?P<function>\w+)")


@dataclass(frozen=True)
class Example:
    """A model and the arguments it is exported, or checked, with.

    Attributes:
        model: the module.
        args: positional arguments.
        kwargs: keyword arguments.
    """

    model: torch.nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


def load_programs(source: str, dynamic: Sequence[str]) -> dict[str, ExportedProgram]:
    """Export what a source names.

    Args:
        source: `file.pt2`, `package.module:function` or `file.py:function`, with `entry=` before
            it to name its entry point (`main` if not).
        dynamic: `input:dim`, `input:dim=min..max`: sizes that may change, of a function's model.

    Returns:
        The exported programs by the name of their entry point.

    Raises:
        OptionError: `dynamic` names what the source has not.
        SourceError: there is no such thing, or it cannot be exported.
    """
    entry, place = _named(source)
    if place.endswith(".pt2"):
        if dynamic:
            raise OptionError(
                f"{place} is exported already: its sizes are what they are (--dynamic)"
            )
        return {entry: _read_pt2(Path(place))}
    examples = load_examples(source)
    return {name: _export(name, example, dynamic) for name, example in examples.items()}


@cache
def load_examples(source: str) -> dict[str, Example]:
    """Get the models and arguments that a source names, by their entry points.

    A source is asked once a process: what is compiled and what it is compared with is one model,
    even if its function draws the weights.

    Raises:
        SourceError: there is no such thing, or it returns something else.
    """
    entry, place = _named(source)
    if place.endswith(".pt2"):
        program = _read_pt2(Path(place))
        if program.example_inputs is None:
            raise SourceError(f"{place} has no example inputs")
        args, kwargs = program.example_inputs
        return {entry: Example(program.module(), tuple(args), dict(kwargs))}
    function = _function(place)
    try:
        made = function()
    except FOREIGN as error:
        raise SourceError(f"{place} fails: {_told(error)}") from error
    if isinstance(made, Mapping):
        return {str(name): _example(place, pair) for name, pair in made.items()}
    return {entry: _example(place, made)}


def import_modules(names: Sequence[str]) -> None:
    """Import modules that register types which exported programs hold.

    Raises:
        SourceError: one cannot be imported.
    """
    for name in names:
        _import(name)


def source_record(sources: Sequence[str]) -> dict[str, str]:
    """Return what an artifact says of its sources: their names, and the SHA-256 of the files."""
    record = {"sources": " ".join(sources)}
    for source in sources:
        path = Path(re.sub(r"^\w+=", "", source).partition(":")[0])
        if path.is_file():
            record[f"sha256 of {path.name}"] = file_digest(path)
    return record


def _named(source: str) -> tuple[str, str]:
    """Return the entry point that a source is for, and the source without its name."""
    name, _, rest = source.partition("=")
    return (name, rest) if rest and name.isidentifier() else ("main", source)


def _read_pt2(path: Path) -> ExportedProgram:
    if not path.is_file():
        raise SourceError(f"there is no file {path}")
    causes: list[BaseException] = []  # torch.export logs the reason, and raises that there is one

    def keep(record: logging.LogRecord) -> bool:
        causes.extend([record.exc_info[1]] if record.exc_info and record.exc_info[1] else [])
        return False

    log = logging.getLogger("torch.export")
    log.addFilter(keep)
    try:
        return torch.export.load(path)
    except FOREIGN as error:  # whatever torch.export makes of bytes that are not its own
        reason = _why_unreadable((*causes, error)[0])
        raise SourceError(f"{path} is no exported program that can be read: {reason}") from error
    finally:
        log.removeFilter(keep)


def _why_unreadable(error: BaseException) -> str:
    if match := _UNREGISTERED.search(str(error)):
        module = match["type"].rpartition(".")[0]
        return f"it holds a {match['type']}; import what registers that type: --import {module}"
    return _line_of(error)


def _function(place: str) -> Callable[[], Any]:
    match = _FUNCTION.fullmatch(place)
    if match is None:
        raise SourceError(
            f"{place!r} is no source: give file.pt2, package.module:function, file.py:function, or "
            "an IR file of a stage"
        )
    module, name = match["module"], match["function"]
    loaded = _import_file(Path(module)) if module.endswith(".py") else _import(module)
    found = getattr(loaded, name, None)
    if not callable(found):
        raise SourceError(f"{module} has no function {name!r}")
    function: Callable[[], Any] = found
    return function


def _import(name: str) -> Any:
    with _importing(name, Path.cwd()):
        return importlib.import_module(name)


@contextlib.contextmanager
def _importing(name: str, folder: Path) -> Iterator[None]:
    """Find modules as `python -m` and `python file.py` do: in a folder, before all others."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        yield
    except FOREIGN as error:
        raise SourceError(f"cannot import {name}: {_told(error)}") from error


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise SourceError(f"there is no file {path}")
    return _imported(path.resolve())


@cache
def _imported(path: Path) -> Any:
    """Import a file once: what its functions share is one object."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise SourceError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    with _importing(str(path), path.parent):
        spec.loader.exec_module(module)
    return module


def _example(place: str, made: Any) -> Example:
    match made:
        case (torch.nn.Module() as model, Mapping() as kwargs):
            return Example(model, (), dict(kwargs))
        case (torch.nn.Module() as model, (tuple() as args, Mapping() as kwargs)):
            return Example(model, args, dict(kwargs))
        case (torch.nn.Module() as model, torch.Tensor() as tensor):
            return Example(model, (tensor,))
        case (torch.nn.Module() as model, (tuple() | list()) as args):
            return Example(model, tuple(args))
    raise SourceError(
        f"{place} returns {type(made).__name__}; it is to return (model, example inputs), where "
        "the inputs are a tuple, a dict or (tuple, dict); or a dict of such pairs by entry point"
    )


def _export(entry: str, example: Example, dynamic: Sequence[str]) -> ExportedProgram:
    try:
        shapes = _dynamic_shapes(example, dynamic)
        with torch.no_grad():
            program = torch.export.export(
                example.model, example.args, example.kwargs, dynamic_shapes=shapes
            )
        _keep_least(program, shapes or {})
        return program
    except OptionError:
        raise
    except FOREIGN as error:  # whatever model and torch.export say
        raise SourceError(f"torch.export cannot export {entry!r}: {_advice_of(error)}") from error


def _advice_of(error: BaseException) -> str:
    """Say what torch.export says, and of sizes how they are given here."""
    said = str(error).strip()
    if not said.startswith("Constraints violated"):
        return _line_of(error)
    told, _, fixes = said.partition("Suggested fixes:")
    lines = [*told.partition("\n\n")[0].splitlines(), *fixes.partition("\n\n")[0].splitlines()]
    return "\n".join([*filter(None, map(str.rstrip, lines)), _SHARED_SIZES])


def _dynamic_shapes(example: Example, dynamic: Sequence[str]) -> dict[str, Any] | None:
    """Write `--dynamic` as torch.export wants it; which sizes are equal it finds out itself."""
    if not dynamic:
        return None
    names = _arguments(example)
    shapes: dict[str, Any] = dict.fromkeys(names)
    for text in dynamic:
        match = _DYNAMIC.fullmatch(text)
        if match is None:
            raise OptionError(f"--dynamic is input:dim or input:dim=min..max, not {text!r}")
        if match["input"] not in shapes:
            raise OptionError(f"--dynamic {text}: there are the inputs {', '.join(names)}")
        dim, value = int(match["dim"]), names[match["input"]]
        if not isinstance(value, torch.Tensor) or dim >= value.dim():
            raise OptionError(f"--dynamic {text}: {match['input']} has no dimension {dim}")
        low, high = (int(size) if size else None for size in (match["low"], match["high"]))
        if low is not None and high is not None and low > high:
            raise OptionError(f"--dynamic {text}: {low} is more than {high}")
        hint = Dim.DYNAMIC(min=low, max=high)
        shapes[match["input"]] = {**(shapes[match["input"]] or {}), dim: hint}
    return shapes


def _keep_least(program: ExportedProgram, shapes: Mapping[str, Any]) -> None:
    """Let a program's sizes be as small as was asked for, which `Dim.DYNAMIC` forgets below 2."""
    ranges = program.range_constraints
    for node in program.graph.find_nodes(op="placeholder"):
        for dim, hint in (shapes.get(node.name) or {}).items():
            size = node.meta["val"].shape[dim]
            known = ranges.get(size.node.expr) if isinstance(size, torch.SymInt) else None
            if known is not None and known.lower == LEAST_TRACED and hint.min is not None:
                low = min(hint.min, LEAST_TRACED)
                ranges[size.node.expr] = ValueRanges(low, known.upper)


def _arguments(example: Example) -> dict[str, Any]:
    signature = inspect.signature(example.model.forward)
    bound = signature.bind(*example.args, **example.kwargs)
    arguments: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        arguments |= value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    return arguments


def _told(error: BaseException) -> str:
    """Say what the user's code raised, and where."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{_line_of(error)} (at {frames[-1].filename}:{frames[-1].lineno})"


def _line_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(str(error))}"
