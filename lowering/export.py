"""The second door: an `ExportedProgram` of torch.export, as one region and what its calls are.

Everything runs on the device, or the export is refused with a list of what cannot.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ConstantArgument,
    InputKind,
    InputSpec,
    OutputKind,
    SymIntArgument,
    TensorArgument,
)
from torch.utils import _pytree as pytree

from lowering.arithmetic import can_evaluate
from lowering.capture import CapturedGraph
from lowering.dtypes import DTYPE_NAMES
from lowering.errors import ExportError
from lowering.manifest import Argument, Call, Constant, Source
from lowering.nodes import is_number
from lowering.normalize import normalize
from lowering.ranges import guards_of, symbol_ranges
from lowering.region import Region, extract_region, tensor_spec, value_spec
from lowering.segments import DEVICE, Segment
from lowering.stored import RESULTS, StoredNames, value_of
from lowering.tensor_digest import memory_of

# Asserts what the export saw of dtypes and devices; each call is checked against that anyway.
_CHECKED_AT_THE_CALL = torch.ops.aten._assert_tensor_metadata.default
_WEIGHTS = (InputKind.PARAMETER, InputKind.BUFFER)


@dataclass(frozen=True)
class Export:
    """An exported program, captured.

    Attributes:
        name: of its entry point.
        captured: the graph; its inputs are the user's, then the buffers that it writes to.
        parameters: the name that each weight's node is stored under, one of the `state_dict`.
        states: the same of each node of a buffer that a call writes to.
        stored: name -> the name that it is stored under, its own or another of the same tensor.
        saved: those of the names that a `state_dict` has.
        tensors: the values, by all names.
        symbols: symbolic size -> its range.
        guards: what else must be true of these sizes.
        program: where it comes from.
    """

    name: str
    captured: CapturedGraph
    parameters: Mapping[fx.Node, str]
    states: Mapping[fx.Node, str]
    stored: Mapping[str, str]
    saved: frozenset[str]
    tensors: Mapping[str, torch.Tensor]
    symbols: Mapping[str, tuple[int, int | None]]
    guards: tuple[str, ...]
    program: ExportedProgram

    @property
    def segment(self) -> Segment:
        """All of it, as one device segment."""
        return Segment(DEVICE, list(self.captured.nodes), self.name)

    def region(self) -> Region:
        """Extract all of it as one region, its parameters named as in the `state_dict`.

        For tools that know no manifest, its function takes the arguments in the model's order, then
        the states, and gives the results in the model's order, then what is written.

        Raises:
            ExportError: it computes nothing.
        """
        if not self.captured.nodes:
            raise ExportError(f"entry point {self.name!r} computes nothing")
        specs = self.program.graph_signature.output_specs
        pairs = [*zip(specs, self.captured.outputs, strict=True)]
        results = [v for spec, v in pairs if spec.kind in RESULTS]
        written = [v for spec, v in pairs if spec.kind not in RESULTS]
        nodes = [v for v in (*results, *written) if isinstance(v, fx.Node)]
        order = (*self.captured.inputs, *nodes)
        return extract_region(self.segment, self.captured.weights, self.parameters, order)

    def call(self, region: Region) -> Call:
        """Say how a call of the program becomes a call of the region's function."""
        specs = self.program.graph_signature.input_specs
        placeholders = self.captured.graph_module.graph.find_nodes(op="placeholder")
        users = [s for s in specs if s.kind is InputKind.USER_INPUT]
        by_name = {n.name: n for n in placeholders}
        arguments = tuple(_argument(s, by_name) for s in users)
        sources = {by_name[s.arg.name]: Source("argument", i) for i, s in enumerate(users)}
        sources |= {n: Source("state", name=name) for n, name in self.states.items()}
        known = dict(sources)
        known |= {n: Source("parameter", name=name) for n, name in self.parameters.items()}
        known |= {n: Source("result", i) for i, n in enumerate(region.outputs)}
        outputs, writes = self._outputs(known)
        tree = self.program.call_spec
        return Call(
            arguments=arguments,
            in_tree=_tree_text(tree.in_spec, "arguments"),
            names=tuple(_argument_names(self.program)),
            function=region.signature,
            takes=tuple(sources[n] for n in region.inputs),
            outputs=tuple(outputs),
            out_tree=_tree_text(tree.out_spec, "results"),
            symbols=self.symbols,
            writes=tuple(writes),
            ops=tuple((op, str(line)) for op, line in region.ops),
            guards=self.guards,
        )

    def _outputs(
        self, known: Mapping[fx.Node, Source]
    ) -> tuple[list[Source], list[tuple[Source, Source]]]:
        """Return where the results come from, and what is written where."""
        targets = {
            **{
                n.name: Source("argument", s.index)
                for n, s in known.items()
                if s.kind == "argument"
            },
            **{name: Source("state", name=stored) for name, stored in self.stored.items()},
        }
        outputs, writes = [], []
        specs = self.program.graph_signature.output_specs
        for spec, value in zip(specs, self.captured.outputs, strict=True):
            source = _source(value, known, self.symbols)
            if spec.kind in RESULTS:
                outputs.append(source)
            else:
                writes.append((targets[str(spec.target)], source))
        return outputs, writes


