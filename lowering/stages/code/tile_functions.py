"""What `multiply_tiles` calls, in the LLVM dialect: products of blocks by the CPU's matrix unit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from lowering.stages.ir.matrix_unit import COLUMNS, DEPTH

LENT = "npu_iree.tiles_lent"

_LANES = 16
_TILE = _LANES * 64  # bytes: 16 rows
_PART = 2 * _TILE  # of a factor: two tiles
PARTS_BYTES = 3 * _PART
STATE_BYTES = 16  # a pointer to the panel whose parts are there, and one to what was asked for
# Which part of the one factor is multiplied by which of the other (0 is the greatest): the smallest
# products first, and such that the tiles of one factor stay from each to the next. The three left
# out come to less than what rounding takes from the product of two floats.
_PRODUCTS = ((0, 2), (0, 1), (1, 1), (1, 0), (2, 0), (0, 0))
# A panel that no cache has is asked for twice: by the steps that take it apart, so many steps ahead
# (T5, whose products have 32 rows, takes 0.80 of the time), and before that, while the one before
# is only multiplied: so many lines of the cache in a step, which has 64. To ask for more of them
# there takes longer than it gains.
_STEPS_AHEAD = 2
_AHEAD, _LINE = 11, 64
# The unit takes what is below 2^-126 for 0. Between factors of at most 2^24 this moves no result of
# at least 2^-64 by more than its last bit.
_LARGEST_BITS = (127 + 24) << 23
_SMALLEST_BITS = (127 - 64) << 23
_MAGNITUDE_BITS = 0x7FFFFFFF
_HIGH_BITS = 0xFFFF0000

_F16, _I32 = "vector<16xf32>", "vector<16xi32>"
_CARRIED = f"i64, i64, {', '.join(['!llvm.ptr'] * 6)}, {_F16}"  # from step to step
_CONFIG = "npu_iree.tile_shapes"
# Of 8 tiles: 64 bytes in each of 16 rows: palette 1, then 16 words at byte 16, 16 bytes at 48.
_SHAPES = [1, *[0] * 15, *[64, 0] * 8, *[0] * 16, *[_LANES] * 8, *[0] * 8]
# "arch_prctl" of Linux (158), ARCH_REQ_XCOMP_PERM (0x1023), XFEATURE_XTILE_DATA (18).
_HEAD = f"""
llvm.mlir.global internal constant @{_CONFIG}(dense<{_SHAPES}> : vector<64xi8>)
    {{alignment = 64 : i64, sym_visibility = "private"}} : vector<64xi8>
