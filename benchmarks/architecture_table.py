"""Architectures of transformers at a tiny size: configurations, and batches and losses of those that bring none.

Every entry builds a workload with random weights: ``ARCHITECTURES[name]()``. Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from partitioner import Workload
from partitioner.models.hugging_face import build, example_batch, transformers_module

SAMPLES = 4
TOKENS = 16

BLOCKS = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TEXT = {
    **BLOCKS,
    "vocab_size": 64,
    "max_position_embeddings": 80,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**TEXT, "num_key_value_heads": 2}
HEADS = {**GROUPED, "head_dim": 8}
_IMAGE = {"image_size": 32, "patch_size": 8}
_CLASSES = {"num_labels": 10}
_ENCODER_DECODER = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}
_WAVES = {
    **BLOCKS,
    "conv_dim": (16, 16),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "classifier_proj_size": 16,
    # Time masks are drawn by numpy and layers dropped by Python: a plan would keep the first draw, and is refused.
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
}


def configured(model_class: str, config_class: str, fields: Mapping[str, Any]) -> Workload:
    """Build a model whose batch follows from its class."""
    model = made(model_class, config_class, fields)
    return Workload(model, example_batch(model, TOKENS, SAMPLES))


def made(model_class: str, config_class: str, fields: Mapping[str, Any]) -> Any:
    transformers = transformers_module("the table of architectures")
    config = getattr(transformers, config_class)(**fields)
    return build(getattr(transformers, model_class), config, torch.float32, on_meta=False)


def configuration(config_class: str, **fields: Any) -> Any:
    return getattr(transformers_module("the table of architectures"), config_class)(**fields)


def tokens(high: int, *shape: int, low: int = 3) -> Tensor:
    return torch.randint(low, high, shape or (SAMPLES, TOKENS))


def _images(size: int = 32) -> Tensor:
    return torch.randn(SAMPLES, 3, size, size)


def _pairs(output: Any, batch: object) -> Tensor:
    """Compute CLIP's loss: every image belongs to the text at its own place in the batch."""
    scores = output.logits_per_image
    places = torch.arange(scores.shape[0])
    return (F.cross_entropy(scores, places) + F.cross_entropy(scores.t(), places)) / 2


def _signs(output: Any, batch: object) -> Tensor:
    """Compute SigLIP's loss: a yes or no for every pair."""
    scores = output.logits_per_image
    return -F.logsigmoid((2 * torch.eye(scores.shape[0]) - 1) * scores).mean()


def _boxes(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Compute a loss of detection whose queries are matched already."""
    classes = F.cross_entropy(output.logits.transpose(1, 2), batch["classes"])
    return classes + (output.pred_boxes - batch["boxes"]).abs().mean()


def _alignments(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Compute the CTC loss of waves whose every step counts."""
    scores = output.logits.log_softmax(-1).transpose(0, 1)
    steps = torch.full((scores.shape[1],), scores.shape[0])
    sizes = torch.full((scores.shape[1],), batch["spoken"].shape[1])
    return F.ctc_loss(scores, batch["spoken"], steps, sizes)


def _clip() -> Workload:
    text = {**TEXT, "max_position_embeddings": TOKENS}
    model = made(
        "CLIPModel",
        "CLIPConfig",
        {"text_config": text, "vision_config": {**BLOCKS, **_IMAGE}, "projection_dim": 16},
    )
    ids = tokens(64)
    ids[:, -1] = 2  # the text is read at its end
    return Workload(model, {"input_ids": ids, "pixel_values": _images()}, _pairs)


def _siglip() -> Workload:
    text = {**TEXT, "max_position_embeddings": TOKENS, "projection_size": 32}
    model = made("SiglipModel", "SiglipConfig", {"text_config": text, "vision_config": {**BLOCKS, **_IMAGE}})
    return Workload(model, {"input_ids": tokens(64), "pixel_values": _images()}, _signs)


def _wav2vec2() -> Workload:
    model = made("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", {**_WAVES, "num_labels": 5})
    return Workload(model, {"input_values": torch.randn(SAMPLES, 400), "labels": tokens(5, SAMPLES, low=0)})


def _wav2vec2_ctc() -> Workload:
    model = made("Wav2Vec2ForCTC", "Wav2Vec2Config", {**_WAVES, "vocab_size": 12})
    # Named otherwise than the model's own labels, which its forward branches on (a check of the largest).
    batch = {"input_values": torch.randn(SAMPLES, 400), "spoken": tokens(12, SAMPLES, 6, low=1)}
    return Workload(model, batch, _alignments)


def _detr() -> Workload:
    backbone = configuration(
        "ResNetConfig",
        embedding_size=8,
        hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 1, 1],
        out_features=["stage4"],
    )
    fields = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}
    fields |= {"backbone_config": backbone, "num_queries": 5, "num_labels": 4, **_ENCODER_DECODER}
    model = made("DetrForObjectDetection", "DetrConfig", fields)
    batch = {
        "pixel_values": _images(64),
        "pixel_mask": torch.ones(SAMPLES, 64, 64, dtype=torch.long),
        "boxes": torch.rand(SAMPLES, 5, 4),
        "classes": tokens(5, SAMPLES, 5, low=0),
    }
    return Workload(model, batch, _boxes)


