"""Random programs: what ops do beside each other, where `op_db` has each by itself.

All values of a program have one shape, the same size in every dimension. So any statement can be
left out, with its first operand in the place of its result, which is how a program that goes wrong
is cut down to the few statements that matter; and whoever looks at types alone, to tell one value
or one dimension from another, is misled.
"""

from __future__ import annotations

import linecache
import random
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

# Values of the same shape as their operands. Beside operands `{a}`, `{b}`, `{c}` there are a
# dimension `{d}`, another `{e}`, an index `{k}`, and a place to cut `{h}`, neither 0 nor the size.
ANY_RANK = (
    "{a} + {b}",
    "{a} - {b}",
    "{a} * {b}",
    "{a} / ({b} * {b} + 1)",
    "torch.where({a} > {b}, {c}, {a})",
    "torch.maximum({a}, {b})",
    "torch.lerp({a}, {b}, 0.3)",
    "-{a}",
    "{a}.sin()",
    "{a}.tanh()",
    "{a}.sigmoid()",
    "({a} * {a} + 1).rsqrt()",
    "F.relu({a})",
    "F.gelu({a})",
    "F.silu({a})",
    "{a} + {b}.sum() * 0.01",
    "{a} - {b}.mean({d}, keepdim=True)",
    "{a} + {b}.amax({d}, keepdim=True)",
    "{a} * {b}.norm(dim={d}, keepdim=True)",
    "{a} + {b}.var({d}, keepdim=True, unbiased=False)",
    "{a} + {b}.logsumexp({d}, keepdim=True)",
    "{a}.softmax({d})",
    "{a}.log_softmax({d})",
    "{a}.cumsum({d}) * 0.3",
    "{a}.sort({d}).values",
    "{a} + {b}.argmax({d}, keepdim=True)",
    "F.layer_norm({a}, (n,))",
    "F.rms_norm({a}, (n,))",
    "{a}.flip({d})",
    "{a}.roll({k}, {d})",
    "{a}.index_select({d}, p)",
    "{a}.gather({d}, i)",
    "{a}.scatter_add({d}, i, {b}) * 0.5",
    "{a}.flatten().roll({k}).view_as({a})",
    "{a}.narrow({d}, {k}, 1) + {b}",
    "{a}.narrow({d}, {k}, 1).expand_as({a})",
    "torch.cat(({a}.narrow({d}, 0, {h}), {b}.narrow({d}, {h}, n - {h})), {d})",
    "torch.cat(({a}.narrow({d}, {h}, n - {h}), {a}.narrow({d}, 0, {h})), {d})",
    "torch.cat((-{a}.narrow({d}, {h}, n - {h}), {a}.narrow({d}, 0, {h})), {d})",
    "torch.cat((-{a}.narrow({d}, 0, {h}), {a}.narrow({d}, {h}, n - {h})), {d})",
    "F.pad({a}, (1, 0)).narrow(-1, 0, n)",
    "F.pad({a}.narrow(-1, {k}, n - {k}), (0, {k}), value=0.5)",
    "{a}.repeat_interleave(2, {d}).narrow({d}, {k}, n)",
    "torch.cat(({a}, {b}), {d}).narrow({d}, {k}, n)",
    "torch.stack(({a}, {b}), {d}).mean({d})",
    "torch.stack(({a}, {b}), {d}).flatten({d}, {d} + 1).narrow({d}, {k}, n)",
    "{a}.slice_scatter({b}.narrow({d}, 0, {h}), {d}, n - {h}, n)",
    "{a}.index_copy({d}, p, {b})",
    "{a}.index_add({d}, p, {b}, alpha=0.5)",
    "{a}.masked_fill({b} > 0.3, 0.25)",
)
FROM_RANK_2 = (
    "{a}.transpose({d}, {e})",
    "{a}.transpose({d}, {e}).contiguous()",
    "{a} + {b}.transpose({d}, {e})",
    "{a}.transpose({d}, {e}).reshape({a}.shape).sin()",
    "{a}.transpose({d}, {e}).flatten().view_as({a})",
    "{a} + {b}.sum({d}).unsqueeze({e}) * 0.3",
    "{a} * {b}.amax({d}).unsqueeze({e})",
    "{a} + {b}.mean(({d}, {e}), keepdim=True)",
    "{a}.select({d}, {k}).unsqueeze({e}) + {b}",
    "{a}.select({d}, {k}).unsqueeze({e}).expand_as({a})",
    "{a}.select_scatter({b}.select({d}, {k}), {e}, {k})",
    "{a} + {b}.diagonal(0, {d}, {e}).unsqueeze({d})",
    "{a}.diagonal_scatter({b}.select({d}, {k}), 0, -2, -1)",
    "{a}.tril()",
    "{a}.triu(1)",
    "{a} @ {b} / n",
    "{a}.transpose(-1, -2) @ {b} / n",
    "{a} @ {b}.transpose(-1, -2) / n",
    "({a} @ {b}.select(-1, {k}).unsqueeze(-1)) / n + {c}",
    "F.linear({a}, (p[:, None] / (n + p)).type_as({a}), p.type_as({a})) * 0.5",
    "F.scaled_dot_product_attention({a}, {b}, {c})",
    "{a}.softmax(-1) @ {b}",
)
# Values of one rank alone.
OF_RANK = {
    3: (
        "F.conv1d({a}, {b}, padding='same') / n",
        "F.avg_pool1d({a}, 3, 1, 1)",
        "F.max_pool1d({a}, 3, 1, 1)",
        "F.batch_norm({a}, None, None, training=True)",
        "F.instance_norm({a})",
        "torch.einsum('abc,cbd->adb', {a}, {b}) / n",
        "{a}.permute(2, 0, 1)",
        "torch.baddbmm({a}, {b}, {c}, alpha=0.1)",
    ),
    4: (
        "F.conv2d({a}, {b}, padding='same') / n",
        "F.conv2d({a}, {b}.narrow(2, 0, 1).narrow(3, 0, 1)) / n",
        "F.avg_pool2d({a}, 3, 1, 1)",
        "F.max_pool2d({a}, 3, 1, 1)",
        "F.batch_norm({a}, None, None, training=True)",
        "{a}.mean((2, 3), keepdim=True) * {b}",
        "{a}.permute(0, 2, 3, 1)",
        "{a}.permute(0, 3, 1, 2).contiguous()",
        "F.interpolate({a}, scale_factor=2.0).narrow(2, {k}, n).narrow(3, 0, n)",
    ),
}
# Statements that write into `{a}`, and into whatever is a view of it.
WRITES = (
    "{a}.add_({b}.clone())",
    "{a}.mul_(0.5)",
    "{a}.tanh_()",
    "{a}.copy_({b}.clone())",
    "{a}.narrow({d}, 0, {h}).copy_({b}.narrow({d}, n - {h}, {h}).clone())",
    "{a}.narrow({d}, {k}, 1).add_({b}.narrow({d}, {k}, 1).clone())",
    "{a}.select({d}, {k}).mul_(0.5)",
    "{a}.select({d}, {k}).copy_({b}.select(-1, {k}).clone())",
    "{a}.index_add_({d}, p, {b}.clone(), alpha=0.5)",
    "{a}.index_copy_({d}, p, {b}.clone())",
    "{a}.masked_fill_({b} > 0.5, 0.25)",
    "{a}.scatter_add_({d}, i, {b}.clone())",
    "{a}.index_put_((p,), {b}.clone(), accumulate=True)",
)
WRITES_FROM_RANK_2 = (
    "{a}.transpose({d}, {e}).mul_({b}.clone())",
    "{a}.transpose({d}, {e}).narrow({e}, 0, {h}).fill_(0.5)",
    "{a}.diagonal(0, {d}, {e}).mul_(0.5)",
    "{a}.diagonal(0, {d}, {e}).copy_({b}.select({d}, {k}).clone())",
)
STYLES = ("forward", "backward", "in place")
SIZES = (2, 3, 4, 4, 6, 8, 8, 16)
LARGEST_OF_RANK = {1: 16, 2: 16, 3: 8, 4: 6}
ARGUMENTS = ("x", "y")


