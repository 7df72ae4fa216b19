"""What an offline artifact says of itself: plain data, as JSON inside the .vmfb; stdlib only.

A .vmfb of IREE's is also a zip file; the manifest is one more member of it, so that the file stays
one that stock IREE tools run and any zip tool opens. FORMAT says which fields there are; another
number is refused. Compatible additions do not change it: unknown fields are ignored.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_args

from lowering.artifact import EntryPoint
from lowering.signature import Check, CheckKind, ScalarSpec, Signature, TensorSpec

FORMAT = 1
MEMBER = "npu_iree.json"

_Item = TypeVar("_Item")
_Read = TypeVar("_Read")
Number = int | float | bool
Constant = Number | str | None


@dataclass(frozen=True)
class Argument:
    """One leaf of the arguments of an entry point's call.

    Attributes:
        name: what the user calls it.
        spec: the tensor or number that it is; None for a value that was compiled in.
        value: that value.
        symbol: of a whole number that may change: what it is to sizes, an expression of symbols.
    """

    name: str
    spec: TensorSpec | ScalarSpec | None
    value: Constant = None
    symbol: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.spec if self.spec is not None else repr(self.value)}"


@dataclass(frozen=True)
class Source:
    """Where a value of a call comes from.

    Attributes:
        kind: `argument` and `result` (with `index`), `state` and `parameter` (with `name`),
            `constant` (with `value`), `size` (with `name`, an expression of symbols).
        index: position among the arguments, or among the results of the function.
        name: of a state or parameter, or an expression.
        value: a constant.
    """

    kind: str
    index: int = -1
    name: str = ""
    value: Constant = None


@dataclass(frozen=True)
class Call:
    """How a call of an entry point becomes a call of its function.

    Attributes:
        arguments: the leaves of the call's arguments, in order.
        in_tree: their structure, a `torch.utils._pytree` spec as text, of (args, kwargs).
        names: of the positional and keyword arguments, in order.
        function: what the function takes and gives.
        takes: where each argument of the function comes from: an argument or a state.
        outputs: where each leaf of the result comes from.
        out_tree: the structure of the result.
        symbols: symbolic size -> its least and largest value (None: no limit).
        writes: what the call changes: (argument or state, the result it is set to).
        ops: what is computed: op names and the user's lines.
        guards: what must be true of the symbolic sizes.
    """

    arguments: tuple[Argument, ...]
    in_tree: str
    names: tuple[str, ...]
    function: Signature
    takes: tuple[Source, ...]
    outputs: tuple[Source, ...]
    out_tree: str
    symbols: Mapping[str, tuple[int, int | None]] = field(default_factory=dict)
    writes: tuple[tuple[Source, Source], ...] = ()
    ops: tuple[tuple[str, str], ...] = ()
    guards: tuple[str, ...] = ()

    @property
    def entry_point(self) -> EntryPoint:
        """The function, as an executable knows it."""
        return EntryPoint(self.function, self.ops)


@dataclass(frozen=True)
class Parameter:
    """A tensor that is bound at load.

    Attributes:
        name: its name in the model's `state_dict`.
        dtype: its name in `lowering.dtypes`.
        shape: its sizes.
        sha256: of its bytes, dense and in the order of its dimensions.
        aliases: other names of the same tensor, where weights are tied.
        is_saved: whether a `state_dict` has it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str
    aliases: tuple[str, ...] = ()
    is_saved: bool = True


@dataclass(frozen=True)
class Dispatch:
    """One of the device programs that calls are made of.

    Attributes:
        name: its name in the module.
        ops: op names and the lines of the model that it computes; what it is named for first.
        nbytes: what its operands and results take; None if that depends on dynamic sizes
            or on data.
        flops: its arithmetic; None if that depends on dynamic sizes, or is not known.
    """

    name: str
    ops: tuple[tuple[str, str], ...] = ()
    nbytes: int | None = None
    flops: int | None = None


