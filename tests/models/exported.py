"""Models as torch.export takes them: the zoo's BERT, a ResNet, and a Llama in two entry points.

`npu-iree compile tests/models/exported.py:llama` compiles both of them; saved as .pt2 files they
are what `save` writes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.export import Dim, ExportedProgram

from models.zoo import LAYERS, ZOO

PROMPT, MOST = 8, 48  # tokens in the example, and at most
_CACHES = tuple(f"{kind}{i}" for i in range(LAYERS) for kind in ("key", "value"))
_ROWS = {row.name: row for row in ZOO}

Tensors = tuple[torch.Tensor, ...]
Pair = tuple[nn.Module, Any]


class Prefill(nn.Module):
    """A prompt in; the logits, and the keys and values of each layer, out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> Tensors:
        out = self.model(input_ids=input_ids, use_cache=True)
        return out.logits, *_flat(out.past_key_values)


class Decode(nn.Module):
    """One token and the keys and values so far in; the logits, and those one longer, out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        token: torch.Tensor,
        key0: torch.Tensor,
        value0: torch.Tensor,
        key1: torch.Tensor,
        value1: torch.Tensor,
    ) -> Tensors:
        cache = transformers.DynamicCache(config=self.model.config)
        for i, (key, value) in enumerate(((key0, value0), (key1, value1))):
            cache.update(key, value, i)
        out = self.model(input_ids=token, past_key_values=cache, use_cache=True)
        return out.logits, *_flat(out.past_key_values)


def bert() -> Pair:
    return _ROWS["bert"].build(), _ROWS["bert"].inputs()


def resnet() -> Pair:
    """The zoo's ResNet-50, without the blocks that repeat another one."""
    model, inputs = _ROWS["resnet50"].build(), _ROWS["resnet50"].inputs()
    for stage in model.resnet.encoder.stages:
        stage.layers = stage.layers[:2]
    return model, inputs


def llama() -> dict[str, Pair]:
    model = _ROWS["llama"].build()
    model.config.use_cache = True
    model.set_attn_implementation("eager")
    prefill, prompt = Prefill(model), tokens(PROMPT)
    with torch.no_grad():
        caches = prefill(prompt)[1:]
    return {"prefill": (prefill, (prompt,)), "decode": (Decode(model), (tokens(1), *caches))}


def tokens(count: int) -> torch.Tensor:
    return (torch.arange(count) * 37 % 500).view(1, count)


@torch.no_grad()
def exported(name: str) -> dict[str, ExportedProgram]:
    """Export one of the models, by its entry points; the Llama's sequence is dynamic."""
    made = MODELS[name]()
    pairs = made if isinstance(made, dict) else {"main": made}
    return {entry: _export(entry, model, inputs) for entry, (model, inputs) in pairs.items()}


def save(name: str, folder: Path) -> list[str]:
    """Export a model to .pt2 files; return them as `npu-iree compile` takes them."""
    sources = []
    for entry, program in exported(name).items():
        file = folder / f"{name}-{entry}.pt2"
        torch.export.save(program, file)
        sources.append(f"{entry}={file}")
    return sources


def _export(entry: str, model: nn.Module, inputs: Any) -> ExportedProgram:
    if isinstance(inputs, dict):
        return torch.export.export(model, (), inputs)
    return torch.export.export(model, inputs, dynamic_shapes=_DYNAMIC[entry])


def _flat(cache: Any) -> Tensors:
    return tuple(t for layer in cache.layers for t in (layer.keys, layer.values))


_DYNAMIC: dict[str, Any] = {
    "prefill": {"input_ids": {1: Dim("length", min=1, max=MOST)}},
    "decode": {
        "token": None,
        **{name: {2: Dim.AUTO(min=1, max=MOST - 1)} for name in _CACHES},
    },
}
MODELS: dict[str, Callable[[], Any]] = {"bert": bert, "resnet": resnet, "llama": llama}
