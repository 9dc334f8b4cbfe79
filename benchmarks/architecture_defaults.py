"""Twenty-five current architectures of transformers as their configurations have them, for plans with default settings.

Half of them are in the other tables already; here are those that came later, and the names of all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.architecture_table import (
    BLOCKS,
    GROUPED,
    HEADS,
    SAMPLES,
    configuration,
    configured,
    made,
    tokens,
)
from partitioner import Workload

_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}
_IMAGE_TOKEN, _ENDS = 63, (61, 60)
"""The word that stands for a piece of an image, and those before and after an image."""


def _labelled(name: str, fields: Mapping[str, Any], batch: Mapping[str, Tensor]) -> Workload:
    """Build ``name`` for a batch with twelve words to predict."""
    model = made(f"{name}ForConditionalGeneration", f"{name}Config", fields)
    return Workload(model, {**batch, "labels": tokens(60, SAMPLES, 12)})


def _t5gemma() -> Workload:
    side = configuration("T5GemmaModuleConfig", **HEADS, sliding_window=8)
    return _labelled(
        "T5Gemma", {"encoder": side, "decoder": side, "vocab_size": 64}, {"input_ids": tokens(60)}
    )


def _moonshine() -> Workload:
    sides = {f"{side}_num_{what}": n for side in ("encoder", "decoder") for what, n in _SIDE.items()}
    fields = {**_WORDS, **sides, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 80}
    return _labelled("Moonshine", fields, {"input_values": torch.randn(SAMPLES, 8000)})


_SIDE = {"hidden_layers": 2, "attention_heads": 4}
_WORDS = {
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}


def _pooled(output: Any, batch: object) -> Tensor:
    loss: Tensor = output.pooler_output.square().mean()
    return loss


def _masks(output: Any, batch: object) -> Tensor:
    loss: Tensor = output.pred_masks.square().mean()
    return loss


def _dinov3() -> Workload:
    model = made("DINOv3ViTModel", "DINOv3ViTConfig", {**BLOCKS, "image_size": 32, "patch_size": 8})
    return Workload(model, {"pixel_values": torch.randn(SAMPLES, 3, 32, 32)}, _pooled)


def _sam2() -> Workload:
    sides, widths = [[16, 16], [8, 8], [4, 4]], [16, 32, 64, 128]
    backbone = configuration(
        "Sam2HieraDetConfig",
        hidden_size=16,
        num_attention_heads=1,
        image_size=[64, 64],
        blocks_per_stage=[1, 1, 2, 1],
        embed_dim_per_stage=widths,
        num_attention_heads_per_stage=[1, 2, 4, 8],
        window_size_per_stage=[8, 4, 8, 4],
        global_attention_blocks=[3],
        window_positional_embedding_background_size=[7, 7],
    )
    fields = {
        "vision_config": configuration(
            "Sam2VisionConfig",
            backbone_config=backbone,
            backbone_channel_list=widths[::-1],
            backbone_feature_sizes=sides,
            fpn_hidden_size=32,
        ),
        "prompt_encoder_config": configuration(
            "Sam2PromptEncoderConfig", hidden_size=32, image_size=64, patch_size=16
        ),
        "mask_decoder_config": configuration(
            "Sam2MaskDecoderConfig", hidden_size=32, mlp_dim=64, **_SIDE, iou_head_hidden_dim=32
        ),
    }
    batch = {
        "pixel_values": torch.randn(SAMPLES, 3, 64, 64),
        "input_points": torch.rand(SAMPLES, 1, 1, 2) * 60,
        "input_labels": torch.ones(SAMPLES, 1, 1, dtype=torch.long),
    }
    return Workload(made("Sam2Model", "Sam2Config", fields), batch, _masks)


def _qwen2_5_vl() -> Workload:
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 32}
    vision |= {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 16}
    fields = {
        "text_config": {**GROUPED, "rope_parameters": rope},
        "vision_config": {**vision, "fullatt_block_indexes": [1]},
        "image_token_id": _IMAGE_TOKEN,
        "video_token_id": 62,
        "vision_start_token_id": _ENDS[0],
        "vision_end_token_id": _ENDS[1],
    }
    ids = tokens(60, SAMPLES, 12)
    ids[:, 1], ids[:, 2:6], ids[:, 6] = _ENDS[0], _IMAGE_TOKEN, _ENDS[1]
    batch = {
        "input_ids": ids,
        "pixel_values": torch.randn(SAMPLES * 16, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * SAMPLES),
        "labels": ids.clone(),
        "mm_token_type_ids": (ids == _IMAGE_TOKEN).long(),
    }
    return Workload(made("Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLConfig", fields), batch)


def _llava() -> Workload:
    fields = {
        "text_config": configuration("LlamaConfig", **{**GROUPED, "pad_token_id": None}),
        "vision_config": configuration("CLIPVisionConfig", **BLOCKS, image_size=32, patch_size=8),
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "image_token_id": _IMAGE_TOKEN,
        "image_token_index": _IMAGE_TOKEN,
    }
    ids = tokens(60, SAMPLES, 24)
    ids[:, 2:19] = _IMAGE_TOKEN  # one for each of the 4 x 4 patches, and one for the whole image
    batch = {"input_ids": ids, "pixel_values": torch.randn(SAMPLES, 3, 32, 32), "labels": ids.clone()}
    return Workload(made("LlavaForConditionalGeneration", "LlavaConfig", fields), batch)


_DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "zamba2": (
        "Zamba2",
        {
            **GROUPED,
            "num_key_value_heads": 4,
            "mamba_d_state": 8,
            "mamba_ngroups": 2,
            "n_mamba_heads": 8,
            "mamba_headdim": 8,
            "mamba_expand": 2,
            "chunk_size": 8,
            "num_mem_blocks": 1,
            "layers_block_type": ["mamba", "hybrid"],
            "adapter_rank": 4,
            "hybrid_layer_ids": [1],
        },
    ),
    "falcon-h1": ("FalconH1", {**HEADS, **_MAMBA, "mamba_d_ssm": 64}),
    "olmo3": ("Olmo3", {**GROUPED, "sliding_window": 8}),
    "glm4-moe": (
        "Glm4Moe",
        {
            **HEADS,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {
            **GROUPED,
            **_MAMBA,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
            "layer_types": ["mamba", "attention"],
            "mamba_expand": 2,
            "position_embedding_type": "rope",
        },
    ),
    "lfm2": ("Lfm2", {**GROUPED, "layer_types": ["conv", "full_attention"], "block_multiple_of": 16}),
    "smollm3": ("SmolLM3", GROUPED),
    "bitnet": ("BitNet", GROUPED),
}

LATER: dict[str, Callable[[], Workload]] = {
    "t5gemma": _t5gemma,
    "moonshine": _moonshine,
    "dinov3": _dinov3,
    "sam2": _sam2,
    "qwen2.5-vl": _qwen2_5_vl,
    "llava-whole": _llava,
    **{
        n: partial(configured, f"{c}ForCausalLM", f"{c}Config", fields)
        for n, (c, fields) in _DECODERS.items()
    },
}
"""Architectures that the other table does not have."""
DEFAULTS = (
    *(
        "llama-1b",
        "qwen3-moe",
        "mixtral",
        "gpt-oss",
        "deepseek-v3",
        "mamba2",
        "jamba",
        "gemma3",
        "modernbert",
    ),
    *("whisper", "vit", *LATER),
)
"""The names of the twenty-five."""
