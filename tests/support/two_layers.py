"""A real plan of the smallest model that has something to split: two layers, on two workers of this machine."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cost_models.cluster import ClusterSpec
from partitioner import Plan, partition


def two_layers(widths: tuple[int, int, int], **options: Any) -> Plan:
    """Plan [samples, in] -> [samples, hidden] -> [samples, out], with an activation between. ``options``: of partition."""
    model = nn.Sequential(nn.Linear(widths[0], widths[1]), nn.ReLU(), nn.Linear(widths[1], widths[2]))
    return partition(
        model,
        ClusterSpec.local(2),
        example_inputs=torch.randn(6, widths[0]),
        loss_fn=lambda output, _: output.square().mean(),
        **{"strategy": "layer", **options},
    )