def capture_export(name: str, program: ExportedProgram, names: StoredNames) -> Export:
    """Take an exported program.

    Args:
        name: what its entry point is to be called.
        program: what `functional` made.
        names: of what it stores. Buffers that a call of this or of another entry point writes to
            are arguments and results of each call.

    Raises:
        ExportError: it has inputs or results of a kind that no artifact can hold.
    """
    graph_module = program.graph_module
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    inputs = _Inputs(name, program, names)
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        inputs.take(node, spec)
    for node in graph_module.graph.find_nodes(op="call_function", target=_CHECKED_AT_THE_CALL):
        graph_module.graph.erase_node(node)
    constants = normalize(graph_module)
    _give_own_values(program)
    captured = CapturedGraph(
        graph_module,
        tuple(n for n in (*inputs.passed, *inputs.states) if _is_passed(n)),
        frozenset(inputs.parameters),
        constants,
    )
    return Export(
        name=name,
        captured=captured,
        parameters=inputs.parameters,
        states=inputs.states,
        stored=inputs.stored,
        saved=frozenset(inputs.saved),
        tensors=inputs.tensors,
        symbols=symbol_ranges(program),
        guards=guards_of(program),
        program=program,
    )


class _Inputs:
    """The placeholders of an exported program, sorted by where their values come from.

    Attributes:
        passed: those that a caller passes.
        parameters: weights, by the names that they are stored under.
        states: buffers that calls write to, by these names.
        stored: the name that each name's tensor is stored under.
        saved: names that a `state_dict` has.
        tensors: the values of weights and states, by all names.
    """

    def __init__(self, entry: str, program: ExportedProgram, names: StoredNames) -> None:
        self.passed: list[fx.Node] = []
        self.parameters: dict[fx.Node, str] = {}
        self.states: dict[fx.Node, str] = {}
        self.stored: dict[str, str] = {}
        self.saved: set[str] = set()
        self.tensors: dict[str, torch.Tensor] = {}
        self._entry = entry
        self._program = program
        self._names = names
        self._nodes: dict[str, fx.Node] = {}  # by the names that they are stored under

    def take(self, node: fx.Node, spec: InputSpec) -> None:
        """Sort one placeholder in.

        Raises:
            ExportError: it is of a kind that no artifact can hold.
        """
        if spec.kind in (InputKind.USER_INPUT, InputKind.TOKEN):  # who has a token is on the host
            self.passed.append(node)
            return
        if spec.kind not in (*_WEIGHTS, InputKind.CONSTANT_TENSOR):
            raise ExportError(
                f"{self._entry}: input {node.name} is a {spec.kind.name}, which no artifact holds"
            )
        target = str(spec.target)
        value = value_of(self._program, target)
        is_saved = spec.kind in _WEIGHTS and spec.persistent is not False
        is_written = spec.kind in _WEIGHTS and self._names.is_written(target, value)
        if not is_saved and not is_written:
            _inline(self._program.graph_module, node, value)
            return
        self.saved |= {target} if is_saved else set()
        self._store(node, target, value, self.states if is_written else self.parameters)

    def _store(
        self, node: fx.Node, name: str, value: torch.Tensor, nodes: dict[fx.Node, str]
    ) -> None:
        """Store a tensor, or give one that is stored already another name."""
        if value.dtype not in DTYPE_NAMES:
            raise ExportError(f"{self._entry}: {name} is {value.dtype}, which no artifact holds")
        stored = self.stored[name] = self._names.name_of(name, value)
        for called in (name, stored):
            if memory_of(self.tensors.setdefault(called, value)) != memory_of(value):
                raise ExportError(
                    f"{self._entry}: {name} is what another entry point calls {stored}, and "
                    f"{called} is another tensor here; entry points share their parameters by name"
                )
        first = self._nodes.setdefault(stored, node)
        if first is not node:
            node.replace_all_uses_with(first)
            return
        nodes[node] = stored
        node.meta["val"] = _dense(node.meta["val"])  # in the file, whatever it is here


