"""From the torch dialect to what the device programs are: whence, and how much work each is."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from lowering.stages import CompileOptions, Stage
from lowering.stages.ir.dispatch_work import bytes_moved, flops
from lowering.stages.ir.symbols import symbol_of, walk
from lowering.stages.iree_session import IreeSession
from lowering.stages.linalg_to_flow import dispatches_of
from lowering.stages.torch_to_linalg import lowered_to_linalg

NODE_FILE = "node/"  # begins the "file" of a node's location; the position of its graph follows
_NODE = re.compile(rf'"{NODE_FILE}(\d+)":(\d+):')
# Named ops become `linalg.generic`, whose loops and arithmetic can be read off.
_GENERALIZE = (
    "builtin.module(hal.executable(hal.executable.variant(builtin.module("
    "func.func(linalg-generalize-named-ops)))))"
)
# Their locations are those of what makes or takes a value, and say nothing of what is computed.
_AROUND = (
    "arith.constant",
    "func.",
    "hal.",
    "iree_encoding.",
    "iree_tensor_ext.dispatch.",
    "tensor.empty",
)


def torch_to_dispatches(torch_asm: str, options: CompileOptions) -> str:
    """Lower a module as a compile does, up to device programs; list these instead.

    Before: %0 = torch.aten.relu %arg0 : ... loc("node/0":1:0)
    After:  {"main_dispatch_0_elementwise_32_f32": {"nodes": [[0, 1]], "bytes": 256, "flops": 0}}

    Args:
        torch_asm: what `aten_to_located_torch` writes.
        options: those of the compile.

    Returns:
        JSON: device program -> positions of graph and node, what it is named for first; the bytes
        of its operands and results, and its arithmetic (null: they depend on dynamic sizes or on
        data, or are not known).

    Raises:
        RuntimeError: a compiler refused the module.
    Source: `iree-compile --compile-to=executable-sources`.
    """
    from iree.compiler.passmanager import PassManager

    linalg_asm = lowered_to_linalg(torch_asm, options, with_locations=True)
    with IreeSession(options) as session:
        module = dispatches_of(session, linalg_asm, options)
        session.compile(module, begin="flow", end="executable-sources")
        with session.context:
            PassManager.parse(_GENERALIZE).run(module.operation)
            return json.dumps(_table(list(walk(module.operation))))


def _table(ops: Sequence[Any]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for variant in (op for op in ops if op.name == "hal.executable.variant"):
        for name, row in _programs(variant).items():
            table.setdefault(name, row)  # variants for other devices say the same
    for op in (op for op in ops if op.name == "stream.cmd.dispatch"):
        for name in _called(op):  # of equal programs there is one, from the first of their places
            table[name]["nodes"] += [p for p in _places(op) if p not in table[name]["nodes"]]
    return table


def _called(op: Any) -> list[str]:
    """Return the device programs that may be run in one place."""
    from iree.compiler import ir

    names = [ir.SymbolRefAttr(symbol).value[-1] for symbol in op.attributes["entry_points"]]
    return list(dict.fromkeys(map(str, names)))


def _programs(variant: Any) -> dict[str, Any]:
    ops = list(walk(variant))
    functions = {symbol_of(op): op for op in ops if op.name == "func.func"}
    exported = [symbol_of(op) for op in ops if op.name == "hal.executable.export"]
    return {name: _described(functions[name]) for name in exported if name in functions}


def _described(function: Any) -> dict[str, Any]:
    ops = list(walk(function))
    inside = [op for op in ops if not op.name.startswith(_AROUND)]
    places = dict.fromkeys(place for op in (function, *inside) for place in _places(op))
    return {"nodes": list(places), "bytes": bytes_moved(ops), "flops": flops(ops)}


def _places(op: Any) -> list[tuple[int, int]]:
    """Return the positions of graph and node that an op comes from."""
    return [(int(graph), int(node)) for graph, node in _NODE.findall(str(op.location))]


def _is_table(text: str) -> str | None:
    return None if text.startswith("{") else "it is no table"


TORCH_TO_DISPATCHES = Stage(
    "torch-to-dispatches", "dispatches.json", torch_to_dispatches, _is_table
)
