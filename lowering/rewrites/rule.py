"""What a rewrite is: a function of tensors, and what it takes of the node that it replaces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from lowering.nodes import takes_static_tensors, takes_tensors

Arguments = tuple[Any, ...]


def all_of(node: fx.Node) -> Arguments | None:
    """Take what the node takes."""
    return None if node.kwargs else node.args


@dataclass(frozen=True)
class Rule:
    """A rewrite of one op.

    Attributes:
        function: computes what the op computes, or returns `NotImplemented` where the op is best
            left as it is; gets a tensor for each node that `takes` returns.
        takes: returns the arguments of `function`, which may stand further up in the graph than
            those of the node; None where the op is best left as it is.
        is_dynamic: whether it is one of sizes that are not known, too.
    """

    function: Callable[..., Any]
    takes: Callable[[fx.Node], Arguments | None] = all_of
    is_dynamic: bool = False

    def is_for(self, node: fx.Node) -> bool:
        """Say whether it is a rewrite of what a node takes."""
        return (takes_tensors if self.is_dynamic else takes_static_tensors)(node)