llvm.func internal @{LENT}() -> i1 attributes {{sym_visibility = "private"}} {{
  %call = llvm.mlir.constant(158 : i64) : i64
  %request = llvm.mlir.constant(4131 : i64) : i64
  %state = llvm.mlir.constant(18 : i64) : i64
  %none = llvm.mlir.constant(0 : i64) : i64
  %error = llvm.inline_asm has_side_effects "syscall",
      "={{rax}},{{rax}},{{rdi}},{{rsi}},~{{rcx}},~{{r11}},~{{memory}}" %call, %request, %state
      : (i64, i64, i64) -> i64
  %lent = llvm.icmp "eq" %error, %none : i64
  llvm.return %lent : i1
}}
"""


def _split_part(i: int) -> str:
    """Write how part `i` of two vectors is stored, and what is left of them after it."""
    rest = f"""
  %x{i}h = llvm.and %x{i}i, %high : {_I32}
  %y{i}h = llvm.and %y{i}i, %high : {_I32}
  %x{i}f = llvm.bitcast %x{i}h : {_I32} to {_F16}
  %y{i}f = llvm.bitcast %y{i}h : {_I32} to {_F16}
  %x{i + 1} = llvm.fsub %x{i}, %x{i}f : {_F16}
  %y{i + 1} = llvm.fsub %y{i}, %y{i}f : {_F16}"""
    return f"""
  %x{i}i = llvm.bitcast %x{i} : {_F16} to {_I32}
  %y{i}i = llvm.bitcast %y{i} : {_F16} to {_I32}
  %x{i}low = llvm.lshr %x{i}i, %half : {_I32}
  %part{i} = llvm.inline_asm "vpternlogd $$0xf8, $3, $2, $0", "=v,0,v,v" %x{i}low, %y{i}i, %high
      : ({_I32}, {_I32}, {_I32}) -> {_I32}
  %to{i} = llvm.getelementptr %to[{i * _PART}] : (!llvm.ptr) -> !llvm.ptr, i8
  llvm.store %part{i}, %to{i} <alignment = 64> : {_I32}, !llvm.ptr{rest if i < 2 else ""}"""


_SPLIT = f"""
llvm.func internal @npu_iree.split(%x0: {_F16}, %y0: {_F16}, %to: !llvm.ptr, %largest: {_F16})
    -> {_F16} attributes {{always_inline, sym_visibility = "private"}} {{
  %high = llvm.mlir.constant(dense<{_HIGH_BITS}> : {_I32}) : {_I32}
  %half = llvm.mlir.constant(dense<16> : {_I32}) : {_I32}
  {"".join(map(_split_part, range(3)))}
  %larger = llvm.inline_asm has_side_effects "vrangeps $$11, $1, $2, $0", "=v,v,v" %x0, %y0
      : ({_F16}, {_F16}) -> {_F16}
  %of_all = llvm.inline_asm has_side_effects "vrangeps $$11, $1, $2, $0", "=v,v,v" %larger, %largest
      : ({_F16}, {_F16}) -> {_F16}
  llvm.return %of_all : {_F16}
}}
"""


# Whether the panel is in parts, and where a function goes on to ask for the next one: its lines
# come after this one's, and are asked for once.
_ASK = f"""\
  %last = llvm.load %state : !llvm.ptr -> !llvm.ptr
  %is_split = llvm.icmp "eq" %last, %panel : !llvm.ptr
  %ahead_at = llvm.getelementptr %state[8] : (!llvm.ptr) -> !llvm.ptr, i8
  %ahead_then = llvm.load %ahead_at : !llvm.ptr -> i64
  %panel_at = llvm.ptrtoint %panel : !llvm.ptr to i64
  %step_rows = llvm.mlir.constant({DEPTH} : i64) : i64
  %step_bytes = llvm.mul %width, %step_rows : i64
  %steps_ahead = llvm.mlir.constant({_STEPS_AHEAD} : i64) : i64
  %soon = llvm.mul %step_bytes, %steps_ahead : i64
  %panel_bytes = llvm.mul %steps, %step_bytes : i64
  %next_at = llvm.add %panel_at, %panel_bytes : i64
  %ahead_bytes = llvm.mlir.constant({_AHEAD * _LINE} : i64) : i64
  %share = llvm.mul %steps, %ahead_bytes : i64
  %next_end = llvm.add %next_at, %panel_bytes : i64
  %last_share = llvm.sub %next_end, %share : i64
  %ahead_more = llvm.intr.umin(%ahead_then, %last_share) : (i64, i64) -> i64
  %ahead = llvm.inttoptr %ahead_more : i64 to !llvm.ptr
  %ahead_end = llvm.add %ahead_more, %share : i64
  %ahead_now = llvm.select %is_split, %ahead_end, %next_at : i1, i64
  llvm.store %ahead_now, %ahead_at : i64, !llvm.ptr"""


def multiply_function(height: int) -> str:
    """Name the function that multiplies blocks of so many rows."""
    return f"npu_iree.multiply_{height}_rows"


def library(heights: Sequence[int]) -> str:
    """Write the functions for blocks of these heights, each at most `ROWS`."""
    return "\n".join([_HEAD, _SPLIT, *map(_multiply, heights)])


class _Code:
    """The lines of a function, and names for what they compute."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._lines: list[str] = []
        self.largest = "$largest"

    def __str__(self) -> str:
        return "\n".join(f"  {line}" for line in self._lines)

    def value(self, line: str) -> str:
        """Append what has a result; return its name."""
        name = f"{self._prefix}{len(self._lines)}"
        self._lines.append(f"{name} = {line}")
        return name

    def at(self, pointer: str, nbytes: int | str) -> str:
        """Return a pointer so many bytes further on."""
        kinds = "(!llvm.ptr)" if isinstance(nbytes, int) else "(!llvm.ptr, i64)"
        return self.value(f"llvm.getelementptr {pointer}[{nbytes}] : {kinds} -> !llvm.ptr, i8")

    def load(self, pointer: str) -> str:
        """Return 16 floats."""
        return self.value(f"llvm.load {pointer} <alignment = 4> : !llvm.ptr -> {_F16}")

    def number(self, value: int, kind: str) -> str:
        """Return a constant."""
        return self.value(f"llvm.mlir.constant({value} : {kind}) : {kind}")

    def times(self, nbytes: str, count: int) -> str:
        """Return a number of bytes, so many times."""
        return self.value(f"llvm.mul {nbytes}, {self.number(count, 'i64')} : i64")

    def tiles(self, name: str, *operands: int | str) -> None:
        """Call an intrinsic function of the unit; numbers are registers, or lengths in bytes."""
        values, kinds = list[str](), list[str]()
        for operand in operands:
            if isinstance(operand, str):
                kinds.append("!llvm.ptr")
                values.append(operand)
            else:
                kinds.append("i64" if operand >= _LANES else "i8")
                values.append(self.number(operand, kinds[-1]))
        given, types = ", ".join(values), ", ".join(kinds)
        self._lines.append(f'llvm.call_intrinsic "llvm.x86.{name}"({given}) : ({types}) -> ()')

    def load_tiles(self, register: int, factor: str, part: int, count: int) -> None:
        """Load the tiles of a part of a factor into registers."""
        for tile in range(count):
            at = self.at(factor, part * _PART + tile * _TILE)
            self.tiles("tileloadd64", register + tile, at, 64)

    def prefetch(self, pointer: str) -> None:
        """Ask for a line of memory, to come into the second cache."""
        words = "{cache = 1 : i32, hint = 2 : i32, rw = 0 : i32}"
        self._lines.append(f'"llvm.intr.prefetch"({pointer}) <{words}> : (!llvm.ptr) -> ()')

    def split(self, x: str, y: str, to: str) -> None:
        """Take two vectors apart."""
        self.largest = self.value(
            f"llvm.call @npu_iree.split({x}, {y}, {to}, {self.largest}) : "
            f"({_F16}, {_F16}, !llvm.ptr, {_F16}) -> {_F16}"
        )


