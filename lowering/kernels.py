"""Kernels for custom ops: MLIR functions that a user supplies, and which of them a call takes.

Free of torch: a worker links kernels, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lowering.errors import NpuIreeError
from lowering.signature import NUMBERS, mlir_type

_COMMENT = re.compile(r"//[^\n]*")
_FUNCTION = re.compile(r"func\.func\s+(?P<private>private\s+)?(?:public\s+)?@(?P<name>[\w$.-]+)")
_TENSOR = re.compile(r"tensor<(?P<sizes>(?:(?:\d+|\?)x)*)(?P<element>b?f\d+|i\d+|complex<f\d+>)>$")
_VALUE_NAME = re.compile(r"^%[\w$.-]+\s*:\s*")
_ATTRIBUTES = re.compile(r"\s*\{.*\}$", re.DOTALL)


class KernelError(NpuIreeError, ValueError):
    """A kernel cannot be used for its op; the message says why."""


@dataclass(frozen=True)
class KernelType:
    """What a kernel takes or gives: a tensor, or a number (`i64`, `f64`, `i1`).

    Attributes:
        element: MLIR's name of the type of the elements, or of the number.
        shape: sizes, None where any will do; of a number, None.
    """

    element: str
    shape: tuple[int | None, ...] | None = None

    @classmethod
    def of(cls, dtype: str, shape: Sequence[int | None]) -> KernelType:
        """Return that of a tensor of a dtype, by its name in `lowering.dtypes`."""
        return cls(mlir_type(dtype), tuple(shape))

    def takes(self, other: KernelType) -> bool:
        """Say whether every value of the other type is one of this."""
        if self.element != other.element or (self.shape is None) != (other.shape is None):
            return False
        ours, theirs = self.shape or (), other.shape or ()
        return len(ours) == len(theirs) and all(
            a is None or a == b for a, b in zip(ours, theirs, strict=True)
        )

    def is_like(self, other: KernelType) -> bool:
        """Say whether a value may be of both types, with what is known of its sizes."""
        merged = zip(self.shape or (), other.shape or (), strict=False)
        sizes = [a if b is None else b for a, b in merged]
        known = KernelType(other.element, None if other.shape is None else tuple(sizes))
        return len(self.shape or ()) == len(other.shape or ()) and self.takes(known)

    def __str__(self) -> str:
        if self.shape is None:
            return self.element
        sizes = "".join(f"{'?' if size is None else size}x" for size in self.shape)
        return f"tensor<{sizes}{self.element}>"


@dataclass(frozen=True)
class KernelFunction:
    """The signature of one function of a kernel."""

    name: str
    arguments: tuple[KernelType, ...]
    results: tuple[KernelType, ...]

    def __str__(self) -> str:
        return f"({_listed(self.arguments)}) -> ({_listed(self.results)})"


@dataclass(frozen=True)
class Kernel:
    """What runs a custom op on the device.

    Attributes:
        op: the op with its overload, e.g. `mylib.scale.default`.
        text: MLIR; each public function is the op for the types that it takes.
        functions: these, in their order.
    """

    op: str
    text: str
    functions: tuple[KernelFunction, ...]

    @classmethod
    def parse(cls, op: str, text: str) -> Kernel:
        """Read the signatures of a kernel's functions; what is in them, the compiler reads.

        Raises:
            KernelError: there is no public function, or one with types that no op has.
        """
        plain = _COMMENT.sub("", text)
        matches = [m for m in _FUNCTION.finditer(plain) if not m["private"]]
        if not matches:
            raise KernelError(f"the kernel of {op} has no public func.func")
        return cls(op, text, tuple(_function(op, m["name"], plain[m.end() :]) for m in matches))

    def function_for(self, arguments: Sequence[KernelType]) -> KernelFunction | None:
        """Return the first function that takes arguments of these types, or None."""
        for function in self.functions:
            pairs = zip(function.arguments, arguments, strict=False)
            if len(function.arguments) == len(arguments) and all(a.takes(b) for a, b in pairs):
                return function
        return None

    def symbol(self, function: str) -> str:
        """Return the name of one of its functions in a module with others."""
        return f"kernel.{self.op}.{function}"

    def linkable(self) -> str:
        """Return the text with every function under the name that it has in a module."""
        text = self.text
        for name in {m["name"] for m in _FUNCTION.finditer(_COMMENT.sub("", self.text))}:
            text = re.sub(rf"@{re.escape(name)}(?![\w$.-])", f'@"{self.symbol(name)}"', text)
        return text


def used_kernels(kernels: Mapping[str, Kernel], ops: frozenset[str]) -> dict[str, str]:
    """Return the texts of the kernels of some ops, by op, sorted."""
    return {op: kernels[op].text for op in sorted(ops.intersection(kernels))}


def _function(op: str, name: str, rest: str) -> KernelFunction:
    """Read `(%a: type {...}, ...) -> (type, ...) ...`, what follows the name of a function."""
    arguments, rest = _bracketed(op, name, rest)
    rest = rest.lstrip()
    results = ""
    if rest.startswith("->"):
        rest = rest[2:].lstrip()
        results = _bracketed(op, name, rest)[0] if rest.startswith("(") else _one(rest)
    taken = [_type(op, name, _VALUE_NAME.sub("", part)) for part in _parts(arguments)]
    given = [_type(op, name, part) for part in _parts(results)]
    if not given or any(t.shape is None for t in given):
        raise KernelError(f"function @{name} of the kernel of {op} must give tensors")
    return KernelFunction(name, tuple(taken), tuple(given))


def _bracketed(op: str, name: str, text: str) -> tuple[str, str]:
    """Split `(...) rest` into what is in the brackets and the rest."""
    text = text.lstrip()
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            if character != ")":
                break
            return text[1:i], text[i + 1 :]
    raise KernelError(f"the signature of function @{name} of the kernel of {op} cannot be read")


def _one(text: str) -> str:
    """Return the type that a text begins with."""
    end = re.search(r"\s*(\{|attributes\b|loc\b|$)", text)
    return text[: end.start()] if end else text


def _parts(text: str) -> list[str]:
    """Split at the commas that are in no brackets."""
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += (character in "<({[") - (character in ">)}]")
        if character == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    last = text[start:]
    return [part.strip() for part in (*parts, last) if part.strip()]


def _type(op: str, name: str, text: str) -> KernelType:
    text = _ATTRIBUTES.sub("", text).strip()
    if text in NUMBERS:
        return KernelType(text)
    found = _TENSOR.match(text)
    if found is None:
        raise KernelError(
            f"function @{name} of the kernel of {op} has a {text!r} in its signature; kernels "
            "take tensors with a rank (`tensor<?x8xf32>`) and numbers (`i64`, `f64`, `i1`), and "
            "give tensors"
        )
    sizes = found["sizes"].split("x")[:-1]
    return KernelType(found["element"], tuple(None if s == "?" else int(s) for s in sizes))


def _listed(types: Sequence[KernelType]) -> str:
    return ", ".join(map(str, types))