@dataclass(frozen=True)
class Manifest:
    """What an offline artifact says of itself.

    Attributes:
        entries: the entry points, by name.
        parameters: what is bound at load, or was compiled in.
        states: names of those parameters that calls change; they start as the file has them.
        parameter_file: name of the file beside the artifact that holds the parameters; empty if
            they are in the module.
        target: name of the target.
        driver: the IREE driver that runs it.
        cpu_features: what a CPU must have to run it.
        flags: the `iree-compile` flags.
        versions: package -> version that compiled it.
        source: what it was compiled from, and that file's SHA-256.
        dispatches: its device programs, for a profile; empty if they are not known.
        module_bytes: how long the module is, without this manifest.
        module_sha256: of these bytes.
        format: of the manifest.
    """

    entries: Mapping[str, Call]
    parameters: tuple[Parameter, ...]
    states: tuple[str, ...]
    parameter_file: str
    target: str
    driver: str
    cpu_features: tuple[str, ...]
    flags: tuple[str, ...]
    versions: Mapping[str, str]
    source: Mapping[str, str] = field(default_factory=dict)
    dispatches: tuple[Dispatch, ...] = ()
    module_bytes: int = 0
    module_sha256: str = ""
    format: int = FORMAT

    def to_json(self) -> str:
        """Write it as JSON."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Read it.

        Raises:
            ValueError: it is of another format, or makes no sense; says where.
        """
        try:
            row = json.loads(text)
        except ValueError as error:
            raise ValueError(f"its manifest is no JSON: {error}") from error
        found = row.get("format") if isinstance(row, dict) else None
        if found != FORMAT:
            age = "a newer" if isinstance(found, int) and found > FORMAT else "an older or damaged"
            raise ValueError(
                f"its manifest has format {found!r}, and this version of npu_iree reads format "
                f"{FORMAT}: {age} one; compile it again, or install the version that wrote it "
                f"({_text(row, 'versions') if isinstance(row, dict) else 'unknown'})"
            )
        return _manifest(_Row(row, "manifest"))


class _Row:
    """A JSON object whose fields are taken by type; what is wrong is told with its place."""

    def __init__(self, values: Any, place: str) -> None:
        if not isinstance(values, dict):
            raise ValueError(f"{place} is no object but {_short(values)}")
        self.values = values
        self.place = place

    def take(self, name: str, kind: type[_Item]) -> _Item:
        if name not in self.values:
            raise ValueError(f"{self.place} has no {name}")
        value = self.values[name]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ValueError(f"{self.place}: {name} is no {kind.__name__} but {_short(value)}")
        return value

    def rows(self, name: str) -> list[_Row]:
        items = self.take(name, list)
        return [_Row(item, f"{self.place}.{name}[{i}]") for i, item in enumerate(items)]

    def items(self, name: str, *kinds: type[_Item]) -> tuple[_Item, ...]:
        items = self.take(name, list)
        for item in items:
            if not isinstance(item, kinds) or isinstance(item, bool):
                wanted = " or ".join(kind.__name__ for kind in kinds)
                raise ValueError(f"{self.place}: {_short(item)} in {name} is no {wanted}")
        return tuple(items)

    def row(self, name: str) -> _Row:
        return _Row(self.take(name, dict), f"{self.place}.{name}")


def _manifest(row: _Row) -> Manifest:
    entries = {name: _call(row.row("entries").row(name)) for name in row.take("entries", dict)}
    return Manifest(
        entries=entries,
        parameters=tuple(map(_parameter, row.rows("parameters"))),
        states=row.items("states", str),
        parameter_file=row.take("parameter_file", str),
        target=row.take("target", str),
        driver=row.take("driver", str),
        cpu_features=row.items("cpu_features", str),
        flags=row.items("flags", str),
        versions={k: str(v) for k, v in row.take("versions", dict).items()},
        source={k: str(v) for k, v in row.take("source", dict).items()},
        dispatches=_if_there(row, "dispatches", _dispatch),
        module_bytes=row.take("module_bytes", int),
        module_sha256=row.take("module_sha256", str),
    )


