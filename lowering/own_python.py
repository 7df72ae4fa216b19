"""The command that runs a module of ours: of the very packages that this process has loaded."""

from __future__ import annotations

import sys
from pathlib import Path

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
