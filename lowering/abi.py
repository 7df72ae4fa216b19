"""The contract between compiled modules and the runtime: names, and what they stand for."""

from __future__ import annotations

ENTRY = "main"
PARAMETER_SCOPE = "model"


def parameter_name(index: int) -> str:
    """Return the name under which a region's parameter `index` is bound."""
    return f"p{index}"


def bind_function(parameter: str) -> str:
    """Return the name of the function that binds a parameter anew: (view, wait, signal)."""
    return f"bind${parameter}"
