"""The decoders of the published parallel runs, as their frameworks wrote them: Llama-like, GPT-like. Without weights.

Fused kernels of a framework are written as ops that read, write and save as much.

Symbols
    b   samples of the example batch (2)      s   tokens of a sample      d   width
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.published_models import EXAMPLES
from partitioner.models.workload import Workload


@dataclass(frozen=True)
class Decoder:
    """A decoder-only transformer. ``tokens``: of a sample.

    ``family``: "llama" has RMS norms, rotary positions and a gated MLP; "gpt" layer norms, learned positions, biases, GELU.
    ``attention``: "flash", or "softmax" for two products around one kernel that scales, masks and normalizes.
    ``logits``: the type that the loss is computed in. ``dropout``: of attention's scores, and before each residual sum.
    """

    family: Literal["llama", "gpt"]
    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    tokens: int
    tied: bool
    attention: Literal["flash", "softmax"] = "flash"
    logits: torch.dtype = torch.float32
    dtype: torch.dtype = torch.bfloat16
    dropout: float = 0.0

    @property
    def head_width(self) -> int:
        return self.width // self.heads


class _Rotary(nn.Module):
    """Stands for one kernel over query and key: reads and writes each once, keeps a table alone."""

    def __init__(self, shape: Decoder) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(shape.tokens, shape.head_width, dtype=shape.dtype))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table


class _SelfAttention(nn.Module):
    """Causal self-attention: [b, s, d] -> [b, s, d]."""

    def __init__(self, shape: Decoder) -> None:
        super().__init__()
        self.shape = shape
        biased, kv_width = shape.family == "gpt", shape.kv_heads * shape.head_width
        self.q = nn.Linear(shape.width, shape.width, bias=biased)
        self.k, self.v = (nn.Linear(shape.width, kv_width, bias=biased) for _ in range(2))
        self.out = nn.Linear(shape.width, shape.width, bias=biased)
        self.rotary = _Rotary(shape) if shape.family == "llama" else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (
            made.view(b, s, -1, self.shape.head_width).transpose(1, 2)
            for made in (self.q(x), self.k(x), self.v(x))
        )
        q, k = self.rotary(q), self.rotary(k)
        if self.shape.attention == "flash":
            grouped = self.shape.kv_heads != self.shape.heads
            mixed = functional.scaled_dot_product_attention(
                q, k, v, dropout_p=self.shape.dropout, is_causal=True, enable_gqa=grouped
            )
        else:
            shares = torch.softmax(q @ k.transpose(2, 3), dim=-1)
            mixed = _dropped(shares, self.shape) @ v
        return self.out(mixed.transpose(1, 2).reshape(b, s, self.shape.width))


class _Gated(nn.Module):
    def __init__(self, shape: Decoder) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(shape.width, shape.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.ffn, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


def _dropped(x: Tensor, shape: Decoder) -> Tensor:
    return functional.dropout(x, shape.dropout) if shape.dropout else x


def _norm(shape: Decoder) -> nn.Module:
    return nn.RMSNorm(shape.width) if shape.family == "llama" else nn.LayerNorm(shape.width)


class _Layer(nn.Module):
    def __init__(self, shape: Decoder) -> None:
        super().__init__()
        self.shape = shape
        self.norm1, self.norm2 = _norm(shape), _norm(shape)
        self.attention = _SelfAttention(shape)
        wide = nn.Linear(shape.width, shape.ffn)
        gelu = nn.Sequential(wide, nn.GELU(), nn.Linear(shape.ffn, shape.width))
        self.mlp = _Gated(shape) if shape.family == "llama" else gelu

    def forward(self, x: Tensor) -> Tensor:
        x = x + _dropped(self.attention(self.norm1(x)), self.shape)
        return x + _dropped(self.mlp(self.norm2(x)), self.shape)


class ParallelDecoder(nn.Module):
    """A decoder in one of the ways above: {tokens, labels: [b, s]} -> the mean cross-entropy."""

    def __init__(self, shape: Decoder) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.tokens, shape.width) if shape.family == "gpt" else None
        self.blocks = nn.ModuleList(_Layer(shape) for _ in range(shape.layers))
        self.norm = _norm(shape)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).to(self.shape.logits)
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def decoder(shape: Decoder) -> Workload:
    """Make a model of this shape, and a batch for it."""
    with torch.device("meta"):
        model = ParallelDecoder(shape).to(shape.dtype)
    ids = torch.arange(EXAMPLES * shape.tokens).reshape(EXAMPLES, shape.tokens) % shape.vocabulary
    return Workload(model, {"tokens": ids, "labels": ids.clone()})
