"""Symbolic sizes of an artifact: found from the arguments of a call, and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from lowering.arithmetic import evaluate, is_polynomial, names_in

# A size of a call: the argument, its dimension (None: it is a number), the size, what it must be.
Size: TypeAlias = tuple[str, int | None, int, str]

# Of a size that is smaller than those that PyTorch traces for.
_HINT = (
    "; torch.export traces sizes of 2 or more: Dim(name, min=1), or least_size=1 (--least-size 1), "
    "asks for less, and gets it where the program is the same then"
)


def match_shape(
    name: str,
    shape: Sequence[int],
    wanted: Sequence[int | str],
    sizes: dict[str, int],
    later: list[Size],
) -> None:
    """Check a shape against one with symbols; those that are new are added to `sizes`.

    Args:
        name: of the tensor, for the error.
        shape: its sizes.
        wanted: a size, a symbol, or an expression of symbols for each.
        sizes: symbol -> size, as far as they are known.
        later: takes what cannot be checked before more symbols are known.

    Raises:
        ValueError: it does not match; says which dimension.
    """
    if len(shape) != len(wanted):
        raise ValueError(f"{name} has {len(shape)} dimensions, not {len(wanted)}: {list(shape)}")
    for dim, (size, want) in enumerate(zip(shape, wanted, strict=True)):
        if isinstance(want, str):
            match_size((name, dim, size, want), sizes, later)
        elif size != want:
            raise ValueError(f"dimension {dim} of {name} is {size}, not {want}")


def match_size(place: Size, sizes: dict[str, int], later: list[Size]) -> None:
    """Check one size that is a symbol or an expression of symbols, as `match_shape` does."""
    _, _, size, want = place
    if want.isidentifier():
        if sizes.setdefault(want, size) != size:
            raise ValueError(f"{_told(place)}, not {sizes[want]} ({want})")
    elif names_in(want) <= sizes.keys():
        _check(place, sizes)
    else:
        later.append(place)


def settle(later: Sequence[Size], sizes: dict[str, int]) -> None:
    """Check the sizes that had to wait; a symbol that only an expression shows is solved for.

    Raises:
        ValueError: one does not match.
    """
    left: list[Size] = []
    for place in later:
        unknown = names_in(place[3]) - sizes.keys()
        if len(unknown) > 1:
            left.append(place)
            continue
        for symbol in unknown:
            sizes |= _solved(place, symbol, sizes)
        if names_in(place[3]) <= sizes.keys():
            _check(place, sizes)
        else:
            left.append(place)
    if left and len(left) < len(later):
        settle(left, sizes)


def _solved(place: Size, symbol: str, sizes: Mapping[str, int]) -> dict[str, int]:
    """Find the one unknown symbol of an expression, if it is a multiple and something added."""
    _, _, size, want = place
    if not is_polynomial(want):
        return {}
    zero, one, two = (int(evaluate(want, {**sizes, symbol: n})) for n in (0, 1, 2))
    step = one - zero
    if not step or two - one != step:
        return {}
    if (size - zero) % step:
        raise ValueError(f"{_told(place)}, which no whole {symbol} makes {want}")
    return {symbol: (size - zero) // step}


def _check(place: Size, sizes: Mapping[str, int]) -> None:
    _, _, size, want = place
    expected = _value_of(want, sizes)
    if size != expected:
        raise ValueError(f"{_told(place)}, not {expected} ({want})")


def _told(place: Size) -> str:
    name, dim, size, _ = place
    return f"{name} is {size}" if dim is None else f"dimension {dim} of {name} is {size}"


def check_guards(guards: Sequence[str], sizes: Mapping[str, int]) -> None:
    """Check what was taken for granted of sizes when the program was made.

    Raises:
        ValueError: it is not so.
    """
    for guard in guards:
        if names_in(guard) <= sizes.keys() and not _value_of(guard, sizes):
            found = _listed(guard, sizes)
            raise ValueError(f"the artifact is for sizes with {guard}, and not for {found}")


def _value_of(expression: str, sizes: Mapping[str, int]) -> int | float:
    try:
        return evaluate(expression, sizes)
    except ValueError as error:  # it divides by zero, say
        found = _listed(expression, sizes)
        raise ValueError(f"{expression} has no value for {found}") from error


def _listed(expression: str, sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} = {sizes[name]}" for name in sorted(names_in(expression)))


def check_ranges(
    sizes: Mapping[str, int],
    ranges: Mapping[str, tuple[int, int | None]],
    places: Mapping[str, str],
) -> None:
    """Check that sizes are in the ranges that were compiled for.

    Args:
        sizes: symbol -> size.
        ranges: symbol -> least and largest size.
        places: symbol -> where a user sees it.

    Raises:
        ValueError: one is not.
    """
    for symbol, (low, high) in ranges.items():
        size = sizes.get(symbol)
        if size is not None and (size < low or (high is not None and size > high)):
            limits = f"{low} or more" if high is None else f"{low} to {high}"
            place, hint = places.get(symbol, "a size"), _HINT if low == 2 > size >= 0 else ""
            raise ValueError(
                f"{place} is {size}, and the artifact is for {limits} ({symbol}){hint}"
            )


def places_of(shapes: Mapping[str, Sequence[int | str]]) -> dict[str, str]:
    """Return where each symbol is seen first, e.g. `dimension 1 of x`, from shapes by name."""
    found: dict[str, str] = {}
    parts: dict[str, str] = {}
    for name, shape in shapes.items():
        for dim, size in enumerate(shape):
            if isinstance(size, str):
                found.setdefault(size, f"dimension {dim} of {name}")
                for symbol in names_in(size):
                    parts.setdefault(symbol, f"{symbol}, with {size} as dimension {dim} of {name},")
    return {**parts, **found}
