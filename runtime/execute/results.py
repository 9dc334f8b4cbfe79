"""The results of a rank's run of a program: its share of the batch's results.

    result of the batch = Σ over micro-batches of weight · result of the micro-batch

Sums are made in float64, whatever the model computes in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from runtime.execute.context import Shared


@dataclass(frozen=True)
class StepSums:
    """This rank's share of a batch's results."""

    loss: Tensor | None
    """Σ weight · loss over the micro-batches; None on ranks that compute none."""
    metrics: Mapping[str, Tensor]
    """Metrics that this rank computes, by name; weighted like the loss."""
    weights: tuple[float, ...]
    """Weight of each micro-batch."""
    outputs: Sequence[Mapping[str, Tensor]]
    """The model's outputs that this rank computes in an evaluation, by name, for each micro-batch."""
    share: float = 1.0
    """Part of each result that this rank's is: ranks that run one segment on shards have parts of a sum."""

    @classmethod
    def of(cls, shared: Shared, share: float = 1.0) -> Self:
        """Return the results that a finished run has left."""
        names = dict.fromkeys(name for metrics in shared.metrics for name in metrics)
        metrics = {
            name: _weighted_sum([found[name] for found in shared.metrics], shared.weights) for name in names
        }
        losses = [loss for loss in shared.losses if loss is not None]
        loss = _weighted_sum(losses, shared.weights) if losses else None
        return cls(loss, metrics, shared.weights, shared.outputs, share)


def _weighted_sum(results: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return Σ weightᵢ · resultᵢ; results have the shape ()."""
    stacked = torch.stack(list(results)).double()
    return (stacked * stacked.new_tensor(weights)).sum()