def _call(row: _Row) -> Call:
    function = row.row("function")
    return Call(
        arguments=tuple(_argument(r) for r in row.rows("arguments")),
        in_tree=row.take("in_tree", str),
        names=row.items("names", str),
        function=Signature(
            inputs=tuple(_spec(r) for r in function.rows("inputs")),
            parameters=tuple(_tensor(r) for r in function.rows("parameters")),
            outputs=tuple(_tensor(r) for r in function.rows("outputs")),
            checks=_if_there(function, "checks", _check),
        ),
        takes=tuple(_source(r) for r in row.rows("takes")),
        outputs=tuple(_source(r) for r in row.rows("outputs")),
        out_tree=row.take("out_tree", str),
        symbols={name: _range(row, name) for name in row.take("symbols", dict)},
        writes=_pairs(row, "writes", _source_at),
        ops=_pairs(row, "ops", _text_at),
        guards=row.items("guards", str) if "guards" in row.values else (),
    )


def _argument(row: _Row) -> Argument:
    spec = row.values.get("spec")
    return Argument(
        name=row.take("name", str),
        spec=None if spec is None else _spec(row.row("spec")),
        value=_constant(row),
        symbol=row.take("symbol", str) if "symbol" in row.values else "",
    )


def _spec(row: _Row) -> TensorSpec | ScalarSpec:
    return _tensor(row) if "shape" in row.values else ScalarSpec(row.take("dtype", str))


def _tensor(row: _Row) -> TensorSpec:
    order = row.items("order", int)
    shape: tuple[int | str, ...] = row.items("shape", int, str)
    if sorted(order) != list(range(len(shape))):
        raise ValueError(f"{row.place}: order {list(order)} is none of {len(shape)} dimensions")
    return TensorSpec(row.take("dtype", str), shape, order)


def _source(row: _Row) -> Source:
    kind = row.take("kind", str)
    if kind not in ("argument", "result", "state", "parameter", "constant", "size"):
        raise ValueError(f"{row.place}: no value comes from a {_short(kind)}")
    return Source(kind, row.take("index", int), row.take("name", str), _constant(row))


def _check(row: _Row) -> Check:
    kind = row.take("kind", str)
    if kind not in get_args(CheckKind):
        raise ValueError(f"{row.place}: nothing is known of a check of the kind {_short(kind)}")
    return Check(kind, row.take("text", str))  # type: ignore[arg-type]


def _if_there(row: _Row, name: str, read: Callable[[_Row], _Read]) -> tuple[_Read, ...]:
    """Read rows that the first versions of the format did not write."""
    return tuple(map(read, row.rows(name))) if name in row.values else ()


def _dispatch(row: _Row) -> Dispatch:
    counts = {name: row.values.get(name) for name in ("nbytes", "flops")}
    known = {name: row.take(name, int) for name, count in counts.items() if count is not None}
    return Dispatch(row.take("name", str), _pairs(row, "ops", _text_at), **known)


def _parameter(row: _Row) -> Parameter:
    return Parameter(
        name=row.take("name", str),
        dtype=row.take("dtype", str),
        shape=row.items("shape", int),
        sha256=row.take("sha256", str),
        aliases=row.items("aliases", str),
        is_saved=row.take("is_saved", bool) if "is_saved" in row.values else True,
    )


def _range(row: _Row, name: str) -> tuple[int, int | None]:
    limits = row.values["symbols"][name]
    match limits:
        case [int(low), int() | None as high]:
            return low, high
    raise ValueError(f"{row.place}: {_short(limits)} is no range of the size {name}")


def _pairs(row: _Row, name: str, read: Callable[[Any, str], Any]) -> tuple[Any, ...]:
    pairs = []
    for i, pair in enumerate(row.take(name, list)):
        place = f"{row.place}.{name}[{i}]"
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError(f"{place} is no pair but {_short(pair)}")
        pairs.append((read(pair[0], place), read(pair[1], place)))
    return tuple(pairs)


def _source_at(value: Any, place: str) -> Source:
    return _source(_Row(value, place))


def _text_at(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{place} is no text but {_short(value)}")
    return value


def _constant(row: _Row) -> Constant:
    value = row.values.get("value")
    if value is not None and not isinstance(value, (int, float, str)):
        raise ValueError(f"{row.place}: {_short(value)} is no constant")
    return value


def _text(row: Mapping[str, Any], name: str) -> str:
    return _short(row.get(name, "unknown"))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
