"""A recommender of two towers: those of the users and of the items meet in one product, as retrieval models are trained.

user [b, 2] ─ embedded ─ blocks ─ ┐
                                  ├─ score [b] ─ loss with clicked [b]
item [b, 3] ─ embedded ─ blocks ─ ┘
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from partitioner import Workload


class Block(nn.Module):
    """[b, width] -> [b, width], residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Tower(nn.Module):
    """ids [b, features] -> [b, width]."""

    def __init__(self, names: int, features: int, width: int, blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(names, width)
        self.project = nn.Linear(features * width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.project(self.embedding(ids).flatten(1))
        for block in self.blocks:
            x = block(x)
        return x  # type: ignore[no-any-return]


class Ranking(nn.Module):
    """The score of a pair; the towers are of unlike depth."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.users, self.items = Tower(40, 2, width, 2), Tower(60, 3, width, 3)

    def forward(self, user: Tensor, item: Tensor, clicked: Tensor) -> Tensor:
        return (self.users(user) * self.items(item)).sum(-1)


def loss_fn(score: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy of the clicks."""
    return F.binary_cross_entropy_with_logits(score, batch["clicked"])


def ranking() -> Workload:
    """Make the model with real weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        example = {
            "user": torch.randint(40, (4, 2)),
            "item": torch.randint(60, (4, 3)),
            "clicked": torch.rand(4).round(),
        }
        return Workload(Ranking(), example, loss_fn, name="ranking")
