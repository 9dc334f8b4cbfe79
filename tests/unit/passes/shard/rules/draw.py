"""Random sizes, tensors and options for drawn examples of ops."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from torch import Tensor

Case = tuple[Any, ...]
"""An op and its arguments; options by name in a dict at the end."""


class Draw:
    """Random sizes, tensors and options."""

    def __init__(self, random: Random) -> None:
        self.random = random
        torch.manual_seed(random.randrange(1 << 30))

    def size(self, ones: bool = True) -> int:
        return self.random.choice((4, 6, 4, 12, 1) if ones else (4, 6, 4, 12))

    def sizes(self, least: int, most: int, ones: bool = True) -> list[int]:
        return [self.size(ones) for _ in range(self.random.randint(least, most))]

    def maybe(self) -> bool:
        return self.random.random() < 0.5

    def one_of(self, *options: Any) -> Any:
        return self.random.choice(options)

    def tensor(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64)

    def ints(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape)

    def dim(self, rank: int) -> int:
        return self.random.randrange(-rank, rank)

    def broadcast(self, shape: list[int]) -> list[int]:
        """A shape that broadcasts to ``shape``."""
        kept = shape[self.random.randint(0, len(shape)) :] if self.maybe() else shape
        return [1 if self.random.random() < 0.2 else size for size in kept]
