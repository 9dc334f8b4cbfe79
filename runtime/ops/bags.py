"""Embedding bags as one op with one result: per bag the sum, the mean or the largest numbers of rows of a table.

    embedding_bag(weight, indices (bags, n))               fixed bags: a row of indices each
    embedding_bag(weight, indices (n), offsets (bags))     bag i begins at ``offsets[i]``

ATen has the second form alone, in which a bag of a sample is no longer seen to be one, and returns three further tensors
that nobody reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from runtime.ops.peers import Peers

SUM, MEAN, MAX = range(3)
"""ATen's numbers of the ways to combine a bag's rows: sum, mean, max."""

# torch.library leaves its class untyped.
_LIBRARY = torch.library.Library("partitioner", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "embedding_bag(Tensor weight, Tensor indices, Tensor? offsets=None, bool scale_grad_by_freq=False, int mode=0, "
    "bool sparse=False, Tensor? per_sample_weights=None, bool include_last_offset=False, int? padding_idx=None) -> Tensor"
)


def _whole(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor | None = None,
    scale_grad_by_freq: bool = False,
    mode: int = SUM,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    *rest: Any,
) -> Tensor:
    if offsets is None:
        size = indices.shape[1]
        offsets = torch.arange(0, indices.numel(), size, dtype=indices.dtype, device=indices.device)
        indices = indices.reshape(-1)
        per_sample_weights = None if per_sample_weights is None else per_sample_weights.reshape(-1)
    made = torch.embedding_bag(
        weight, indices, offsets, scale_grad_by_freq, mode, sparse, per_sample_weights, *rest
    )
    return made[0]


_LIBRARY.impl("embedding_bag", _whole, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]
EMBEDDING_BAG = torch.ops.partitioner.embedding_bag.default


def of_own_rows(
    op: Any,
    axes: Mapping[str, Peers],
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor | None = None,
    scale_grad_by_freq: bool = False,
    mode: int = SUM,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Sum the rows that this rank has (rows / ranks, width), those of other ranks times zero: (bags, width).

    A mean divides by all of a bag's indices but padding, whoever has their rows.
    """
    own = indices - axes["vocabulary"].rank * weight.shape[0]
    counted = torch.ones_like(indices, dtype=torch.bool) if padding_idx is None else indices != padding_idx
    here = (own >= 0) & (own < weight.shape[0]) & counted
    shares = here.to(weight.dtype)
    if per_sample_weights is not None:
        shares = shares * per_sample_weights
    rest = (False, SUM, False, shares, include_last_offset)
    made: Tensor = op(weight, own.masked_fill(~here, 0), offsets, *rest)
    if mode == SUM:
        return made
    if offsets is None:
        counts = counted.sum(1)
    else:
        places = torch.arange(indices.shape[0], dtype=offsets.dtype, device=offsets.device)
        bags = torch.searchsorted(offsets, places, right=True) - 1
        counts = bags.new_zeros(offsets.shape).index_add(0, bags, counted.to(bags.dtype))[: made.shape[0]]
    return made / counts.clamp(min=1).unsqueeze(1)
