"""Stage 4: flow to an IREE module (.vmfb), with functions that bind parameters anew."""

from __future__ import annotations

import itertools
import re
from typing import Any

from lowering.abi import MOST_WORDS
from lowering.stages import CompileOptions, Stage
from lowering.stages.code.block_convolutions import block_convolutions
from lowering.stages.code.give_access import allow_swaps, replace_probe
from lowering.stages.code.lend_memory import lend_memory
from lowering.stages.code.multiply_tiles import multiply_tiles
from lowering.stages.code.pack_whole_tiles import pack_whole_tiles
from lowering.stages.code.read_ahead import read_ahead
from lowering.stages.code.read_rows_ahead import read_rows_ahead
from lowering.stages.code.sort_rows import sort_rows
from lowering.stages.code.write_erf import write_erf
from lowering.stages.flow.bind_functions import add_bind_functions
from lowering.stages.ir.symbols import walk
from lowering.stages.iree_session import DATA_TILING, IreeSession


def flow_to_vmfb(flow_asm: str, options: CompileOptions) -> bytes:
    """Compile flow IR to a .vmfb.

    With `options.rebind`, one changed weight can be bound without loading the module, and so the
    other weights, again (`lowering.stages.flow.bind_functions`).

    For a CPU, the error function is one polynomial (`lowering.stages.code.write_erf`), and rows are
    sorted by merging (`lowering.stages.code.sort_rows`).

    With data tiling, products read ahead where the CPU does not do so well enough by itself
    (`read_ahead`, `read_rows_ahead` in `lowering.stages.code`), or use the CPU's matrix unit
    (`multiply_tiles`), convolutions fill the registers (`block_convolutions`), or use that unit,
    too, and what is packed is divided at the borders of tiles (`pack_whole_tiles`); `iree-compile`
    with `--compile-from=flow` on the same input gives the same code without these. Such modules
    can be lent memory, too (`lend_memory`).

    Args:
        flow_asm: one module, as `linalg-to-flow` leaves it.
        options: `flags` go to IREE as they are; `parameters` and `rebind`: see above.

    Raises:
        RuntimeError: the compiler refused the module; the text is what it said.
    Source: `iree-compile --compile-from=flow`.
    """
    from iree.compiler.api import Output

    with IreeSession(options) as session:
        module = session.parse(flow_asm)
        bound, begin = None, "executable-targets"
        if options.is_for_cpu:
            with session.context:
                write_erf(module)
        if options.rebind:
            with session.context:
                bound = add_bind_functions(module)
        output = Output.open_membuffer()
        _write_code(session, module, options)
        if bound is not None:
            with session.context:
                names = itertools.chain.from_iterable(options.parameters.values())
                replace_probe(module, bound, names)
            session.compile(module, begin=begin, end="hal")
            begin = "hal"
            with session.context:
                allow_swaps(module)
        session.compile(module, begin=begin).output_vm_bytecode(output)
        return bytes(output.map_memory())


def _write_code(session: IreeSession, module: Any, options: CompileOptions) -> None:
    """Bring a module from flow to the code of its device programs, in place."""
    is_tiled = DATA_TILING in options.flags
    session.compile(module, begin="flow", end="executable-configurations")
    if options.is_for_cpu:
        _check_numbers(module)
    if is_tiled:
        features = session.features
        with session.context:
            block_convolutions(module, features)
            pack_whole_tiles(module)
    session.compile(module, begin="executable-configurations", end="executable-targets")
    if options.is_for_cpu:
        with session.context:
            sort_rows(module)
    if is_tiled:
        with session.context:
            multiply_tiles(module, features)
            read_ahead(module, features)
            read_rows_ahead(module, features)
            lend_memory(module)


def _check_numbers(module: Any) -> None:
    """Refuse what IREE's runtime would not load.

    Raises:
        RuntimeError: a device program takes too many sizes and numbers.
    """
    for op in walk(module):
        if op.name == "hal.executable.export":
            found = re.search(r"constants = (\d+)", str(op.attributes["layout"]))
            if found and int(found[1]) > MOST_WORDS:
                raise RuntimeError(
                    f"a device program would take {found[1]} words of sizes and numbers; IREE's "
                    f"runtime loads none with more than {MOST_WORDS}"
                )


def _is_module(vmfb: bytes) -> str | None:
    return None if len(vmfb) > 64 else "the compiler wrote an empty module"


FLOW_TO_VMFB = Stage("flow-to-vmfb", "vmfb", flow_to_vmfb, _is_module)
