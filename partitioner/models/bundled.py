"""The models that ship with the package: configurations only, built through ``transformers``.

Sizes are the published ones (each model's own config.json). ``size="tiny"`` gives the same
architecture with few layers, small dimensions and real (random, seeded) weights: for tests and ``verify``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from cost_models.errors import UsageError
from partitioner.models.hugging_face import build, example_batch, parse_dtype, transformers_module
from partitioner.models.workload import Workload

__all__ = ["NAMES", "bundled"]


@dataclass(frozen=True)
class Bundled:
    """A model class of transformers with its config's values at full and at tiny size."""

    model_class: str
    config_class: str
    full: Mapping[str, Any]
    tiny: Mapping[str, Any]
    layers: tuple[str, ...]
    """The config's names for the number of layers, all set by ``--set layers=N``."""
    seq: int = 0
    """Default tokens per sample; 0: the model has no such length."""
    dtype: str = "float32"
    meta: bool = False
    """True if the full size is built without weights."""
    common: Mapping[str, Any] = field(default_factory=dict)
    tiny_experts: str = ""
    """The way in which the tiny size runs its experts: grouped matrix products do not know float64."""


_TINY_BLOCKS = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
_TINY_TEXT = {**_TINY_BLOCKS, "vocab_size": 64, "max_position_embeddings": 64}


def _llama(hidden: int, inner: int, layers: int, heads: int, tied: bool = False) -> Bundled:
    """Describe a Llama 3: grouped-query attention with 8 key-value heads, vocabulary 128,256."""
    full = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
        "bos_token_id": 128_000,
        "eos_token_id": 128_001,
    }
    return Bundled(
        "LlamaForCausalLM",
        "LlamaConfig",
        full,
        {**_TINY_TEXT, "num_key_value_heads": 2},
        ("num_hidden_layers",),
        seq=4096,
        dtype="bfloat16",
        meta=True,
        common={"tie_word_embeddings": tied},
    )


_TABLE: dict[str, Bundled] = {
    "gpt2": Bundled(
        "GPT2LMHeadModel",
        "GPT2Config",
        {},
        {
            "n_embd": 32,
            "n_layer": 4,
            "n_head": 4,
            "n_positions": 64,
            "vocab_size": 64,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
        ("n_layer",),
        seq=1024,
        common={"loss_type": "ForCausalLM"},
    ),
    "llama-1b": _llama(2048, 8192, 16, 32, tied=True),
    "llama-8b": _llama(4096, 14_336, 32, 32),
    "llama-70b": _llama(8192, 28_672, 80, 64),
    "llama-405b": _llama(16_384, 53_248, 126, 128),
    "bert": Bundled(
        "BertForMaskedLM",
        "BertConfig",
        {},
        _TINY_TEXT,
        ("num_hidden_layers",),
        seq=512,
    ),
    "t5": Bundled(
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": 768, "d_ff": 3072, "d_kv": 64, "num_layers": 12, "num_heads": 12},
        {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 3, "num_heads": 4, "vocab_size": 64},
        ("num_layers", "num_decoder_layers"),
        seq=512,
        common={"decoder_start_token_id": 0},
    ),
    "vit": Bundled(
        "ViTForImageClassification",
        "ViTConfig",
        {"num_labels": 1000},
        {**_TINY_BLOCKS, "image_size": 32, "patch_size": 8, "num_labels": 10},
        ("num_hidden_layers",),
    ),
    "resnet50": Bundled(
        "ResNetForImageClassification",
        "ResNetConfig",
        {"num_labels": 1000},
        {
            "embedding_size": 8,
            "hidden_sizes": [16, 24, 32, 48],
            "depths": [1, 1, 2, 1],
            "num_labels": 10,
            "image_size": 64,
        },
        (),
    ),
    "whisper": Bundled(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            "d_model": 768,
            "encoder_layers": 12,
            "decoder_layers": 12,
            "encoder_attention_heads": 12,
            "decoder_attention_heads": 12,
            "encoder_ffn_dim": 3072,
            "decoder_ffn_dim": 3072,
            "vocab_size": 51_865,
        },
        {
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "vocab_size": 64,
            "num_mel_bins": 8,
            "max_source_positions": 24,
            "max_target_positions": 32,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 1,
            "decoder_start_token_id": 1,
        },
        ("encoder_layers", "decoder_layers"),
        seq=448,
    ),
    "mixtral": Bundled(
        "MixtralForCausalLM",
        "MixtralConfig",
        {},
        {
            **_TINY_TEXT,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_key_value_heads": 2,
            "num_local_experts": 4,
        },
        ("num_hidden_layers",),
        seq=4096,
        dtype="bfloat16",
        meta=True,
        tiny_experts="batched_mm",
    ),
}

NAMES = tuple(_TABLE)
TINY_SEQ = 16


def bundled(
    name: str,
    *,
    size: Literal["full", "tiny"] = "full",
    seq: int = 0,
    dtype: str = "",
    batch: int = 2,
    layers: int = 0,
    seed: int = 0,
) -> Workload:
    """Build a bundled model with an example batch of ``batch`` samples; 0 or "" is the model's own default.

    Full-size Llama and Mixtral have no weights (they are on meta); everything else has random ones from
    ``seed``.
    """
    transformers = transformers_module(f"the bundled model {name}")
    if name not in _TABLE:
        raise UsageError(f"there is no bundled model {name!r}", suggestions=[f"one of {' '.join(NAMES)}"])
    entry = _TABLE[name]
    tiny = size == "tiny"
    values = {**entry.common, **(entry.tiny if tiny else entry.full)}
    if layers and not entry.layers:
        raise UsageError(f"{name} has no number of layers to set")
    values |= dict.fromkeys(entry.layers, layers) if layers else {}
    config = getattr(transformers, entry.config_class)(**values)
    if tiny and entry.tiny_experts:
        config._experts_implementation = entry.tiny_experts
    model_dtype = parse_dtype(dtype or ("float32" if tiny else entry.dtype))
    model = build(
        getattr(transformers, entry.model_class),
        config,
        model_dtype,
        on_meta=entry.meta and not tiny,
        seed=seed,
    )
    tokens = seq or (min(TINY_SEQ, entry.seq) if tiny else entry.seq)
    return Workload(
        model, example_batch(model, tokens, batch, seed), name=name if not tiny else f"{name}-tiny"
    )