@dataclass(frozen=True)
class Statement:
    """A line of a program.

    Attributes:
        result: the name of its value; empty: it writes into one.
        text: an expression.
    """

    result: str
    text: str

    def __str__(self) -> str:
        return f"{self.result} = {self.text}" if self.result else self.text


@dataclass(frozen=True)
class Program:
    """A function of two values, of a permutation `p` and of indices `i`.

    Attributes:
        seed: what it was drawn from.
        rank: of its values.
        size: of each dimension of its values.
        style: one of `STYLES`.
        statements: what it does, in order.
        results: names of the values that it returns.
    """

    seed: int
    rank: int
    size: int
    style: str
    statements: tuple[Statement, ...]
    results: tuple[str, ...]

    @property
    def name(self) -> str:
        """What reports call it."""
        return f"program {self.seed}"

    @property
    def key(self) -> str:
        """What a journal knows it by."""
        return f"{self.name}[f32]"

    @property
    def backward(self) -> bool:
        """Whether its gradients are compared, too."""
        return self.style == "backward"

    @property
    def source(self) -> str:
        """The function as Python."""
        shape = ", ".join([str(self.size)] * self.rank)
        lines = (
            f"def program(x, y, p, i):  # f32 of [{shape}], {self.style}",
            "    n = x.shape[0]",
            *(f"    {statement}" for statement in self.statements),
            f"    return {', '.join(self.results)},",
        )
        return "\n".join(lines) + "\n"

    def function(self) -> Callable[..., tuple[torch.Tensor, ...]]:
        """Return the function; errors and plans can show its lines."""
        name = f"<{self.name}, {len(self.statements)} statements>"
        linecache.cache[name] = (len(self.source), None, self.source.splitlines(True), name)
        names = {"torch": torch, "F": torch.nn.functional}
        exec(compile(self.source, name, "exec"), names)
        return names["program"]  # type: ignore[return-value]

    def inputs(self, seed: int, size: int = 0) -> tuple[torch.Tensor, ...]:
        """Return arguments: values in (-1.5, 1.5), without zeros and without equal ones.

        Args:
            seed: of the values.
            size: of each dimension; 0: the program's own.
        """
        generator = torch.Generator().manual_seed(seed)
        shape = [size or self.size] * self.rank
        values = [torch.rand(shape, generator=generator) * 3 - 1.5 for _ in ARGUMENTS]
        for value in values:
            value.requires_grad_(self.backward)
        order = torch.randperm(shape[0], generator=generator)
        return *values, order, torch.randint(shape[0], shape, generator=generator)

    def shorter(self) -> Iterator[Program]:
        """Give the programs that have a result or a statement less, the shortest first."""
        for place in range(len(self.results) if len(self.results) > 1 else 0):
            kept = self.results[:place] + self.results[place + 1 :]
            yield replace(self, results=kept)._without_unused()
        for place in reversed(range(len(self.statements))):
            yield self._without(place)

    def _without(self, place: int) -> Program:
        """Leave a statement out, with its first operand in the place of its result."""
        left_out = self.statements[place]
        statements = self.statements[:place] + self.statements[place + 1 :]
        results = self.results
        if left_out.result:
            operand = operands(left_out.text)[0]
            statements = tuple(
                replace(s, text=re.sub(rf"\b{left_out.result}\b", operand, s.text))
                for s in statements
            )
            results = tuple(operand if r == left_out.result else r for r in results)
        return replace(self, statements=statements, results=tuple(dict.fromkeys(results)))

    def _without_unused(self) -> Program:
        used, kept = set(self.results), []
        for statement in reversed(self.statements):
            if not statement.result or statement.result in used:
                kept.append(statement)
                used.update(operands(statement.text))
        return replace(self, statements=tuple(reversed(kept)))


