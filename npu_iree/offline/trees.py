"""The structure of arguments and results: read from an artifact, never a reason to import code.

Artifacts keep `torch.utils._pytree` specs as text. Tuples, lists and dicts are themselves. A type
that the process has registered (a Hugging Face output, once `transformers` is imported) is made
again; one that it has not becomes a dict, if its fields have names, or a tuple.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils import _pytree as pytree

_SEQUENCES: dict[str, type] = {"builtins.tuple": tuple, "builtins.list": list}
_MAPPINGS: dict[str, type] = {
    "builtins.dict": dict,
    "collections.OrderedDict": OrderedDict,
    "collections.defaultdict": dict,
}
_NAMED_TUPLE = "collections.namedtuple"  # of any type, which is its context
_MOST_NODES, _DEPTH = 1_000_000, 100


@dataclass(frozen=True)
class Tree:
    """A structure of values.

    Attributes:
        kind: qualified name of the type; None for a leaf.
        keys: names of the children, if they have any.
        context: what a registered type wants back: JSON text, unless it has a form of its own.
        children: in order.
    """

    kind: str | None
    keys: tuple[str | int, ...] | None = None
    context: Any = None
    children: tuple[Tree, ...] = ()

    @property
    def leaves(self) -> int:
        """How many leaves there are."""
        return 1 if self.kind is None else sum(child.leaves for child in self.children)

    def flatten(self, value: Any, path: str = "") -> Iterator[Any]:
        """Give the leaves of a value of this structure.

        Raises:
            TypeError: it has another structure; says where.
        """
        if self.kind is None:
            yield value
            return
        items = self._items(value, path or "the arguments")
        names = self.keys or range(len(self.children))
        for name, child, item in zip(names, self.children, items, strict=True):
            yield from child.flatten(item, f"{path}[{name}]")

    def unflatten(self, leaves: Iterator[Any]) -> Any:
        """Make a value of this structure from its leaves."""
        if self.kind is None:
            return next(leaves)
        children = [child.unflatten(leaves) for child in self.children]
        if self.kind in _SEQUENCES:
            return _SEQUENCES[self.kind](children)
        if self.kind not in _MAPPINGS and (made := self._registered(children)) is not None:
            return made
        if self.keys is None:
            return tuple(children)
        return _MAPPINGS.get(self.kind, dict)(zip(self.keys, children, strict=True))

    def _items(self, value: Any, path: str) -> Sequence[Any]:
        if self.keys is not None and isinstance(value, Mapping):
            missing = [key for key in self.keys if key not in value]
            extra = [key for key in value if key not in self.keys]
            if missing or extra:
                what = filter(None, (_listed("missing", missing), _listed("extra", extra)))
                raise TypeError(f"{path}: {'; '.join(what)}")
            return [value[key] for key in self.keys]
        items = self._children_of(value)
        if items is None:
            raise TypeError(f"{path} is no {self.kind} but {type(value).__name__}")
        if len(items) != len(self.children):
            raise TypeError(f"{path} has {len(items)} items, not {len(self.children)}")
        return items

    def _children_of(self, value: Any) -> list[Any] | None:
        if isinstance(value, (list, tuple)) and self.kind in (*_SEQUENCES, _NAMED_TUPLE):
            return list(value)
        node = pytree.SUPPORTED_NODES.get(type(value))
        own = f"{type(value).__module__}.{type(value).__qualname__}"
        named = pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.get(self.kind or "")
        if node is None or (own != self.kind and named is not type(value)):
            return None
        return list(node.flatten_fn(value)[0])

    def _registered(self, children: list[Any]) -> Any:
        kind = pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.get(self.kind or "")
        if kind is None or self.context is None:
            return None
        read = pytree.SUPPORTED_SERIALIZED_TYPES[kind].from_dumpable_context or json.loads
        try:
            return pytree.SUPPORTED_NODES[kind].unflatten_fn(children, read(self.context))
        except Exception:  # a namedtuple that is not known here; a type that has changed since
            return None


def read_tree(text: str) -> Tree:
    """Read the text of a spec.

    Raises:
        ValueError: it is none.
    """
    try:
        _, spec = json.loads(text)
        return _read(spec, [_MOST_NODES], 0)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"no structure of values: {text[:80]!r}") from error


def _read(spec: Any, left: list[int], depth: int) -> Tree:
    left[0] -= 1
    if left[0] < 0 or depth > _DEPTH:
        raise ValueError("a structure of values that is too large")
    kind, context = spec["type"], spec["context"]
    children = tuple(_read(child, left, depth + 1) for child in spec["children_spec"])
    if kind is not None and not isinstance(kind, str):
        raise TypeError(kind)
    keys = _keys(context, len(children))
    if kind in _MAPPINGS and keys is None:
        raise ValueError(f"a {kind} without keys for its {len(children)} children")
    return Tree(kind, keys, context, children)


def _keys(context: Any, count: int) -> tuple[str | int, ...] | None:
    """Return the names of the children, if that is what a type keeps."""
    try:
        names = json.loads(context) if isinstance(context, str) else context
    except ValueError:  # a namedtuple keeps the name of its type
        return None
    if isinstance(names, dict):  # defaultdict
        names = names.get("dict_context")
    if not isinstance(names, list) or not all(isinstance(n, str | int) for n in names):
        return None
    return tuple(names) if len({*names}) == len(names) == count else None


def _listed(what: str, names: Sequence[str | int]) -> str:
    return f"{what} {', '.join(map(repr, names))}" if names else ""
