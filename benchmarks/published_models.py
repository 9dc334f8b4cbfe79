"""The models of the published runs, as their authors describe them: MPT, GPT-2, BERT-large, ResNet-50. Without weights.

Symbols
    b   samples of the example batch (2)      s   tokens of a sample      d   width
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from partitioner.models.workload import Workload

EXAMPLES = 2
"""Samples of an example batch: the fewest that leave the batch dimension open."""

MPT_SIZES = {
    "125m": (768, 12, 12),
    "350m": (1024, 16, 24),
    "760m": (1536, 12, 24),
    "1b": (2048, 16, 24),
    "3b": (2560, 20, 32),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 56, 48),
}
"""Width, heads and layers of each MPT model (llm-foundry, ``scripts/train/yamls``)."""
MPT_VOCABULARY = 50_368
GPT2_VOCABULARY = 50_257
GPT2_DROPOUT = 0.1


@dataclass(frozen=True)
class BlockParts:
    """The parts of a decoder block that unlike authors wrote unlike.

    ``fused_qkv``: one projection for query, key and value, and biases everywhere. ``own_ops``: layer norm and GELU written
    out in elementwise ops. ``attention``: "sdpa", or "chain" for products, mask and softmax one by one.
    """

    fused_qkv: bool = True
    own_ops: bool = False
    attention: str = "sdpa"
    dropout: float = 0.0


class _OwnLayerNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=-1, keepdim=True)
        variance = x.var(dim=-1, keepdim=True, unbiased=False)
        return self.scale * ((x - mean) / torch.sqrt(variance + 1e-5)) + self.shift


class _OwnGelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        inner = torch.sqrt(torch.tensor(2.0 / torch.pi)) * (x + 0.044715 * torch.pow(x, 3))
        return 0.5 * x * (1 + torch.tanh(inner))


class _Attention(nn.Module):
    """Causal self-attention: [b, s, d] -> [b, s, d]."""

    def __init__(self, width: int, heads: int, parts: BlockParts, tokens: int) -> None:
        super().__init__()
        self.heads, self.parts = heads, parts
        if parts.fused_qkv:
            self.qkv = nn.Linear(width, 3 * width)
        else:
            self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width)
        if parts.attention == "chain":
            self.drop = nn.Dropout(parts.dropout)
            self.register_buffer("mask", torch.triu(torch.ones(tokens, tokens), diagonal=1))

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        found = self.qkv(x).chunk(3, dim=-1) if self.parts.fused_qkv else (self.q(x), self.k(x), self.v(x))
        q, k, v = (part.view(b, s, self.heads, d // self.heads).transpose(1, 2) for part in found)
        if self.parts.attention == "sdpa":
            dropout = self.parts.dropout if self.training else 0.0
            mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        else:
            scores = (q @ k.transpose(2, 3)).masked_fill(self.mask.bool()[:s, :s], -torch.inf)
            mixed = self.drop(torch.softmax(scores / (d // self.heads) ** 0.5, dim=-1)) @ v
        return self.out(mixed.transpose(1, 2).contiguous().view(b, s, d))


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, parts: BlockParts, tokens: int) -> None:
        super().__init__()
        norm = _OwnLayerNorm if parts.own_ops else nn.LayerNorm
        self.norm1, self.norm2 = norm(width), norm(width)
        self.attention = _Attention(width, heads, parts, tokens)
        gelu = _OwnGelu() if parts.own_ops else nn.GELU()
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), gelu, nn.Linear(4 * width, width))
        self.drop = nn.Dropout(parts.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))


class Decoder(nn.Module):
    """A decoder-only transformer with learned positions: {tokens, labels: [b, s]} -> the mean cross-entropy."""

    def __init__(
        self, width: int, heads: int, layers: int, tokens: int, vocabulary: int, parts: BlockParts, tied: bool
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(tokens, width)
        self.drop = nn.Dropout(parts.dropout)
        self.blocks = nn.ModuleList(_Block(width, heads, parts, tokens) for _ in range(layers))
        self.norm = _OwnLayerNorm(width) if parts.own_ops else nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.tokens(tokens) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def mpt(size: str, tokens: int) -> Workload:
    """Make an MPT model of one of ``MPT_SIZES``, and a batch of ``tokens`` a sample.

    llm-foundry computes the loss by one fused kernel in 16 bits unless told otherwise (``loss_fn: fused_crossentropy``).
    """
    width, heads, layers = MPT_SIZES[size]
    with torch.device("meta"):
        model = Decoder(width, heads, layers, tokens, MPT_VOCABULARY, BlockParts(), tied=True)
    return _with_tokens(model, tokens, MPT_VOCABULARY)


def gpt2(own_ops: bool, attention: str) -> Workload:
    """Make GPT-2 of 124M parameters as in "Build a Large Language Model From Scratch".

    It has no biases in q, k and v, and its head is not tied.
    """
    parts = BlockParts(False, own_ops, attention, GPT2_DROPOUT)
    with torch.device("meta"):
        model = Decoder(768, 12, 12, 1024, GPT2_VOCABULARY, parts, tied=False)
    return _with_tokens(model, 1024, GPT2_VOCABULARY)


def bert_large() -> Workload:
    """Make BERT-large for the classification of sequences of 512 tokens."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    config._attn_implementation = "eager"  # the software of 2022 knew no other
    with torch.device("meta"):
        model = BertForSequenceClassification(config)
    tokens, labels = torch.zeros(EXAMPLES, 512, dtype=torch.long), torch.zeros(EXAMPLES, dtype=torch.long)
    return Workload(model, {"input_ids": tokens, "labels": labels})


class _Classified(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.model(images).logits.float(), labels)


def resnet50() -> Workload:
    """Make ResNet-50 v1.5 (the stride in the 3x3 convolutions), on images of 224 x 224."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(num_labels=1000, downsample_in_bottleneck=False)
    with torch.device("meta"):
        model = _Classified(ResNetForImageClassification(config))
    batch = {
        "images": torch.zeros(EXAMPLES, 3, 224, 224),
        "labels": torch.zeros(EXAMPLES, dtype=torch.long),
    }
    return Workload(model, batch)


def _with_tokens(model: nn.Module, tokens: int, vocabulary: int) -> Workload:
    ids = torch.arange(EXAMPLES * tokens).reshape(EXAMPLES, tokens) % vocabulary
    return Workload(model, {"tokens": ids, "labels": ids.clone()})
