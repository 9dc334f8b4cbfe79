"""A transformer whose feed-forward layers are mixtures of experts (Shazeer et al. 2017), every expert a module.

    partitioner plan examples/moe.py:moe --cluster local:4 --strategy free --batch-size 16

Shapes stay static: every expert sees every token, and the gate's weights of the experts that a token was not sent to are
zero. So each expert is a branch of its own, from the block's norm to a product with its column of the gate.

Shapes: input_ids and labels (batch, tokens).
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partitioner.models.workload import Workload


class Expert(nn.Module):
    """Linear, GELU, linear."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]


class Mixture(nn.Module):
    """y = Σ over experts of gate_e(x) · expert_e(x); the gate is zero but for the ``top`` largest, which sum to 1."""

    def __init__(self, width: int, hidden: int, experts: int, top: int) -> None:
        super().__init__()
        self.top = top
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Expert(width, hidden) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width), and the same again."""
        weights = torch.softmax(self.gate(x), dim=-1)
        least = weights.topk(self.top, dim=-1).values[..., -1:]
        weights = weights * (weights >= least)
        weights = weights / weights.sum(-1, keepdim=True)
        columns = weights.chunk(len(self.experts), dim=-1)
        parts: list[Tensor] = [
            expert(x) * column for expert, column in zip(self.experts, columns, strict=True)
        ]
        return functools.reduce(torch.add, parts)


class Block(nn.Module):
    """Causal attention, then the mixture; each behind a norm and beside a residual."""

    def __init__(self, width: int, heads: int, hidden: int, experts: int, top: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)
        self.mixture_norm = nn.LayerNorm(width)
        self.mixture = Mixture(width, hidden, experts, top)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        q, k, v = (
            project(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mixture(self.mixture_norm(x))  # type: ignore[no-any-return]


class MixtureTransformer(nn.Module):
    """Embedding, ``blocks`` blocks, a projection to the vocabulary; returns the mean loss."""

    def __init__(
        self, vocabulary: int, width: int, heads: int, hidden: int, blocks: int, experts: int, top: int
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, hidden, experts, top) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.project(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def moe(
    vocabulary: int = 8000,
    width: int = 256,
    heads: int = 4,
    hidden: int = 1024,
    blocks: int = 2,
    experts: int = 4,
    top: int = 2,
    seq: int = 64,
    batch: int = 2,
    seed: int = 0,
) -> Workload:
    """``top`` of the ``experts`` of each block work on a token."""
    torch.manual_seed(seed)
    model = MixtureTransformer(vocabulary, width, heads, hidden, blocks, experts, top)
    tokens = torch.randint(vocabulary, (batch, seq + 1))
    return Workload(model, {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}, name="moe")
