"""A dictionary that forgets: what is kept in memory of what can be found or made again."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Kept(OrderedDict[_Key, _Value]):
    """A dictionary that forgets its oldest entry for each one beyond a limit.

    Attributes:
        limit: the number of entries at most.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def __setitem__(self, key: _Key, value: _Value) -> None:
        super().__setitem__(key, value)
        if len(self) > self.limit:
            self.popitem(last=False)
