"""Batch norms of a plain loop over micro-batches, counting as plans do: once a batch."""

from __future__ import annotations

from torch import nn


def count_batches(model: nn.Module, batches: int) -> None:
    """Set the counters of norms that saw so many batches in pieces: the loop raised them with each piece."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.num_batches_tracked is not None:
            module.num_batches_tracked.fill_(batches)