class _Llava(nn.Module):
    """Llava as it computes, but for one line: its forward makes a list with an entry per image, and cats the list.

    The number of images is a number in a trace then, and micro-batches would all get every image, which is refused.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.llava = model

    def forward(self, input_ids: Tensor, pixel_values: Tensor, labels: Tensor) -> Any:
        model = self.llava.model
        features = model.multi_modal_projector(model.vision_tower(pixel_values).last_hidden_state)
        embedded = model.language_model.embed_tokens(input_ids)
        places = (input_ids == self.llava.config.image_token_id).unsqueeze(-1)
        return self.llava(inputs_embeds=embedded.masked_scatter(places, features), labels=labels)


def _llava() -> Workload:
    image_token = 63
    text = configuration("LlamaConfig", **{**GROUPED, "pad_token_id": None})
    vision = configuration("CLIPVisionConfig", **BLOCKS, **_IMAGE)
    fields = {"text_config": text, "vision_config": vision, "vision_feature_layer": -1}
    fields |= {"vision_feature_select_strategy": "full"}
    fields |= {"image_token_id": image_token, "image_token_index": image_token}
    model = _Llava(made("LlavaForConditionalGeneration", "LlavaConfig", fields))
    ids = tokens(60, SAMPLES, 24)
    ids[:, 2:19] = image_token  # one for each of the 4 x 4 patches, and one for the whole image
    return Workload(model, {"input_ids": ids, "pixel_values": _images(), "labels": ids.clone()})


def _perceiver() -> Workload:
    fields = {"num_latents": 8, "d_latents": 32, "d_model": 32, "num_blocks": 1, "vocab_size": 64}
    fields |= {"num_self_attends_per_block": 2, "num_self_attention_heads": 4}
    fields |= {"num_cross_attention_heads": 4, "max_position_embeddings": TOKENS}
    ids = tokens(64)
    return Workload(
        made("PerceiverForMaskedLM", "PerceiverConfig", fields), {"inputs": ids, "labels": ids.clone()}
    )


def _vilt() -> Workload:
    fields = {**BLOCKS, **_IMAGE, "vocab_size": 64, "max_image_length": -1, "num_labels": 3}
    model = made("ViltForQuestionAnswering", "ViltConfig", fields)
    batch = {"input_ids": tokens(64), "pixel_values": _images(), "labels": torch.rand(SAMPLES, 3)}
    return Workload(model, batch)


_MOE = {"num_experts": 4, "num_experts_per_tok": 2}
_CONFIGURED: dict[str, tuple[str, str, dict[str, Any]]] = {
    # decoders
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", HEADS),
    "qwen3-moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**HEADS, **_MOE, "moe_intermediate_size": 32}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**HEADS, "sliding_window": 8}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**HEADS, "sliding_window": 8}),
    "deepseek-v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            **TEXT,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 1,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "phi": ("PhiForCausalLM", "PhiConfig", TEXT),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", GROUPED),
    "falcon": (
        "FalconForCausalLM",
        "FalconConfig",
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64},
    ),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**GROUPED, "sliding_window": 8}),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", GROUPED),
    "olmoe": ("OlmoeForCausalLM", "OlmoeConfig", {**GROUPED, **_MOE}),
    "gpt-oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {**HEADS, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    ),
    "llama4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {**HEADS, "intermediate_size_mlp": 64, "num_local_experts": 4, "attention_chunk_size": 8},
    ),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", TEXT),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {
            **BLOCKS,
            "ffn_dim": 64,
            "vocab_size": 64,
            "max_position_embeddings": 64,
            "word_embed_proj_dim": 32,
        },
    ),
    "bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64},
    ),
    # state spaces
    "mamba": (
        "MambaForCausalLM",
        "MambaConfig",
        {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64, "state_size": 4},
    ),
    "mamba2": (
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "vocab_size": 64,
            "state_size": 8,
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 2,
            "chunk_size": 8,
        },
    ),
    "rwkv": (
        "RwkvForCausalLM",
        "RwkvConfig",
        {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64, "context_length": 64},
    ),
    "jamba": (
        "JambaForCausalLM",
        "JambaConfig",
        {
            **GROUPED,
            "num_experts": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
        },
    ),
    # encoders
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", TEXT),
    "xlm-r": ("XLMRobertaForSequenceClassification", "XLMRobertaConfig", {**TEXT, "num_labels": 3}),
    "albert": ("AlbertForMaskedLM", "AlbertConfig", {**TEXT, "embedding_size": 16}),
    "deberta": (
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    ),
    "modernbert": (
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        {**TEXT, "local_attention": 8, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "distilbert": (
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {
            "dim": 32,
            "hidden_dim": 64,
            "n_layers": 2,
            "n_heads": 4,
            "vocab_size": 64,
            "max_position_embeddings": 64,
        },
    ),
    "electra": ("ElectraForTokenClassification", "ElectraConfig", {**TEXT, "embedding_size": 16}),
    "longformer": ("LongformerForMaskedLM", "LongformerConfig", {**TEXT, "attention_window": 4}),
    "bigbird": (
        "BigBirdForMaskedLM",
        "BigBirdConfig",
        {**TEXT, "sep_token_id": 2, "attention_type": "original_full"},
    ),
    # encoders and decoders
    "bart": (
        "BartForConditionalGeneration",
        "BartConfig",
        {
            **_ENCODER_DECODER,
            "vocab_size": 64,
            "max_position_embeddings": 64,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
            "forced_eos_token_id": 2,
        },
    ),
    "pegasus": (
        "PegasusForConditionalGeneration",
        "PegasusConfig",
        {
            **_ENCODER_DECODER,
            "vocab_size": 64,
            "max_position_embeddings": 64,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "decoder_start_token_id": 0,
        },
    ),
    # images
    "swin": (
        "SwinForImageClassification",
        "SwinConfig",
        {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [1, 2],
            "num_heads": [2, 2],
            "window_size": 4,
            **_CLASSES,
        },
    ),
    "convnext": (
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {"image_size": 32, "hidden_sizes": [8, 16, 16, 24], "depths": [1, 1, 2, 1], **_CLASSES},
    ),
    "segformer": (
        "SegformerForImageClassification",
        "SegformerConfig",
        {
            "image_size": 32,
            "depths": [1, 1, 1, 1],
            "hidden_sizes": [8, 16, 16, 24],
            "num_attention_heads": [1, 2, 2, 2],
            "decoder_hidden_size": 16,
            **_CLASSES,
        },
    ),
    "deit": ("DeiTForImageClassification", "DeiTConfig", {**BLOCKS, **_IMAGE, **_CLASSES}),
    "dinov2": ("Dinov2ForImageClassification", "Dinov2Config", {**BLOCKS, **_IMAGE, **_CLASSES}),
    "mobilenet-v2": (
        "MobileNetV2ForImageClassification",
        "MobileNetV2Config",
        {"image_size": 32, "depth_multiplier": 0.25, **_CLASSES},
    ),
}

ARCHITECTURES: dict[str, Callable[[], Workload]] = {
    **{name: partial(configured, *entry) for name, entry in _CONFIGURED.items()},
    "clip": _clip,
    "siglip": _siglip,
    "wav2vec2": _wav2vec2,
    "wav2vec2-ctc": _wav2vec2_ctc,
    "detr": _detr,
    "llava": _llava,
    "perceiver": _perceiver,
    "vilt": _vilt,
}
