"""What `sort_rows` calls, in the LLVM dialect: one row sorted, or what comes first of it."""

from __future__ import annotations

import re
from collections.abc import Sequence

_INDEXED = "(!llvm.ptr, i64) -> !llvm.ptr"
_WIDTH = re.compile(r"\d+")
_RUN = 8  # elements are put in their place one by one in runs of so many, which are then merged


def ordered_function(name: str) -> str:
    """Name the function that says whether two elements may stay as they are."""
    return f"{name}.ordered"


def compare(name: str, kinds: Sequence[str], predicate: str | None = None) -> str:
    """Write that function, of integers; or one that is to return something else."""
    types = [kind for kind in kinds for _ in range(2)]
    takes = ", ".join(f"%v{i}: {kind}" for i, kind in enumerate(types))
    compared = f'llvm.icmp "{predicate}" %v0, %v1 : {kinds[0]}'
    return f"""
llvm.func internal @{ordered_function(name)}({takes}) -> i1
    attributes {{always_inline, sym_visibility = "private"}} {{
  %ordered = {compared if predicate else "llvm.mlir.constant(true) : i1"}
  llvm.return %ordered : i1
}}
"""


def sort_function(name: str, kinds: Sequence[str], capacity: int, first: int | None) -> str:
    """Write the function that sorts a row, by what `ordered_function` says; equal ones stay.

    Its arguments: for each tensor, where its row begins and how many bytes there are from one
    element to the next; then how many elements there are.

    Args:
        name: of the function.
        kinds: the types of the elements, of each tensor.
        capacity: how many elements there is room for, if all are sorted.
        first: how many of those that come first are read; what is behind them may be anything.
    """
    code = _Code(name, kinds)
    takes = ", ".join(f"%row{k}: !llvm.ptr, %step{k}: i64" for k in code.tensors)
    compared = ", ".join(f"{kind}, {kind}" for kind in kinds)
    if first is None:
        room, keep, run, kept = capacity, _RUN, "%keep", "%n"
        more, merges = code.memory("%b"), _merges(code)
        behind = f"^merges(%run, {code.given('%a')}, {code.given('%b')} : i64, {code.two_pointers})"
    else:
        room, keep, run, kept = first + 1, first, "%n", "%keep"
        more, merges = "", ""
        behind = f"^write({code.given('%a')} : {code.pointers})"
    return f"""
llvm.func @{ordered_function(name)}({compared}) -> i1
llvm.func internal @{name}({takes}, %n: i64) attributes {{sym_visibility = "private"}} {{
  %zero = llvm.mlir.constant(0 : i64) : i64
  %one = llvm.mlir.constant(1 : i64) : i64
  %room = llvm.mlir.constant({room} : i64) : i64
  %keep = llvm.mlir.constant({keep} : i64) : i64
  %run = llvm.add %zero, {run} : i64
  %kept = llvm.intr.smin(%n, {kept}) : (i64, i64) -> i64
  {code.memory("%a")}
  {more}
  llvm.br ^runs(%zero : i64)
^runs(%begin: i64):
  %is_run = llvm.icmp "slt" %begin, %n : i64
  llvm.cond_br %is_run, ^run, {behind}
^run:
  %behind = llvm.add %begin, %run : i64
  %end = llvm.intr.smin(%behind, %n) : (i64, i64) -> i64
  llvm.br ^take(%begin : i64)
^take(%j: i64):
  %is_taken = llvm.icmp "slt" %j, %end : i64
  llvm.cond_br %is_taken, ^insert, ^ran
^insert:
  {code.read_row("%x", "%j")}
  %inside = llvm.sub %j, %begin : i64
  %last = llvm.intr.smin(%inside, %keep) : (i64, i64) -> i64
  %at = llvm.add %begin, %last : i64
  llvm.br ^shift(%at : i64)
^shift(%p: i64):
  %is_behind = llvm.icmp "sgt" %p, %begin : i64
  llvm.cond_br %is_behind, ^look, ^put
^look:
  %q = llvm.sub %p, %one : i64
  {code.load("%y", "%a", "%q")}
  {code.ordered("%stays", "%y", "%x")}
  llvm.cond_br %stays, ^put, ^move
^move:
  {code.store("%y", "%a", "%p", "moved")}
  llvm.br ^shift(%q : i64)
^put:
  {code.store("%x", "%a", "%p", "put")}
  %j1 = llvm.add %j, %one : i64
  llvm.br ^take(%j1 : i64)
^ran:
  llvm.br ^runs(%behind : i64)
{merges}
^write({code.takes("%from")}):
  llvm.br ^copy(%zero : i64)
^copy(%c: i64):
  %is_copied = llvm.icmp "slt" %c, %kept : i64
  llvm.cond_br %is_copied, ^copies, ^done
^copies:
  {code.load("%z", "%from", "%c")}
  {code.write_row("%z", "%c")}
  %c1 = llvm.add %c, %one : i64
  llvm.br ^copy(%c1 : i64)
^done:
  llvm.return
}}
"""


