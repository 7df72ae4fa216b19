"""An exported program as a function: decomposed, and right for sizes as small as was asked for."""

from __future__ import annotations

import warnings

from torch.export import ExportedProgram

from lowering.decompositions import DecompositionTable
from lowering.errors import ExportError
from lowering.ranges import LEAST_TRACED
from lowering.trials import tried_ranges


def functional(
    program: ExportedProgram, table: DecompositionTable, least_size: int = LEAST_TRACED
) -> ExportedProgram:
    """Decompose an exported program; only then does its signature tell what a call writes to.

    Its sizes may be as small as the program was right for before that.

    Args:
        program: what `torch.export.export` made.
        table: the decompositions.
        least_size: of sizes that PyTorch says are 2 or more.

    Raises:
        ExportError: PyTorch cannot do that, or what the program takes for granted of its sizes is
            not known.
    """
    if program._guards_code and program.example_inputs is None:
        raise ExportError(
            f"the program takes for granted that {' and '.join(program._guards_code)}, which "
            "PyTorch tells only of a program with its example inputs: export and save it with them"
        )
    with warnings.catch_warnings():  # PyTorch warns of what it does itself
        warnings.simplefilter("ignore", FutureWarning)
        try:
            found: ExportedProgram = program.run_decompositions(dict(table))
        except AssertionError as error:
            raise ExportError(
                f"PyTorch cannot decompose it: {error} (do buffers that it writes to share memory?)"
            ) from error
    found.range_constraints.update(tried_ranges(program, found, least_size))
    return found
