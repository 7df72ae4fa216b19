"""Processes that run a module of ours: of the very packages that this process has loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import IO, Any, BinaryIO

# The folder is searched for the package alone: what lies beside it may have names of others.
_RUN = """
import importlib, runpy, sys
folder, module = sys.argv[1:3]
del sys.argv[1:3]
sys.path.insert(0, folder)
importlib.import_module(module.partition(".")[0])
sys.path.remove(folder)
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def own_python(module: str, *args: str) -> list[str]:
    """Return what runs a module with arguments, in a process of its own.

    `python -m` would find whatever is installed, where a script has put another folder first; and
    what a compile worker makes would lie in the cache under the key of other code.

    Args:
        module: of a package that is loaded here, e.g. `lowering.worker`.
        args: of the module.
    """
    package = sys.modules[module.partition(".")[0]]
    folder = Path(str(package.__file__)).parent.parent
    return [sys.executable, "-P", "-c", _RUN, str(folder), module, *args]  # -P: see `python -h`


def start_own(
    module: str, *args: str, output: int | IO[bytes], **options: Any
) -> tuple[subprocess.Popen[bytes], BinaryIO]:
    """Start a module that answers on a pipe of its own, whose number is its first argument.

    Others write to its stdout: what a `.pth` file or `sitecustomize` runs, or a library prints.

    Args:
        module: as of `own_python`.
        args: more of the module's.
        output: takes its stdout and stderr.
        options: more of `subprocess.Popen`'s.

    Returns:
        The process, and the end of the pipe that is read.

    Raises:
        OSError: it cannot be started.
    """
    readable, writable = os.pipe()
    answers = os.fdopen(readable, "rb", buffering=0)
    command = own_python(module, str(writable), *args)
    try:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, pass_fds=(writable,), **options
        )
    except BaseException:
        answers.close()
        raise
    finally:
        os.close(writable)
    return process, answers