def _inline(graph_module: fx.GraphModule, node: fx.Node, value: torch.Tensor) -> None:
    """Make a placeholder a constant of the graph: no `state_dict` has it."""
    names = (f"constant_{i}" for i in itertools.count())
    name = next(n for n in names if not hasattr(graph_module, n))
    graph_module.register_buffer(name, value.contiguous())
    with graph_module.graph.inserting_after(node):
        constant = graph_module.graph.get_attr(name)
    constant.meta = {**node.meta, "val": value.contiguous()}
    node.replace_all_uses_with(constant)


def _dense(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(value, memory_format=torch.contiguous_format)


def _give_own_values(program: ExportedProgram) -> None:
    """Let what a call writes, and what it returns of what it writes to, be values of their own.

    What is written to a buffer is dense, as the buffer is: the next call takes it as it is.

    Before: last, x -> write x to last; return last
    After:  last, x -> %0 = clone(x), %1 = clone(last); write %0 to last; return %1
    """
    signature, graph = program.graph_signature, program.graph_module.graph
    names = {str(s.target): s.arg.name for s in signature.input_specs if s.target is not None}
    writes = [s for s in signature.output_specs if s.kind not in RESULTS]
    written = {names.get(str(s.target), str(s.target)) for s in writes}
    output = graph.output_node()
    values = list(output.args[0])
    for i, (spec, value) in enumerate(zip(signature.output_specs, values, strict=True)):
        if not isinstance(value, fx.Node) or not isinstance(value.meta["val"], torch.Tensor):
            continue
        is_given = value.op in ("placeholder", "get_attr")
        is_state = spec.kind is OutputKind.BUFFER_MUTATION
        is_others = is_given and (spec.kind not in RESULTS or value.name in written)
        if is_others or (is_state and not tensor_spec(value.meta["val"]).is_contiguous):
            kept = {"memory_format": torch.contiguous_format} if is_state else {}
            with graph.inserting_before(output):
                values[i] = graph.call_function(torch.ops.aten.clone.default, (value,), kept)
            values[i].meta = dict(value.meta)
            if is_state:
                values[i].meta["val"] = _dense(value.meta["val"])
    output.args = (tuple(values),)


def _is_passed(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) or is_number(value)


def _argument(spec: InputSpec, nodes: Mapping[str, fx.Node]) -> Argument:
    match spec.arg:
        case TensorArgument(name=name):
            return Argument(name, tensor_spec(nodes[name].meta["val"]))
        case SymIntArgument(name=name):
            value = nodes[name].meta["val"]
            return Argument(name, value_spec(value), symbol=str(value))
        case ConstantArgument(name=name, value=value):
            return Argument(name, None, _constant(name, value))
    raise ExportError(f"argument {spec.arg.name} is of a kind that no artifact holds: {spec.arg}")


def _constant(name: str, value: Any) -> Constant:
    if value is not None and not isinstance(value, (bool, int, float, str)):
        raise ExportError(f"argument {name} was compiled in as {value!r}, which no artifact holds")
    return value


def _source(value: object, known: Mapping[fx.Node, Source], symbols: Collection[str]) -> Source:
    if not isinstance(value, fx.Node):
        return Source("constant", value=_constant("result", value))
    if value in known:
        return known[value]
    size = value.meta.get("val")
    if is_number(size) and can_evaluate(str(size), symbols):
        return Source("size", name=str(size))
    if is_number(size):
        raise ExportError(
            f"result {value.name} is {size}, which no artifact computes: return a tensor of it"
        )
    raise ExportError(f"result {value.name} is a constant of the model, which no artifact returns")


def _argument_names(program: ExportedProgram) -> list[str]:
    for entry in program.module_call_graph:
        if entry.fqn == "" and entry.signature is not None:
            return list(entry.signature.forward_arg_names or ())
    return []


def _tree_text(spec: pytree.TreeSpec | None, what: str) -> str:
    if spec is None:
        return ""
    _check_keys(spec, what)
    try:
        return pytree.treespec_dumps(spec)
    except (NotImplementedError, TypeError) as error:
        raise ExportError(
            f"the {what} hold a type that cannot be written down ({error}); register it with "
            "torch.utils._pytree and a serialized_type_name, or use plain dicts, lists and tuples"
        ) from error


def _check_keys(spec: pytree.TreeSpec, what: str) -> None:
    keys = spec.context if spec.type in (dict, OrderedDict) else ()
    keys = spec.context[1] if spec.type is defaultdict else keys
    for key in keys:
        if not isinstance(key, (str, int)):
            raise ExportError(
                f"the {what} hold a dict with the key {key!r}; keys of an artifact's are texts "
                "and whole numbers"
            )
    for child in spec.children():
        _check_keys(child, what)
