"""A tiny Llama with random weights that generates with a static KV cache."""

from __future__ import annotations

from typing import Any

import torch
import transformers

LENGTH, TOKENS, VOCABULARY = 48, 24, 96
PROMPT = (1, 5, 9, 2, 33, 70, 8)


def llama() -> transformers.LlamaForCausalLM:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH,
        eos_token_id=None, pad_token_id=0, bos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def generate(model: Any, prompt: torch.Tensor, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        tokens: torch.Tensor = model.generate(
            prompt,
            max_new_tokens=TOKENS,
            do_sample=False,
            cache_implementation="static",
            **options,
        )
    return tokens
