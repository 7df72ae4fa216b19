"""The set of versions that was verified to work together, checked once at first use."""

from __future__ import annotations

from functools import cache

from lowering.key import package_version
from npu_iree.errors import VersionError

# package -> verified version; a prefix is enough ("2.13" covers "2.13.0+cpu").
VERIFIED = {
    "torch": "2.13",
    "torch-mlir": "20261001",
    "iree-base-compiler": "3.13.0",
    "iree-base-runtime": "3.13.0",
}


@cache
def check_versions(*packages: str) -> None:
    """Compare the installed packages with the verified set.

    Args:
        packages: the ones that are about to be used.

    Raises:
        VersionError: names every package that differs and the command that mends it.
    """
    wrong = []
    for package in packages:
        found = package_version(package)
        if not f"{found}.".startswith((f"{VERIFIED[package]}.", f"{VERIFIED[package]}+")):
            wrong.append(f"{package}: verified {VERIFIED[package]}, found {found}")
    if wrong:
        wanted = " ".join(f"{p}=={VERIFIED[p]}{'.*' if p == 'torch' else ''}" for p in packages)
        raise VersionError(
            "npu_iree is verified with one set of versions, and another is installed:\n  "
            + "\n  ".join(wrong)
            + f"\nInstall the set with: pip install {wanted!r}".replace("'", "")
        )
