"""Layouts: on which devices a tensor lives, and how it is spread over them.

Every way of partitioning a model is a choice of layouts (docs/architecture.md). A layer-wise plan uses
``Layout.on(rank)`` only; shardings use a mesh of several ranks with one placement per mesh axis.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

__all__ = ["Layout", "Mesh", "Partial", "Placement", "Replicate", "Shard"]


@dataclass(frozen=True)
class Mesh:
    """Ranks arranged in named axes, row-major: ``Mesh((0, 1, 2, 3), (2, 2), ("data", "tensor"))``."""

    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    axes: tuple[str, ...]

    def __post_init__(self) -> None:
        if math.prod(self.shape) != len(self.ranks):
            raise ValueError(f"mesh shape {self.shape} does not hold {len(self.ranks)} ranks")
        if len(self.axes) != len(self.shape):
            raise ValueError(f"mesh has {len(self.shape)} axes but {len(self.axes)} axis names")
        if len(set(self.ranks)) != len(self.ranks):
            raise ValueError(f"mesh names a rank twice: {self.ranks}")


@dataclass(frozen=True)
class Layout:
    """A device mesh and, per mesh axis, ``Replicate()``, ``Shard(dim)`` or ``Partial()``."""

    mesh: Mesh
    placements: tuple[Placement, ...]

    def __post_init__(self) -> None:
        if len(self.placements) != len(self.mesh.shape):
            raise ValueError(f"{len(self.placements)} placements for {len(self.mesh.shape)} mesh axes")

    @classmethod
    def on(cls, *ranks: int) -> Layout:
        """Return the layout of a tensor that is whole on each of ``ranks``."""
        return cls(Mesh(ranks, (len(ranks),), ("replica",)), (Replicate(),))

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.mesh.ranks

    def __str__(self) -> str:
        ranks = ",".join(map(str, self.ranks))
        if len(self.ranks) == 1:
            return f"rank {ranks}"
        axes = " ".join(
            f"{a}={n}:{p}" for a, n, p in zip(self.mesh.axes, self.mesh.shape, self.placements, strict=True)
        )
        return f"ranks {ranks} [{axes}]"
