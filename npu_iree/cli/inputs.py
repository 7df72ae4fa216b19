"""What commands that call an artifact are given: its entry point, and inputs from the user."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from lowering.arithmetic import evaluate, names_in
from lowering.dtypes import DTYPES
from lowering.errors import first_line
from lowering.manifest import Argument, Call
from lowering.signature import ScalarSpec, TensorSpec
from npu_iree.errors import ArgumentError, ArtifactError, OptionError
from npu_iree.offline.entry import LoadedEntry
from npu_iree.offline.load import LoadedProgram, load
from npu_iree.offline.parameter_files import read_parameters

Artifact = Annotated[Path, typer.Argument(help="what npu-iree compile wrote")]
Inputs = Annotated[
    list[str],
    typer.Option(
        "--input",
        metavar="NAME=FILE.npy|@rand|NUMBER",
        help="an input, by name; @rand: drawn from a fixed seed; of a dtype that NumPy has not, "
        "FILE.safetensors, with a tensor of that name or a single one",
    ),
]
Entry = Annotated[str | None, typer.Option(help="the entry point, if there are several")]
Target = Annotated[str | None, typer.Option(help="run on another target with the same driver")]
Params = Annotated[Path | None, typer.Option(help="another .safetensors or .irpa file to bind")]
Sizes = Annotated[
    list[str],
    typer.Option("--size", metavar="SYMBOL=N", help="a dynamic size, for @rand; or INPUT:DIM=N"),
]
AsJson = Annotated[bool, typer.Option("--json", help="print it as JSON")]
NONE: list[str] = []
_MOST_DIGITS = 18  # of a number that 64 bits hold, whatever it is
_SUFFIXES = (".np", ".safetensors")  # of .npz it is told that it cannot be read


def open_entry(
    artifact: Path, entry: str | None, target: str | None, params: Path | None
) -> LoadedEntry:
    """Load an artifact; return the entry point that is named, or the only one."""
    return entry_of(load(artifact, target, params=params), entry)


def entry_of(program: LoadedProgram, entry: str | None) -> LoadedEntry:
    """Return the entry point that is named, or the only one."""
    return program[entry] if entry is not None else program.only()


def make_arguments(
    function: LoadedEntry, inputs: list[str], sizes: list[str], *, drawn: bool = False
) -> list[Any]:
    """Make the leaves of a call from `name=value` texts; `drawn`: what is not given is drawn."""
    given: dict[str, str] = dict(_pair(text, "--input") for text in inputs)
    pairs = (_pair(text, "--size") for text in sizes)
    known = {_symbol(name, function.call): _int(text, name) for name, text in pairs}
    if unknown := [n for n in known if n not in function.call.symbols]:
        there = ", ".join(function.call.symbols) or "none"
        raise OptionError(f"no size {', '.join(unknown)}; there are: {there}")
    names = [a.name for a in function.call.arguments]
    if unknown := [n for n in given if n not in names]:
        raise ArgumentError(f"no input {', '.join(unknown)}; there are {', '.join(names)}")
    missing = [
        a.name for a in function.call.arguments if a.spec is not None and a.name not in given
    ]
    if missing and not drawn:
        raise ArgumentError(
            f"missing: {', '.join(f'--input {n}=...' for n in missing)} (a file, or @rand)"
        )
    generator = torch.Generator().manual_seed(0)
    return [
        _value(a, given.get(a.name, "@rand"), function.call, known, generator)
        for a in function.call.arguments
    ]


def _value(
    argument: Argument, text: str, call: Call, sizes: dict[str, int], generator: torch.Generator
) -> Any:
    spec = argument.spec
    if spec is None:
        if text not in ("@rand", str(argument.value)):
            raise ArgumentError(
                f"{argument.name} was compiled in as {argument.value!r}, and cannot be {text!r}: "
                "leave it out, or compile the model for that value"
            )
        return argument.value
    if isinstance(spec, ScalarSpec):
        if argument.symbol and text == "@rand":
            return _size(argument.symbol, call, sizes)
        return _number(spec.dtype, text, argument.name)
    if text != "@rand":
        path = Path(text.removeprefix("@"))
        if not path.suffix.startswith(_SUFFIXES) and not os.path.exists(path):
            raise ArgumentError(
                f"{argument.name} is a tensor ({spec}): give FILE.npy, FILE.safetensors or @rand, "
                f"not {text!r}"
            )
        return _read(argument.name, path)
    shape = [size if isinstance(size, int) else _size(size, call, sizes) for size in spec.shape]
    try:
        return _drawn(shape, DTYPES[spec.dtype], generator)
    except (RuntimeError, MemoryError) as error:
        raise ArgumentError(
            f"{argument.name} of {shape} cannot be drawn: {first_line(error)}"
        ) from error


def _drawn(shape: list[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


def _symbol(name: str, call: Call) -> str:
    """Return the symbol of a size that may be named as an input's dimension, as `x:0`."""
    place, _, dim = name.partition(":")
    shapes = {a.name: a.spec.shape for a in call.arguments if isinstance(a.spec, TensorSpec)}
    shape = shapes.get(place, ())
    number = whole_number(dim)
    return str(shape[number]) if number is not None and number < len(shape) else name


