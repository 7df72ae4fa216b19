"""The model zoo: tiny, randomly initialised Hugging Face models, built in code, no network.

The classes and code paths are those a user gets by default; only the sizes are small, so that all
eight compile in a minute or two. Each is captured as exactly one Dynamo graph under `no_grad`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers
from torch import nn

BATCH, SEQ = 2, 16
VOCAB = 512
HIDDEN, HEADS, LAYERS, FEED_FORWARD = 64, 4, 2, 128
SEED = 0

Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class ZooModel:
    """A model of the zoo.

    Attributes:
        name: the architecture, as users call it.
        build: makes the model in eval mode; the same weights every time.
        inputs: makes the keyword arguments of one call; the same values every time.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]

    def __str__(self) -> str:
        return self.name


def flatten(output: transformers.utils.ModelOutput) -> dict[str, torch.Tensor]:
    """Return the tensors of a model's output, by a name such as `past_key_values[0]`."""
    tensors: dict[str, torch.Tensor] = {}

    def add(name: str, value: object) -> None:
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        elif isinstance(value, (list, tuple)):
            for i, item in enumerate(value):
                add(f"{name}[{i}]", item)

    for name, value in output.items():
        add(name, value)
    return tensors


def _seeded(model: Callable[[object], nn.Module], config: object) -> nn.Module:
    """Build a model whose parameters and statistics all differ.

    A fresh one has biases of 0, scales of 1 and nearly uniform attention: a compiler that swapped
    two of them would go unnoticed.
    """
    torch.manual_seed(SEED)
    made = model(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() <= 2:  # convolutions start out spread as they are
                parameter += 0.1 * torch.randn_like(parameter)
        for norm in made.modules():
            if isinstance(norm, nn.BatchNorm2d):
                norm.running_mean += 0.1 * torch.randn_like(norm.running_mean)
                norm.running_var += 0.5 * torch.rand_like(norm.running_var)
    return made


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(SEED))


def _tokens(length: int = SEQ) -> torch.Tensor:
    return torch.randint(
        3, VOCAB, (BATCH, length), generator=torch.Generator().manual_seed(SEED + length)
    )


def _attention_mask() -> torch.Tensor:
    """Return the mask of a batch whose second row ends in three tokens of padding."""
    mask = torch.ones(BATCH, SEQ, dtype=torch.int64)
    mask[1, -3:] = 0
    return mask


def _bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=FEED_FORWARD,
        max_position_embeddings=64,
    )
    return _seeded(transformers.BertModel, config)


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_positions=64,
        n_embd=HIDDEN,
        n_layer=LAYERS,
        n_head=HEADS,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
    )
    return _seeded(transformers.GPT2LMHeadModel, config)


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,  # grouped queries, as in Llama 3
        intermediate_size=FEED_FORWARD,
        max_position_embeddings=64,
        use_cache=False,
    )
    return _seeded(transformers.LlamaForCausalLM, config)


def _vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=FEED_FORWARD,
        image_size=32,
        patch_size=8,
        num_labels=10,
    )
    return _seeded(transformers.ViTForImageClassification, config)


def _resnet50() -> nn.Module:
    """Build ResNet-50: its 16 bottleneck blocks, an eighth of their width."""
    config = transformers.ResNetConfig(
        embedding_size=8,
        hidden_sizes=[32, 64, 128, 256],
        depths=[3, 4, 6, 3],
        layer_type="bottleneck",
        num_labels=10,
    )
    return _seeded(transformers.ResNetForImageClassification, config)


def _t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCAB,
        d_model=HIDDEN,
        d_kv=HIDDEN // HEADS,
        d_ff=FEED_FORWARD,
        num_layers=LAYERS,
        num_heads=HEADS,
        use_cache=False,
    )
    return _seeded(transformers.T5ForConditionalGeneration, config)


def _whisper() -> nn.Module:
    config = transformers.WhisperConfig(
        vocab_size=VOCAB,
        d_model=HIDDEN,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=FEED_FORWARD,
        decoder_ffn_dim=FEED_FORWARD,
        max_source_positions=2 * SEQ,
        max_target_positions=SEQ,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        use_cache=False,
    )
    return _seeded(transformers.WhisperForConditionalGeneration, config)


def _mamba() -> nn.Module:
    config = transformers.MambaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        use_cache=False,
    )
    return _seeded(transformers.MambaForCausalLM, config)


def _text_inputs() -> Inputs:
    return {"input_ids": _tokens(), "attention_mask": _attention_mask()}


def _image_inputs() -> Inputs:
    return {"pixel_values": _random(BATCH, 3, 32, 32)}


def _large_image_inputs() -> Inputs:
    return {"pixel_values": _random(BATCH, 3, 64, 64)}


def _sequence_to_sequence_inputs() -> Inputs:
    return {**_text_inputs(), "decoder_input_ids": _tokens(SEQ // 2)}


def _audio_inputs() -> Inputs:
    return {
        "input_features": _random(BATCH, 80, 4 * SEQ),  # 80 mel bins; frames are halved once
        "decoder_input_ids": _tokens(SEQ // 2),
    }


def _unpadded_text_inputs() -> Inputs:
    return {"input_ids": _tokens()}


ZOO = (
    ZooModel("bert", _bert, _text_inputs),
    ZooModel("gpt2", _gpt2, _text_inputs),
    ZooModel("llama", _llama, _text_inputs),
    ZooModel("vit", _vit, _image_inputs),
    ZooModel("resnet50", _resnet50, _large_image_inputs),
    ZooModel("t5", _t5, _sequence_to_sequence_inputs),
    ZooModel("whisper", _whisper, _audio_inputs),
    ZooModel("mamba", _mamba, _unpadded_text_inputs),
)