_Work = Callable[[_Code], None]


def _multiply(height: int) -> str:
    """Write the function for blocks of `height` rows.

    Its arguments: where the rows of the one factor begin, and how many bytes there are from one to
    the next; where the panel of the other begins, and how many bytes from row to row; how many
    times `DEPTH` numbers there are of each; after how many of these the rows go on elsewhere, and
    how many bytes further; where the `ROWS` x `COLUMNS` floats of the result go; where the parts of
    the panel do; and `STATE_BYTES` that it keeps from call to call, zeros before the first. It
    returns whether the result is right.
    """
    end = _Code("%v")
    for i, j in _tiles(height):
        to = end.at("%c", i * _LANES * COLUMNS * 4 + j * 64)
        end.tiles("tilestored64", 2 * i + j, to, COLUMNS * 4)
    end.tiles("tilerelease")
    smallest = _smallest(end, height)
    begin = "%zero, %run, %rows, %panel, %rows_this, %rows_next, %parts, %parts, %none"
    return f"""
llvm.func internal @{multiply_function(height)}(%rows: !llvm.ptr, %stride: i64, %panel: !llvm.ptr,
    %width: i64, %steps: i64, %run: i64, %jump: i64, %c: !llvm.ptr, %parts: !llvm.ptr,
    %state: !llvm.ptr) -> i1 attributes {{sym_visibility = "private"}} {{
  %zero = llvm.mlir.constant(0 : i64) : i64
  %one = llvm.mlir.constant(1 : i64) : i64
  %factor_bytes = llvm.mlir.constant({PARTS_BYTES} : i64) : i64
  %rows_this = llvm.alloca %factor_bytes x i8 {{alignment = 64 : i64}} : (i64) -> !llvm.ptr
  %rows_next = llvm.alloca %factor_bytes x i8 {{alignment = 64 : i64}} : (i64) -> !llvm.ptr
  %config = llvm.mlir.addressof @{_CONFIG} : !llvm.ptr
  llvm.call_intrinsic "llvm.x86.ldtilecfg"(%config) : (!llvm.ptr) -> ()
  %none = llvm.mlir.constant(dense<0.0> : {_F16}) : {_F16}
{_ASK}
  llvm.cond_br %is_split, ^multiply({begin} : {_CARRIED}), ^split({begin} : {_CARRIED})
{_loop(height, "split", splits_panel=True)}
{_loop(height, "multiply", splits_panel=False)}
^end(%largest: {_F16}):
{end}
{_check(smallest)}
  llvm.return %is_right : i1
}}
"""


