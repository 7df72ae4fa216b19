"""What the option `donate` means for one graph: which inputs its calls give away, or why not.

The option names parameters of the compiled function. Dynamo's graph takes them apart (a list is an
input for each tensor in it) and leaves out what it does not read.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any

import torch
from torch import fx
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._functorch._aot_autograd.schemas import OutputType
from torch._guards import TracingContext
from torch.utils import _pytree as pytree

from lowering.nodes import view_root
from lowering.plan import Plan
from lowering.suggest import there_are
from npu_iree.compiled_call import wrapper_locals
from npu_iree.errors import OptionError
from npu_iree.torch_device.current import is_on_npu

log = logging.getLogger(__name__)
_SHARES_MEMORY = (OutputType.alias_of_input, OutputType.is_input)
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class Donated:
    """What the calls of one graph give away.

    Attributes:
        function: what is compiled, as its user calls it.
        names: what the user calls each input that is given away, by its position in the graph.
        count: how many inputs the graph has.
        reused: those whose memory is overwritten with a result.
    """

    function: str = ""
    names: Mapping[int, str] = field(default_factory=dict)
    count: int = 0
    reused: frozenset[int] = frozenset()

    def reused_by(self, plan: Plan) -> Donated:
        """Return the same, with what a plan's regions overwrite."""
        given = {region.inputs[i].name for region in plan.regions.values() for i in region.given}
        places = frozenset(i for i in self.names if plan.inputs[i] in given)
        return replace(self, reused=places)


NOTHING = Donated()


def donated_inputs(
    graph_module: fx.GraphModule, inputs: Sequence[Any], wanted: Sequence[str | int]
) -> Donated:
    """Find what the calls of a graph give away.

    Nothing, unless the graph is all of the function: what comes after a graph break may read the
    arguments again.

    Args:
        graph_module: a graph of Dynamo's, while it is compiled.
        inputs: its inputs.
        wanted: parameters of the compiled function, by name or position.

    Raises:
        OptionError: there is no such parameter, or it cannot be given away.
    """
    frame = InstructionTranslator.current_tx() if wanted else None
    function = _Function.compiled() if frame is not None else None
    if frame is None or function is None or frame.f_code not in function.codes:
        return NOTHING
    function.check(wanted)
    reason: Any = graph_module.compile_subgraph_reason
    if reason is not None and reason.graph_break:
        _tell(_BROKEN, function.name, wanted)
        return NOTHING
    found: dict[int, str] = {}
    for i, node in enumerate(graph_module.graph.find_nodes(op="placeholder")):
        source = getattr(node.meta.get("grapharg"), "source", None)
        if source is not None and isinstance(inputs[i], torch.Tensor):
            name, position, shown = function.parameter_of(source, frame.f_code)
            if name in wanted or position in wanted:
                _refuse_input(shown, inputs[i], frame.f_locals)
                found[i] = shown
    if not found:
        _tell("%s reads no tensor of %s on the device, so none is donated", function.name, wanted)
    return Donated(function.name, found, len(inputs))


_BROKEN = (
    "%s has a graph break, after which it may still read its arguments: nothing is donated of %s "
    "(torch.compile(..., fullgraph=True) tells where it breaks)"
)


@functools.cache
def _tell(message: str, function: str, wanted: Sequence[str | int]) -> None:
    log.warning(message, function, ", ".join(map(repr, wanted)))


def refuse_what_lives_on(donated: Donated, graph_module: fx.GraphModule, kind: str) -> None:
    """Refuse to give away what somebody reads after the call.

    Args:
        donated: what is given away.
        graph_module: the graph as AOTAutograd hands it over.
        kind: what it was made for: `inference` or `forward`.

    Raises:
        OptionError: a result shares its memory, the graph writes to it, or the backward pass reads
            it.
    """
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    if metadata is None or len(placeholders) != donated.count:
        raise refused(", ".join(donated.names.values()), "arguments of the call share their memory")
    results: Any = graph_module.graph.output_node().args[0]
    saved = results[metadata.num_forward :] if kind == "forward" else ()
    kept = {view_root(node) for node in saved if isinstance(node, fx.Node)}
    returned = {o.base_idx for o in metadata.output_info if o.output_type in _SHARES_MEMORY}
    for i, name in donated.names.items():
        if metadata.input_info[i].mutates_data:
            raise refused(name, "the function writes to it, for its caller to read")
        if i in returned:
            raise refused(name, "a result of the function shares its memory")
        if placeholders[i] in kept:
            raise refused(name, "the backward pass reads it")


