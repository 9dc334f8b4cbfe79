"""The things that both worlds of a verified training run share: samples, the optimizer's groups, the scheduler."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from partitioner.batches.batch_check import digest
from partitioner.engine.optimizers import made

SMALLER_RATE = 0.5
"""The factor of the learning rate of vectors: two groups, so that a tensor in the wrong one is seen."""
SCHEDULER_STEPS = 7


@dataclass(frozen=True)
class SampleSet:
    """A data set: sample i is the i-th slice of every leaf along its batch dimension."""

    leaves: Mapping[str, Tensor]
    batch_dims: Mapping[str, int | None]

    def __len__(self) -> int:
        return next(
            leaf.shape[dim] for name, leaf in self.leaves.items() if (dim := self._dim(name)) is not None
        )

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        dims = {name: self._dim(name) for name in self.leaves}
        return {n: self.leaves[n].select(dim, index) for n, dim in dims.items() if dim is not None}

    def collated(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return the leaves of a batch of ``samples``."""
        return {
            name: leaf if (dim := self._dim(name)) is None else torch.stack([s[name] for s in samples], dim)
            for name, leaf in self.leaves.items()
        }

    def _dim(self, name: str) -> int | None:
        return self.batch_dims.get(name)


def sample_digests(leaves: Mapping[str, Tensor], batch_dims: Mapping[str, int | None]) -> tuple[int, ...]:
    """Return one number per sample of a batch, made of all its values."""
    dims = [(leaf, dim) for name, leaf in leaves.items() if (dim := batch_dims.get(name)) is not None]
    return tuple(
        int.from_bytes(
            hashlib.blake2b(
                str([digest(leaf.select(dim, i)) for leaf, dim in dims]).encode(), digest_size=7
            ).digest(),
            "little",
        )
        for i in range(dims[0][0].shape[dims[0][1]])
    )


def two_groups(
    kind: str, learning_rate: float, named: list[tuple[str, nn.Parameter]]
) -> torch.optim.Optimizer:
    """Make the optimizer called ``kind`` with two groups: matrices, and vectors at a smaller rate."""
    wide = [parameter for _, parameter in named if parameter.dim() > 1]
    flat = [parameter for _, parameter in named if parameter.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": wide}, {"params": flat, "lr": SMALLER_RATE * learning_rate}]
    return made(kind, groups, learning_rate)


def annealing(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Make the scheduler of both worlds."""
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, SCHEDULER_STEPS)