def _size(symbol: str, call: Call, sizes: dict[str, int]) -> int:
    if symbol in sizes:
        return sizes[symbol]
    if not symbol.isidentifier():
        try:
            return int(evaluate(symbol, {n: _size(n, call, sizes) for n in names_in(symbol)}))
        except ValueError as error:
            raise OptionError(f"give the input of size {symbol} by a file: {error}") from error
    low, high = call.symbols.get(symbol, (1, None))
    return max(low, 16) if high is None else min(max(low, 16), high)


def _read(name: str, path: Path) -> torch.Tensor:
    if path.suffix == ".safetensors":
        return _read_safetensors(name, path)
    try:
        with path.open("rb") as file:
            array = np.lib.format.read_array(file, allow_pickle=False)
        # Copied: a device thread may free it last, which for NumPy's memory takes an interpreter.
        return torch.tensor(array)
    except (OSError, ValueError, TypeError, MemoryError) as error:
        raise ArgumentError(f"cannot read input {name} from {path}: {error}") from error


def _read_safetensors(name: str, path: Path) -> torch.Tensor:
    """Read the tensor of a name, or the only one there is."""
    try:
        stored, data = read_parameters(path)
    except ArtifactError as error:
        raise ArgumentError(f"cannot read input {name} from {path}: {error.reason}") from error
    found = stored.get(name) or (next(iter(stored.values())) if len(stored) == 1 else None)
    if found is None or found.dtype not in DTYPES or found.shape is None:
        raise ArgumentError(f"cannot read input {name} from {path}: it has no such tensor")
    memory = data[found.begin : found.begin + found.nbytes].clone()
    return memory.view(DTYPES[found.dtype]).reshape(found.shape)


def _pair(text: str, option: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise OptionError(f"{option} is name=value, not {text!r}")
    return name, value


def _int(text: str, name: str) -> int:
    number = whole_number(text)
    if number is None:
        raise OptionError(f"{name} is a size, not {text!r}")
    return number


def whole_number(text: str) -> int | None:
    """Return the number that a text is, from 0 on; None if it is none, or a larger one than any."""
    return int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else None


def _number(dtype: str, text: str, name: str) -> int | float | bool:
    kind, read = _NUMBERS[dtype]
    try:
        return read("1" if text == "@rand" else text)
    except (KeyError, ValueError) as error:
        raise OptionError(f"{name} is {kind}, not {text!r}") from error


# dtype of a number -> what it is, and how it is read.
_NUMBERS: dict[str, tuple[str, Callable[[str], int | float | bool]]] = {
    "i64": ("a whole number", int),
    "f64": ("a number", float),
    "i1": ("true or false", {"true": True, "false": False, "1": True, "0": False}.__getitem__),
}
