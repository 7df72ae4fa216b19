"""The models that are measured: known architectures at known sizes, random weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn

SEED = 0
PROMPT, CACHE = 64, 512  # tokens: of a prefill, and what a static cache holds
Call = Callable[[], Any]


@dataclass(frozen=True)
class BenchModel:
    """One model and the call that is measured.

    Attributes:
        name: of the case.
        build: makes the model; sizes given by name win over its own.
        inputs: keyword arguments of a call at a batch size.
        shallow: sizes of a model with fewer of the same layers.
        prepare: runs before each call, outside of what is compiled and of what is timed; for a
            cache that moves on.
        training: sizes of the model that is trained: without dropout, for gradients to be
            comparable; None: it is not.
    """

    name: str
    build: Callable[..., nn.Module]
    inputs: Callable[[int], dict[str, Any]]
    shallow: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[[dict[str, Any]], None] | None = None
    training: Mapping[str, Any] | None = None

    def call(self, model: Callable[..., Any], kwargs: dict[str, Any]) -> Call:
        """Give a call, with what runs before it."""

        def call() -> Any:
            self.make_ready(kwargs)
            return model(**kwargs)

        return call

    def make_ready(self, kwargs: dict[str, Any]) -> None:
        """Run what runs before a call."""
        if self.prepare is not None:
            self.prepare(kwargs)


def _hf(model: str, config: str, **sizes: Any) -> Callable[[], nn.Module]:
    """Give what builds a model of transformers from its configuration."""

    def build(**others: Any) -> nn.Module:
        torch.manual_seed(SEED)
        made = getattr(transformers, model)(getattr(transformers, config)(**{**sizes, **others}))
        return made.eval()  # type: ignore[no-any-return]

    return build


def _mlp() -> nn.Module:
    torch.manual_seed(SEED)
    layers = [nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 2048), nn.GELU()]
    return _Keyword(nn.Sequential(*layers, nn.Linear(2048, 512)).eval())


class _Keyword(nn.Module):
    """Takes its argument by name, as the others do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


def _tokens(batch: int, length: int, vocabulary: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(3, vocabulary, (batch, length), generator=generator)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(SEED))


_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": CACHE,
}


def _llama_inputs(length: int, past: int) -> Callable[[int], dict[str, Any]]:
    """Give what makes tokens and a static cache that has seen `past` tokens."""

    def inputs(batch: int) -> dict[str, Any]:
        config = transformers.LlamaConfig(**_LLAMA)
        cache = transformers.StaticCache(config=config, max_cache_len=CACHE)
        keys = torch.zeros(batch, 8, 0, 64)
        for layer in cache.layers:
            layer.lazy_initialization(keys, keys)
            layer.keys.copy_(0.1 * _random(*layer.keys.shape))
            layer.values.copy_(0.1 * _random(*layer.values.shape))
        _rewind(past)({"past_key_values": cache})
        return {"input_ids": _tokens(batch, length, 32000), "past_key_values": cache}

    return inputs


def _rewind(past: int) -> Callable[[dict[str, Any]], None]:
    """Give what sets a cache back, so that every call computes the same."""

    def rewind(kwargs: dict[str, Any]) -> None:
        for layer in kwargs["past_key_values"].layers:
            layer.cumulative_length.fill_(past)

    return rewind


def _text(length: int, vocabulary: int) -> Callable[[int], dict[str, Any]]:
    return lambda batch: {"input_ids": _tokens(batch, length, vocabulary)}


def _image(size: int = 224) -> Callable[[int], dict[str, Any]]:
    return lambda batch: {"pixel_values": _random(batch, 3, size, size)}


def _spectrogram(batch: int) -> dict[str, Any]:
    return {"x": _random(batch, 80, 3000)}


def _t5_inputs(batch: int) -> dict[str, Any]:
    return {
        "input_ids": _tokens(batch, 64, 32128),
        "decoder_input_ids": _tokens(batch, 32, 32128),
    }


class _WhisperEncoder(nn.Module):
    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        config = transformers.WhisperConfig(
            d_model=512, encoder_layers=layers, encoder_attention_heads=8
        )
        self.encoder = transformers.models.whisper.modeling_whisper.WhisperEncoder(config)

    def forward(self, x: torch.Tensor) -> Any:
        return self.encoder(x)


def _whisper(**others: Any) -> nn.Module:
    torch.manual_seed(SEED)
    return _WhisperEncoder(**others).eval()


_FEW = {"num_hidden_layers": 2}
_FEW_T5 = {"num_layers": 2, "num_decoder_layers": 2}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_NO_GPT2_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_BASIC = {"layer_type": "basic", "depths": [2, 2, 2, 2], "hidden_sizes": [64, 128, 256, 512]}
_MAMBA = {"vocab_size": 8000, "hidden_size": 512, "num_hidden_layers": 4, "use_cache": False}

_llama = _hf("LlamaForCausalLM", "LlamaConfig", **_LLAMA)
_bert = _hf("BertModel", "BertConfig")
_gpt2 = _hf("GPT2LMHeadModel", "GPT2Config", use_cache=False)
_t5 = _hf("T5ForConditionalGeneration", "T5Config", use_cache=False)
_resnet18 = _hf("ResNetForImageClassification", "ResNetConfig", num_labels=1000, **_BASIC)
_resnet50 = _hf("ResNetForImageClassification", "ResNetConfig", num_labels=1000)
_mobilenet = _hf("MobileNetV2ForImageClassification", "MobileNetV2Config", num_labels=1000)
_mamba = _hf("MambaForCausalLM", "MambaConfig", **_MAMBA)

_LIST = (
    BenchModel("mlp", _mlp, lambda batch: {"x": _random(batch, 512)}, training={}),
    BenchModel("bert", _bert, _text(128, 30522), _FEW, training=_NO_DROPOUT),
    BenchModel("gpt2", _gpt2, _text(128, 50257), {"n_layer": 2}, training=_NO_GPT2_DROPOUT),
    BenchModel("llama-prefill", _llama, _llama_inputs(PROMPT, 0), _FEW, _rewind(0)),
    BenchModel("llama-decode", _llama, _llama_inputs(1, PROMPT), _FEW, _rewind(PROMPT)),
    BenchModel("vit", _hf("ViTModel", "ViTConfig"), _image(), _FEW, training={}),
    BenchModel("resnet18", _resnet18, _image(), training={}),
    BenchModel("resnet50", _resnet50, _image(), {"depths": [2, 2, 2, 2]}, training={}),
    BenchModel("mobilenetv2", _mobilenet, _image(), training={"classifier_dropout_prob": 0.0}),
    BenchModel("whisper", _whisper, _spectrogram, {"layers": 2}, training={}),
    BenchModel("t5", _t5, _t5_inputs, _FEW_T5, training={"dropout_rate": 0.0}),
    BenchModel("mamba", _mamba, _text(32, 8000), {"num_hidden_layers": 1}, training={}),
)
MODELS = {model.name: model for model in _LIST}