def refused(name: str, reason: str, remedy: str = "Donate a clone of it") -> OptionError:
    """Return the error that a tensor cannot be given away."""
    return OptionError(
        f"cannot donate {name!r}: {reason}. {remedy}, or take it out of the option 'donate'"
    )


def _refuse_input(name: str, value: torch.Tensor, arguments: Mapping[str, Any]) -> None:
    if isinstance(value, torch.nn.Parameter):
        raise refused(name, "it is a parameter, which its module goes on to use")
    if not is_on_npu(value):
        where = f"it is on {value.device}, and a call takes over only what is on npu"
        raise refused(name, where, "Move it with .to('npu')")
    if value.requires_grad:
        raise refused(name, "it requires grad, so a backward pass may read it")
    if sum(leaf is value for leaf in pytree.tree_leaves(dict(arguments))) > 1:
        raise refused(name, "it is also another argument of the call")


@dataclass(frozen=True)
class _Function:
    """What the user has compiled.

    Attributes:
        name: what the user calls it.
        codes: what Dynamo may trace for it.
        parameters: its parameters, without `self`.
    """

    name: str
    codes: tuple[CodeType, ...]
    parameters: Mapping[str, inspect.Parameter]

    @classmethod
    def compiled(cls) -> _Function | None:
        """Return the function on whose behalf Dynamo asks for a graph now, or None."""
        found = wrapper_locals()
        if found is None:
            return None
        given = found["fn"]
        function = inspect.unwrap(given)
        owner = getattr(function, "__self__", function)
        name = getattr(function, "__qualname__", type(owner).__name__)
        is_module = isinstance(owner, torch.nn.Module)
        if is_module and (function is owner or function.__name__ in _CALLS):
            name, function = type(owner).__name__, owner.forward
        codes = (getattr(f, "__code__", None) for f in (given, function))
        parameters = inspect.signature(function).parameters
        return cls(name, tuple(code for code in codes if code is not None), parameters)

    def check(self, wanted: Sequence[str | int]) -> None:
        """Check that there are such parameters.

        Raises:
            OptionError: there are not.
        """
        kinds = [p.kind for p in self.parameters.values()]
        takes_any, takes_any_name = (kind in kinds for kind in _VARIABLE)
        for item in wanted:
            if isinstance(item, int) and item >= len(kinds) and not takes_any:
                raise OptionError(
                    f"option 'donate': {self.name} has no parameter {item}: it takes {len(kinds)}"
                )
            if isinstance(item, str) and item not in self.parameters and not takes_any_name:
                hint = there_are(item, self.parameters)
                raise OptionError(f"option 'donate': {self.name} has no parameter {item!r}.{hint}")

    def parameter_of(self, source: Any, code: CodeType) -> tuple[str, int, str]:
        """Return the parameter that an input of a graph is (part of): name, position, full name.

        Args:
            source: what Dynamo says of the input.
            code: what it traces; it may take all arguments as `*args, **kwargs`.
        """
        path: list[Any] = [source]
        while hasattr(path[-1], "base"):
            path.append(path[-1].base)
        local = getattr(path.pop(), "local_name", "")
        names = list(self.parameters)
        shown = source.name.replace(f"L[{local!r}]", local, 1)
        if path and local in inspect.getargs(code)[1:]:
            key = path[-1].index  # `args[1]`, `kwargs["x"]`
            if isinstance(key, str):
                return key, _place(names, key), key
            given_apart = [name for name in names if self.parameters[name].kind not in _VARIABLE]
            position = key + (code.co_argcount and len(given_apart))
            return (names[position] if key == position < len(names) else local), position, shown
        return local, _place(names, local), shown


_CALLS = ("__call__", "_call_impl", "_wrapped_call_impl")


def _place(names: Sequence[str], name: str) -> int:
    return names.index(name) if name in names else -1