def _merges(code: _Code) -> str:
    """Write how runs are merged, two by two, until there is one.

    Two are merged from both ends at once, as far as there are elements in both for sure: neither
    end waits for the other. Which of two elements is next is computed, not branched on: no CPU can
    guess it.
    """
    both = f"{code.takes('%left')}, {code.takes('%right')}"
    return f"""
^merges(%w: i64, {both}):
  %is_more = llvm.icmp "slt" %w, %n : i64
  llvm.cond_br %is_more, ^pairs(%zero : i64), ^write({code.given("%left")} : {code.pointers})
^pairs(%low: i64):
  %is_pair = llvm.icmp "slt" %low, %n : i64
  llvm.cond_br %is_pair, ^pair, ^merged
^pair:
  %middle0 = llvm.add %low, %w : i64
  %middle = llvm.intr.smin(%middle0, %n) : (i64, i64) -> i64
  %high0 = llvm.add %middle0, %w : i64
  %high = llvm.intr.smin(%high0, %n) : (i64, i64) -> i64
  %both = llvm.sub %high, %middle : i64
  llvm.br ^ends(%zero, %low, %middle, %middle, %high : i64, i64, i64, i64, i64)
^ends(%e: i64, %i0: i64, %k0: i64, %i9: i64, %k9: i64):
  %is_end = llvm.icmp "slt" %e, %both : i64
  %o0 = llvm.add %low, %e : i64
  llvm.cond_br %is_end, ^end, ^merge(%i0, %k0, %o0 : i64, i64, i64)
^end:
  {code.load("%ub", "%left", "%i0")}
  {code.load("%vb", "%left", "%k0")}
  {code.ordered("%is_ub", "%ub", "%vb")}
  {code.choose("%mb", "%is_ub", "%ub", "%vb")}
  {code.store("%mb", "%right", "%o0", "first")}
  %by_b = llvm.zext %is_ub : i1 to i64
  %i0_next = llvm.add %i0, %by_b : i64
  %other_b = llvm.sub %one, %by_b : i64
  %k0_next = llvm.add %k0, %other_b : i64
  %i8 = llvm.sub %i9, %one : i64
  %k8 = llvm.sub %k9, %one : i64
  {code.load("%ue", "%left", "%i8")}
  {code.load("%ve", "%left", "%k8")}
  {code.ordered("%is_ve", "%ue", "%ve")}
  {code.choose("%me", "%is_ve", "%ve", "%ue")}
  %e1 = llvm.add %e, %one : i64
  %o9 = llvm.sub %high, %e1 : i64
  {code.store("%me", "%right", "%o9", "final")}
  %by_e = llvm.zext %is_ve : i1 to i64
  %k9_next = llvm.sub %k9, %by_e : i64
  %i9_next = llvm.add %i8, %by_e : i64
  llvm.br ^ends(%e1, %i0_next, %k0_next, %i9_next, %k9_next : i64, i64, i64, i64, i64)
^merge(%i: i64, %k: i64, %o: i64):
  %is_one = llvm.icmp "slt" %i, %i9 : i64
  %is_other = llvm.icmp "slt" %k, %k9 : i64
  %are_both = llvm.and %is_one, %is_other : i1
  llvm.cond_br %are_both, ^next, ^rest(%i, %o : i64, i64)
^next:
  {code.load("%u", "%left", "%i")}
  {code.load("%v", "%left", "%k")}
  {code.ordered("%is_u", "%u", "%v")}
  {code.choose("%m", "%is_u", "%u", "%v")}
  {code.store("%m", "%right", "%o", "next")}
  %by = llvm.zext %is_u : i1 to i64
  %i1 = llvm.add %i, %by : i64
  %other_by = llvm.sub %one, %by : i64
  %k1 = llvm.add %k, %other_by : i64
  %o1 = llvm.add %o, %one : i64
  llvm.br ^merge(%i1, %k1, %o1 : i64, i64, i64)
^rest(%r: i64, %s: i64):
  %is_rest = llvm.icmp "slt" %r, %i9 : i64
  llvm.cond_br %is_rest, ^rests, ^tail(%k, %s : i64, i64)
^rests:
  {code.load("%f", "%left", "%r")}
  {code.store("%f", "%right", "%s", "rest")}
  %r1 = llvm.add %r, %one : i64
  %s1 = llvm.add %s, %one : i64
  llvm.br ^rest(%r1, %s1 : i64, i64)
^tail(%t: i64, %d: i64):
  %is_tail = llvm.icmp "slt" %t, %k9 : i64
  llvm.cond_br %is_tail, ^tails, ^paired
^tails:
  {code.load("%g", "%left", "%t")}
  {code.store("%g", "%right", "%d", "tail")}
  %t1 = llvm.add %t, %one : i64
  %d1 = llvm.add %d, %one : i64
  llvm.br ^tail(%t1, %d1 : i64, i64)
^paired:
  llvm.br ^pairs(%high0 : i64)
^merged:
  %w2 = llvm.add %w, %w : i64
  llvm.br ^merges(%w2, {code.given("%right")}, {code.given("%left")}
      : i64, {code.two_pointers})
"""


