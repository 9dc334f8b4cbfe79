"""Which rank holds which tensor of the model, and this rank's own ones."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from cost_models.precision import Precision
from passes.graph import OpGraph
from passes.segment import Segmentation
from passes.summarize import state_names_of_segments
from runtime.precision import leaf_and_owner
from runtime.rank_state import RankState


def holders_of(graph: OpGraph, segmentation: Segmentation) -> dict[str, tuple[int, ...]]:
    """The ranks that hold each parameter and buffer of the model. What no segment reads stays with the first rank."""
    ranks_of: dict[str, set[int]] = {name: set() for name in (*graph.parameters, *graph.buffers)}
    for segment, names in enumerate(state_names_of_segments(graph, segmentation)):
        for name in names:
            ranks_of[name].update(segmentation.ranks[segment])
    first = min(rank for ranks in segmentation.ranks for rank in ranks)
    return {name: tuple(sorted(ranks)) or (first,) for name, ranks in ranks_of.items()}


def rank_state(
    graph: OpGraph,
    rank: int,
    holders: Mapping[str, tuple[int, ...]],
    values: Mapping[str, Tensor],
    device: torch.device,
    precision: Precision,
) -> RankState:
    """This rank's tensors. ``values``: copies of its own for every name that it holds."""
    pairs = {
        name: leaf_and_owner(values[name], graph.types_of(name, precision), spec.requires_grad)
        for name, spec in graph.parameters.items()
        if name in values
    }
    leaves = {name: leaf for name, (leaf, _) in pairs.items()}
    parameters = {name: owner for name, (_, owner) in pairs.items()}
    buffers = {name: values[name] for name in graph.buffers if name in values}
    constants = {name: constant.to(device) for name, constant in graph.constants.items()}
    return RankState(rank, {**constants, **leaves, **buffers}, parameters, buffers, holders)
