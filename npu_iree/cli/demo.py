"""`npu-iree demo`: a small transformer, one op of it on the host, and what happened."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from torch import nn

from npu_iree.explain import Explanation, explain
from npu_iree.transfers import Ledger, record_transfers

WIDTH, HEADS, TOKENS, VOCABULARY = 256, 4, 64, 1000
HOST_OP = "aten.median"
_PAUSE_S = 0.05


class Block(nn.Module):
    """A pre-norm transformer layer with causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [batch, tokens, width] to the same shape."""
        parts = self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        q, k, v = (p.unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in parts)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        result: torch.Tensor = x + self.mlp(self.norm_2(x))
        return result


class Transformer(nn.Module):
    """A small language model that centres its logits by their median, an op of the host."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(TOKENS, WIDTH) * 0.02)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens [batch, TOKENS] to logits [batch, TOKENS, VOCABULARY]."""
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        centre = torch.median(logits)  # deliberately left to the host
        centred: torch.Tensor = logits - centre
        return centred


def run_demo(console: Console, target: str, layers: int) -> None:
    """Compile, run, compare with eager, and print the tables.

    Raises:
        NpuIreeError: the target does not exist or cannot be opened.
    """
    torch.manual_seed(0)
    logging.getLogger("npu_iree").setLevel(logging.ERROR)  # the table says what fell back
    model = Transformer(layers).eval()
    tokens = torch.randint(0, VOCABULARY, (1, TOKENS))
    options: dict[str, Any] = {"target": target, "disabled_ops": [HOST_OP]}
    compiled = torch.compile(model, backend="npu_iree", options=options)
    with torch.no_grad(), _progress(console) as progress:
        step = progress.add_task("deciding what runs where")
        explanation = explain(model, tokens, options=options)
        progress.update(step, description="compiling the regions")
        started = time.perf_counter()
        compiled(tokens)
        compile_s = time.perf_counter() - started
        progress.update(step, description="running")
        with record_transfers() as ledger:
            actual = compiled(tokens)
        expected = model(tokens)
        times = _milliseconds(lambda: model(tokens), lambda: compiled(tokens))
    difference = float((actual - expected).abs().max())
    _print_regions(console, explanation)
    _print_transfers(console, ledger)
    _print_figures(console, target, compile_s, difference, times)


def _progress(console: Console) -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def _milliseconds(*functions: Callable[[], object], rounds: int = 5, calls: int = 8) -> list[float]:
    """Time functions in interleaved rounds of several calls; medians, in milliseconds.

    Each round begins after a pause, and its first call is not counted: for some milliseconds after
    an op, PyTorch's threads keep their CPUs, from whatever else computes.
    """
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for function, measured in zip(functions, times, strict=True):
            time.sleep(_PAUSE_S)
            function()
            for _ in range(calls):
                started = time.perf_counter()
                function()
                measured.append((time.perf_counter() - started) * 1e3)
    return [statistics.median(measured) for measured in times]


def _print_regions(console: Console, explanation: Explanation) -> None:
    table = Table("where", "ops", Column("why", overflow="fold"), title="What runs where")
    for region in explanation.regions:
        table.add_row(region.name, str(len(region.ops)), "on the device")
    for op in explanation.host_ops:
        table.add_row("host", op.op, f"{op.reason}\n{op.where}\n  {op.code}")
    console.print(table)


def _print_transfers(console: Console, ledger: Ledger) -> None:
    table = Table("kind", "mode", "bytes", "value", "for", title="What crosses at each call")
    for entry in ledger.entries:
        table.add_row(entry.kind, entry.mode, str(entry.nbytes or ""), entry.value, entry.owner)
    console.print(table)


def _print_figures(
    console: Console, target: str, compile_s: float, difference: float, times: list[float]
) -> None:
    table = Table("figure", "value", title=f"Target {target}")
    eager_ms, compiled_ms = times
    table.add_row("largest difference from eager", f"{difference:.2g}")
    table.add_row("first call", f"{compile_s:.1f} s")
    table.add_row("eager, a call", f"{eager_ms:.2f} ms")
    table.add_row(
        "compiled, a call", f"{compiled_ms:.2f} ms ({compiled_ms / eager_ms:.2f} of eager)"
    )
    console.print(table)