class _Code:
    """Writes what is done with the elements of all tensors.

    They are moved as integers: of two floats, LLVM takes one by a branch.
    """

    def __init__(self, name: str, kinds: Sequence[str]) -> None:
        self._name, self._kinds = name, kinds
        self._bits = [f"i{_WIDTH.findall(kind)[0]}" for kind in kinds]
        self.tensors = range(len(kinds))
        self.pointers = ", ".join("!llvm.ptr" for _ in kinds)
        self.two_pointers = f"{self.pointers}, {self.pointers}"

    def given(self, name: str) -> str:
        """Name a value of each tensor."""
        return ", ".join(f"{name}{k}" for k in self.tensors)

    def takes(self, name: str) -> str:
        """Name a pointer of each tensor, as an argument of a block."""
        return ", ".join(f"{name}{k}: !llvm.ptr" for k in self.tensors)

    def memory(self, name: str) -> str:
        """Allocate room for the elements."""
        return self._each(f"{name}$k = llvm.alloca %room x $t : (i64) -> !llvm.ptr")

    def load(self, name: str, memory: str, at: str) -> str:
        """Load an element from memory of our own."""
        return self._each(
            f"{name}_at$k = llvm.getelementptr {memory}$k[{at}] : {_INDEXED}, $t",
            f"{name}$k = llvm.load {name}_at$k : !llvm.ptr -> $t",
        )

    def store(self, name: str, memory: str, at: str, place: str) -> str:
        """Store an element into memory of our own."""
        return self._each(
            f"%{place}$k = llvm.getelementptr {memory}$k[{at}] : {_INDEXED}, $t",
            f"llvm.store {name}$k, %{place}$k : $t, !llvm.ptr",
        )

    def read_row(self, name: str, at: str) -> str:
        """Load an element of the row."""
        return self._each(*_in_row("read", at), f"{name}$k = llvm.load %read$k : !llvm.ptr -> $t")

    def write_row(self, name: str, at: str) -> str:
        """Store an element into the row."""
        return self._each(
            *_in_row("written", at), f"llvm.store {name}$k, %written$k : $t, !llvm.ptr"
        )

    def choose(self, name: str, condition: str, one: str, other: str) -> str:
        """Take one of two elements."""
        return self._each(f"{name}$k = llvm.select {condition}, {one}$k, {other}$k : i1, $t")

    def ordered(self, name: str, one: str, other: str) -> str:
        """Compare two elements."""
        casts = [
            f"{name}_{side}$k = llvm.bitcast {value}$k : $t to $f"
            for side, value in (("one", one), ("other", other))
        ]
        values = ", ".join(f"{name}_one{k}, {name}_other{k}" for k in self.tensors)
        types = ", ".join(f"{kind}, {kind}" for kind in self._kinds)
        called = f"llvm.call @{ordered_function(self._name)}({values}) : ({types}) -> i1"
        return f"{self._each(*casts)}\n  {name} = {called}"

    def _each(self, *lines: str) -> str:
        return "\n  ".join(
            line.replace("$k", str(k)).replace("$t", bits).replace("$f", kind)
            for k, (bits, kind) in enumerate(zip(self._bits, self._kinds, strict=True))
            for line in lines
        )


def _in_row(place: str, at: str) -> tuple[str, str]:
    return (
        f"%{place}_bytes$k = llvm.mul {at}, %step$k : i64",
        f"%{place}$k = llvm.getelementptr %row$k[%{place}_bytes$k] : {_INDEXED}, i8",
    )