def operands(text: str) -> Sequence[str]:
    """List the values that an expression reads, in order."""
    return re.findall(r"\b(?:[xy]|v\d+)\b", text)


def draw_program(seed: int) -> Program:
    """Draw a program; each seed has one of its own.

    Statements that eager cannot do, such as a write into a leaf that wants a gradient, are left
    out, so that what remains has a result.
    """
    draw = random.Random(seed)
    rank = draw.choice((1, 2, 2, 2, 3, 3, 4))
    size = min(draw.choice(SIZES), LARGEST_OF_RANK[rank])
    program = Program(seed, rank, size, draw.choice(STYLES), (), ARGUMENTS)
    for _ in range(draw.randint(4, 12)):
        longer = _longer(program, draw)
        if _runs(longer):
            program = longer
    made = program.results[len(ARGUMENTS) :]
    if not made:
        return draw_program(seed + 1_000_000)
    kept = sorted(draw.sample(range(len(made)), min(len(made), draw.randint(1, 4))))
    results = tuple(dict.fromkeys((*(made[k] for k in kept), made[-1])))
    return replace(program, results=results)


def _longer(program: Program, draw: random.Random) -> Program:
    """Add a statement; the results are all the values there are."""
    values = program.results
    writes = program.style == "in place" and draw.random() < 0.3
    if writes:
        templates = WRITES + (WRITES_FROM_RANK_2 if program.rank > 1 else ())
    else:
        templates = ANY_RANK + (FROM_RANK_2 if program.rank > 1 else ())
        templates += OF_RANK.get(program.rank, ()) * 3
    d, e = draw.sample(range(program.rank), 2) if program.rank > 1 else (0, 0)
    recent = (*values[-4:], *values[-1:] * 2)
    text = draw.choice(templates).format(
        a=draw.choice(recent), b=draw.choice(recent), c=draw.choice(values),
        d=d, e=e, k=draw.randrange(program.size), h=draw.randrange(1, program.size),
    )  # fmt: skip
    result = "" if writes else f"v{len(values) - len(ARGUMENTS)}"
    statement = Statement(result, text)
    results = (*values, result) if result else values
    return replace(program, statements=(*program.statements, statement), results=results)


def _runs(program: Program) -> bool:
    """Say whether eager can do all of a program, to values that are small enough to compare."""
    inputs = program.inputs(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # convolutions by kernels of an even size
            found = program.function()(*inputs)
    except (RuntimeError, IndexError):
        return False
    shape, writes = inputs[0].shape, program.style == "in place"
    if writes and any(0 in v.stride() for v in found):
        return False  # a write into what is expanded has no defined result
    return all(v.shape == shape and bool((v.abs() < 1e3).all()) for v in found)