def _check(smallest: str) -> str:
    """Write whether a result is right, and which panel's parts are there for the next call."""
    return f"""\
  %largest_bits = llvm.bitcast %largest : {_F16} to {_I32}
  %greatest = "llvm.intr.vector.reduce.umax"(%largest_bits) : ({_I32}) -> i32
  %limit = llvm.mlir.constant({_LARGEST_BITS} : i32) : i32
  %is_small = llvm.icmp "ule" %greatest, %limit : i32
  %least = "llvm.intr.vector.reduce.umin"({smallest}) : ({_I32}) -> i32
  %floor = llvm.mlir.constant({_SMALLEST_BITS - 1} : i32) : i32
  %no_least = llvm.mlir.constant(-1 : i32) : i32
  %is_large = llvm.icmp "uge" %least, %floor : i32
  %is_any = llvm.icmp "ne" %least, %no_least : i32
  %both = llvm.and %is_small, %is_large : i1
  %is_right = llvm.and %both, %is_any : i1
  %nowhere = llvm.mlir.zero : !llvm.ptr
  %there = llvm.select %is_right, %panel, %nowhere : i1, !llvm.ptr
  llvm.store %there, %state : !llvm.ptr, !llvm.ptr"""


def _tiles(height: int) -> list[tuple[int, int]]:
    """Return the tiles of a result, down and across."""
    return list(itertools.product(range(-(-height // _LANES)), range(COLUMNS // _LANES)))


def _loop(height: int, name: str, *, splits_panel: bool) -> str:
    """Write the loop over what is added up.

    Each of its steps multiplies what the step before has taken apart, and takes apart what the next
    multiplies; what the first multiplies is thrown away. The panel's parts stay, for the next rows;
    meanwhile the next panel is asked for, which is of weights that no cache has (to wait for them
    takes a fifth of the time of a layer of 768 x 3072, with 128 rows).
    """
    step, clear = _Code("$v"), _Code("$w")
    tiles = _tiles(height)
    slots = len(_PRODUCTS) * len(tiles)
    rows = _shares([*_rows_to_split(height)], slots)
    panel = _shares([*(_panel_to_split() if splits_panel else _panel_to_ask_for(step))], slots)
    there: tuple[int, int] | None = None
    for parts in _PRODUCTS:
        if there is None or parts[0] != there[0]:
            step.load_tiles(4, "$this", parts[0], 1 + tiles[-1][0])
        if there is None or parts[1] != there[1]:
            step.load_tiles(6, "$that", parts[1], 2)
        there = parts
        for i, j in tiles:
            step.tiles("tdpbf16ps", 2 * i + j, 4 + i, 6 + j)
            for work in (*next(rows), *next(panel)):
                work(step)
    for i, j in tiles:
        clear.tiles("tilezero", 2 * i + j)
    return f"""
^{name}($s: i64, $left: i64, $a: !llvm.ptr, $b: !llvm.ptr, $this: !llvm.ptr, $next: !llvm.ptr,
    $that: !llvm.ptr, $later: !llvm.ptr, $largest: {_F16}):
{step}
  $is_first = llvm.icmp "eq" $s, %zero : i64
  llvm.cond_br $is_first, ^{name}_clear, ^{name}_on
^{name}_clear:
{clear}
  llvm.br ^{name}_on
^{name}_on:
  $s1 = llvm.add $s, %one : i64
  $has_more = llvm.icmp "slt" $s1, %steps : i64
  $left_more = llvm.sub $left, %one : i64
  $is_end = llvm.icmp "eq" $left_more, %zero : i64
  $left1 = llvm.select $is_end, %run, $left_more : i1, i64
  $a_next = llvm.getelementptr $a[{DEPTH * 4}] : (!llvm.ptr) -> !llvm.ptr, i8
  $further = llvm.select $is_end, %jump, %zero : i1, i64
  $a_more = llvm.getelementptr $a_next[$further] : (!llvm.ptr, i64) -> !llvm.ptr, i8
  $b_more = llvm.getelementptr $b[%step_bytes] : (!llvm.ptr, i64) -> !llvm.ptr, i8
  $later_more = llvm.getelementptr $later[{PARTS_BYTES}] : (!llvm.ptr) -> !llvm.ptr, i8
  $a1 = llvm.select $has_more, $a_more, $a : i1, !llvm.ptr
  $b1 = llvm.select $has_more, $b_more, $b : i1, !llvm.ptr
  $later1 = llvm.select $has_more, $later_more, $later : i1, !llvm.ptr
  $goes_on = llvm.icmp "sle" $s1, %steps : i64
  llvm.cond_br $goes_on,
      ^{name}($s1, $left1, $a1, $b1, $next, $this, $later, $later1, {step.largest} : {_CARRIED}),
      ^end({step.largest} : {_F16})
""".replace("$", f"%{name}_")  # what is the loop's own


def _shares(work: Sequence[_Work], count: int) -> Iterator[Sequence[_Work]]:
    """Divide what is to be done into so many shares, in order."""
    ends = [i * len(work) // count for i in range(count + 1)]
    return (work[begin:end] for begin, end in itertools.pairwise(ends))


def _rows_to_split(height: int) -> Iterator[_Work]:
    """Give what takes the next numbers of each row apart."""

    def split(code: _Code, r: int) -> None:
        row = code.at("$a", code.times("%stride", r))
        to = code.at("$next", r // _LANES * _TILE + r % _LANES * 64)
        code.split(code.load(row), code.load(code.at(row, 64)), to)

    return (partial(split, r=r) for r in range(height))


def _panel_to_split() -> Iterator[_Work]:
    """Give what takes the next numbers of a panel apart, and asks for later ones: of two rows."""

    def split(code: _Code, pair: int, half: int) -> None:
        x, y = (
            code.at(code.at("$b", code.times("%width", row)), half * 64)
            for row in (pair, DEPTH // 2 + pair)
        )
        to = code.at("$later", half * _TILE + pair * 64)
        for row in (x, y):
            code.prefetch(code.at(row, "%soon"))
        code.split(code.load(x), code.load(y), to)

    return (partial(split, pair=p, half=h) for p in range(DEPTH // 2) for h in range(2))


def _panel_to_ask_for(code: _Code) -> Iterator[_Work]:
    """Give what asks for the next lines of the next panel."""
    ahead = code.at("%ahead", code.value("llvm.mul $s, %ahead_bytes : i64"))

    def ask(code: _Code, line: int) -> None:
        code.prefetch(code.at(ahead, line * _LINE))

    return (partial(ask, line=line) for line in range(_AHEAD))


def _smallest(code: _Code, height: int) -> str:
    """Return the smallest magnitudes but 0 of a result, as bits, less 1."""
    magnitude = code.value(f"llvm.mlir.constant(dense<{_MAGNITUDE_BITS}> : {_I32}) : {_I32}")
    one = code.value(f"llvm.mlir.constant(dense<-1> : {_I32}) : {_I32}")
    smallest = one
    for vector in range(2 * height):
        at = code.at("%c", vector * 64)
        bits = code.value(f"llvm.load {at} <alignment = 64> : !llvm.ptr -> {_I32}")
        bits = code.value(f"llvm.and {bits}, {magnitude} : {_I32}")
        bits = code.value(f"llvm.add {bits}, {one} : {_I32}")  # of 0: the greatest there is
        smallest = code.value(f"llvm.intr.umin({smallest}, {bits}) : ({_I32}, {_I32}) -> {_I32}")
    return smallest
