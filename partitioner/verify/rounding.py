"""Which differences are rounding of the unpartitioned model itself, and nothing of the partition.

A bias before a batch norm has no gradient: what backward leaves there is rounding, other rounding for every order of
adding, and Adam divides it by as little as 1e-8. So where such a tensor differs, the unpartitioned step is made once
more with the samples of each micro-batch in reverse order, which changes nothing but that order. What differs as little
between these two steps is the model's own doing; the report names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from partitioner.verify.compare import Comparison, StepResult, compare
from partitioner.verify.grow_batch import rebuilt
from passes.graph.graph import OpGraph
from runtime.segment.microbatch import cut

ROUNDING = 1e-12
"""A gradient below this part of all gradients together is rounding: float64 has 16 digits."""
ORDERS = 16.0
"""Another order may round so many times as much as the one that was tried."""

Step = Callable[[Any, Mapping[str, Tensor]], StepResult]
"""(batch, its leaves) -> the unpartitioned step."""


def rounding_only(
    differences: Sequence[Comparison],
    expected: StepResult,
    in_other_order: Callable[[], StepResult],
    learning_rate: float,
) -> list[Comparison]:
    """Those of ``differences`` that are about as large as between the unpartitioned step and ``in_other_order``."""
    norms = {name: float(gradient.to_dense().norm()) for name, gradient in expected.gradients.items()}
    most = ROUNDING * math.sqrt(sum(norm**2 for norm in norms.values()))
    suspected = [
        c for c in differences if c.kind in ("gradient", "parameter") and norms.get(c.name, math.inf) < most
    ]
    if not suspected:
        return []
    own = compare(expected, in_other_order(), learning_rate)
    error_of = {(c.kind, c.name): c.error for c in own}
    return [c for c in suspected if c.error <= ORDERS * error_of[c.kind, c.name]]


def in_reverse(
    batch: Any, leaves: Mapping[str, Tensor], graph: OpGraph, microbatches: int, model: nn.Module
) -> tuple[Any, dict[str, Tensor]]:
    """``batch`` and its leaves with the samples of each micro-batch in reverse order."""
    turned = {}
    for name, leaf in leaves.items():
        dim = graph.batch.batch_dims.get(name)
        turned[name] = leaf
        if dim is not None:
            turned[name] = torch.cat([piece.flip(dim) for piece in cut(leaf, dim, microbatches)], dim)
    return rebuilt(batch, turned, model), turned
