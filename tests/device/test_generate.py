"""Hugging Face `generate` with a static cache, model and inputs on "npu", compiled."""

from __future__ import annotations

from collections import Counter

import torch
from transformers.generation.streamers import BaseStreamer

import npu_iree
from models.generation import PROMPT, TOKENS, generate, llama

NPU = "npu"


class Reader(BaseStreamer):
    """Reads each token as soon as it is there."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        """Nothing is left to do."""


def test_only_the_new_token_crosses(counts: Counter[str]) -> None:
    model, prompt = llama(), torch.tensor([PROMPT])
    expected = generate(model, prompt)
    model.to(NPU)
    model.forward = torch.compile(model.forward, backend="npu_iree")
    assert torch.equal(generate(model, prompt.to(NPU)).cpu(), expected)
    graphs, given, reader = counts["graphs"], prompt.to(NPU), Reader()
    with npu_iree.record_transfers() as ledger:
        tokens = generate(model, given, streamer=reader)
    assert torch.equal(tokens.cpu(), expected)
    assert reader.tokens == expected[0].tolist()
    assert counts["graphs"] == graphs <= 3
    crossed = Counter((t.kind, t.nbytes) for t in ledger.transfers)
    prompt_read = ("d2h", prompt.nbytes)
    token, is_done = ("d2h", 8), ("d2h", 1)
    assert crossed[prompt_read] == 1
    assert crossed[token] == TOKENS
    assert TOKENS <= crossed[is_done] <= TOKENS + 2  # and two questions about the prompt
    others = {key: n for key, n in crossed.items() if key not in (prompt_read, token, is_done)}
    assert sum(others.values()) < TOKENS / 4, f"before the first token: {others}"
