"""Matrices: what follows a product is computed row by row, in whatever shape it is viewed.

IREE makes one device program of a product and what follows it only if no view is between, but for
views of one row or image: a residual of a batch would be added in a program of its own.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import fx
from typing_extensions import override

from lowering.rewrites.forms import Forms

aten = torch.ops.aten


class Matrices(Forms):
    """Computes on the rows of a product, from it on to what needs another shape.

    Values that were `[..., C]` are `[M, C]`.

    Before: %2 = view(mm(%x, %w), [N, L, C]); %3 = add(%2, %y); %4 = view(relu(%3), [N * L, C])
    After:  %2 = view(%y, [N * L, C]); %4 = relu(add(mm(%x, %w), %2))
    """

    @override
    def copied(self, node: fx.Node) -> None:
        if node.target is aten.mm.default and self.takes(node):
            self.moved[node] = self.plain[node]

    @override
    def restored(self, node: fx.Node) -> Any:
        return self.write(node, torch.reshape, self.moved[node], list(node.meta["val"].shape))

    @override
    def aligned(self, operand: fx.Node, node: fx.Node) -> Any:
        given, value = operand.meta["val"].shape, node.meta["val"].shape
        width, rows = value[-1], value[:-1].numel()
        if given.numel() == 1:
            shape = [1] * min(len(given), 2)
        elif given == value:
            shape = [rows, width]
        elif given.numel() == given[-1] == width:  # of one row
            shape = [width]
        elif given == (*value[:-1], 1):  # of one column
            shape = [rows, 1]
        else:
            return None
        plain = self.as_plain(operand)
        return plain if [*given] == shape else self.write(node, torch.reshape, plain, shape)

    @override
    def move(self, node: fx.Node) -> bool:
        if node.target is not aten.view.default:
            return self.move_pointwise(node)
        source, shape = cast(fx.Node, node.args[0]), node.meta["val"].shape
        if source not in self.moved or source.meta["val"].shape[-1:] != shape[-1:]:
            return False
        self.moved[node] = self.moved[source]
        return True
