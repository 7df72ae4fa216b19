"""A Python that can run artifacts and compile nothing: torch and IREE's runtime, no compiler."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

COMPILER_MODULES = ("torch_mlir", "iree.compiler")
COMPILER_PACKAGES = ("torch-mlir", "iree-base-compiler")
ROOT = Path(__file__).parents[1]
_LEFT_OUT = ("torch_mlir", "iree_base_compiler", "__editable__")
_OURS = ("npu_iree", "lowering")  # from this checkout; only their entry points are installed ones
_PROOF = """
from importlib import import_module, metadata
for module in {modules}:
    try:
        import_module(module)
        print("found", module)
    except ModuleNotFoundError:
        pass
for package in {packages}:
    try:
        print("found", package, metadata.version(package))
    except metadata.PackageNotFoundError:
        pass
import torch, iree.runtime, npu_iree, lowering
print("of", npu_iree.__file__, lowering.__file__)
"""


def make_runtime_only_python(folder: Path) -> None:
    """Make a virtual environment without the compilers.

    Its packages are links to those of this environment. It proves that the compilers are not there,
    and that the project is this one.
    """
    make = [sys.executable, "-m", "venv", "--without-pip", str(folder)]
    subprocess.run(make, check=True, capture_output=True)
    python = folder / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    for source in Path(sysconfig.get_path("purelib")).iterdir():
        if source.name == "iree":
            _link_iree(source, site / "iree")
        elif source.name not in _OURS and not source.name.startswith(_LEFT_OUT):
            (site / source.name).symlink_to(source)
    for name in _OURS:
        (site / name).symlink_to(ROOT / name)
    _prove(python)


def runtime_only_environment() -> dict[str, str]:
    """Return the environment for its processes: nothing that leads back to other packages."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def _link_iree(source: Path, place: Path) -> None:
    """Link all but the compiler: `iree` is a folder that the two IREE packages share."""
    place.mkdir()
    for child in source.iterdir():
        if child.name != "compiler":
            (place / child.name).symlink_to(child)


def _prove(python: Path) -> None:
    code = _PROOF.format(modules=COMPILER_MODULES, packages=COMPILER_PACKAGES)
    done = subprocess.run(
        [str(python), "-c", code], capture_output=True, text=True, env=runtime_only_environment()
    )
    assert done.returncode == 0, done.stderr
    assert "found" not in done.stdout, done.stdout
    packages = [Path(place).resolve().parents[1] for place in done.stdout.split()[1:]]
    assert packages == [ROOT, ROOT], done.stdout
