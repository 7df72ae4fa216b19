"""An IREE compiler session: flags, phases and diagnostics, wrapped where the bindings enter."""

from __future__ import annotations

import ctypes
import importlib
import os
from functools import cache
from typing import Any

from lowering.cpu import required_features
from lowering.errors import FlagError
from lowering.stages import CompileOptions
from lowering.stages.mlir_context import MlirContext

DATA_TILING = "--iree-opt-data-tiling"
CHANNELS_LAST = "iree-preprocessing-convert-conv-to-channels-last"
# Of a matrix product, in 2 CPUs: a weight is read from memory once for every so many bytes of rows.
# In IREE's own 64 KiB it is read 4 times for 64 rows, which takes up to 1.8 times as long.
_TILE_BYTES, _LEAST_TILE_BYTES = 1 << 20, 1 << 16
# Of the process, not of a session.
_GLOBAL_FLAGS = (
    # What is recorded with buffers themselves (regions of dynamic sizes) fails where these are
    # still to be allocated, that is whenever a call is submitted ahead ("transient buffer has not
    # been committed"); so commands name their buffers when they run.
    "--iree-hal-force-indirect-command-buffers",
    # Where vectors do not divide a row, the rest is a loop of its own. By default it is masked, and
    # the whole loop with it: softmax of rows of 1500 floats takes 37 times as long, argmax 20.
    "--iree-llvmcpu-vector-pproc-strategy=peel",
    # Of what nobody gives us. For each of its passes that canonicalizes, IREE builds the patterns
    # of all ops that it knows anew: with these and without `_DIALECTS` alone, a small program takes
    # a tenth longer. (`input_torch` stays: it has the sorts and scans that torch-mlir leaves.)
    "--iree-plugin=-input_stablehlo",
    "--iree-plugin=-input_tosa",
)
# Whose ops we create. Python's side of them is imported at the first one else.
_DIALECTS = (
    "arith",
    "builtin",
    "complex",
    "flow",
    "func",
    "hal",
    "iree_codegen",
    "iree_tensor_ext",
    "linalg",
    "llvm",
    "math",
    "memref",
    "scf",
    "stream",
    "tensor",
    "util",
    "vector",
)


class IreeSession(MlirContext):
    """Open a compiler session with flags; collects errors as text instead of printing them.

    Source: `iree.compiler.api`. The phases of `iree-compile --compile-from/--compile-to` are in its
    C API but not in its Python one, hence `ctypes`.
    """

    def __init__(self, options: CompileOptions) -> None:
        load_iree()
        from iree.compiler.api import Session

        self._session: Any = Session()
        try:
            self._session.set_flags(*options.flags)
        except ValueError as error:
            told = " ".join(str(error).removeprefix("Error parsing flags:").split())
            raise FlagError("iree-compile", told, options.flags) from error
        self._flags = options.flags
        for dialect in _DIALECTS:
            self._session.context.get_dialect_descriptor(dialect)  # which loads it
        super().__init__(self._session.context)

    def parse(self, asm: str) -> Any:
        """Parse a module.

        Raises:
            RuntimeError: the text is no valid IR.
        """
        from iree.compiler import ir

        try:
            with self.context:
                return ir.Module.parse(asm)
        except ir.MLIRError as error:
            raise RuntimeError(self.said(str(error))) from error

    @property
    def features(self) -> tuple[str, ...]:
        """What the CPU that is compiled for can do, by LLVM's names."""
        return _features(self._flags)

    def compile(self, module: Any, *, begin: str = "start", end: str = "end") -> Any:
        """Run the compiler's phases after `begin` up to `end` on `module`, in place.

        The module is verified after each pass, which is a seventh of the time: without that, a
        flag set that breaks a module on the way gives wrong numbers (attention with a mask) where
        it is an error now, and the next set is tried.

        Raises:
            RuntimeError: the compiler refused the module; the text is what it said.
        Returns:
            The invocation, which writes the product.
        """
        from iree.compiler.api import Invocation, ctypes_dl

        invocation = Invocation(self._session)
        library = ctypes_dl._dylib
        for set_phase, phase in (
            (library.ireeCompilerInvocationSetCompileFromPhase, begin),
            (library.ireeCompilerInvocationSetCompileToPhase, end),
        ):
            set_phase.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
            set_phase.restype = None
            set_phase(invocation._inv_p, phase.encode())
        try:
            module.operation.verify()
            invocation.import_module(module.operation)
        except Exception as error:
            raise RuntimeError(self.said(str(error))) from error
        if not invocation.execute():
            raise RuntimeError(self.said("iree-compile failed without a word"))
        return invocation


@cache
def _features(flags: tuple[str, ...]) -> tuple[str, ...]:
    """Ask the compiler, which an empty module costs 15 ms, what CPU its flags name."""
    with IreeSession(CompileOptions(flags=flags)) as session:
        module = session.parse("module {}")
        session.compile(module, end="preprocessing")
        return required_features(str(module))


@cache
def global_flags() -> tuple[str, ...]:
    """Return the flags that IREE gets for the whole process.

    With more CPUs the tiles of a product are smaller: each CPU is to have some. This flag, the one
    that differs between machines, decides how fast the code is, not what it computes, nor where it
    runs: it is in no key, and code that is compiled on one machine serves another.
    """
    tile = max(_LEAST_TILE_BYTES, 2 * _TILE_BYTES // max(2, os.cpu_count() or 2))
    return (*_GLOBAL_FLAGS, f"--iree-llvmcpu-matmul-tile-bytes={tile}")


@cache
def load_iree() -> None:
    """Import what `IreeSession` needs, before anybody counts the time, and set it up."""
    import iree.compiler.ir  # noqa: F401
    from iree.compiler.api import ctypes_dl

    for dialect in _DIALECTS:
        importlib.import_module(f"iree.compiler.dialects.{dialect}")
    ctypes_dl._initializeGlobalCL("lowering", *global_flags())
