"""The ranks that hold each tensor of the model, and this rank's own tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from cost_models.precision import Precision
from passes.graph.graph import OpGraph
from passes.lower.segment import Segmentation
from passes.lower.summarize import state_names_of_segments
from runtime.mesh.sharding import Sharding
from runtime.state.precision import leaf_and_owner
from runtime.state.rank_state import RankState
from runtime.state.sharded_owners import sharded_leaf_and_owner


def holders_of(
    graph: OpGraph, segmentation: Segmentation, shardings: Mapping[str, Sharding]
) -> dict[str, tuple[int, ...]]:
    """Return the ranks that hold each parameter and buffer of the model, or blocks of it.

    A tensor that no segment reads stays with the first group; one with a sharding is on every rank of its mesh.
    """
    ranks_of: dict[str, set[int]] = {name: set() for name in (*graph.parameters, *graph.buffers)}
    for segment, names in enumerate(state_names_of_segments(graph, segmentation)):
        for name in names:
            ranks_of[name].update(segmentation.ranks[segment])
    for name, sharding in shardings.items():
        ranks_of[name].update(sharding.mesh.ranks)
    first = tuple(sorted(min(segmentation.ranks, key=min)))
    return {name: tuple(sorted(ranks)) or first for name, ranks in ranks_of.items()}


def rank_state(
    graph: OpGraph,
    rank: int,
    holders: Mapping[str, tuple[int, ...]],
    values: Iterable[tuple[str, Tensor]],
    device: torch.device,
    precision: Precision,
    shardings: Mapping[str, Sharding],
) -> RankState:
    """Make this rank's tensors. ``values``: copies of its own for every name that it holds; of blocks where it shards.

    They are taken one by one, because all values together, whole and in their stored types, may need more memory.
    """
    leaves: dict[str, Tensor] = {name: constant.to(device) for name, constant in graph.constants.items()}
    parameters: dict[str, nn.Parameter] = {}
    buffers: dict[str, Tensor] = {}
    for name, value in values:
        spec, sharding = graph.parameters.get(name), shardings.get(name)
        if spec is None:
            buffers[name] = value
            continue
        types = graph.types_of(name, precision)
        if sharding is None:
            leaves[name], parameters[name] = leaf_and_owner(value, types, spec.requires_grad)
        else:
            leaves[name], parameters[name] = sharded_leaf_and_owner(
                value, types, spec.requires_grad, sharding, rank
            )
        del value  # the next one is made first
    held = {**parameters, **buffers}
    own = {name: sharding for name, sharding in shardings.items() if name in held}
    elsewhere = {name: sharding for name, sharding in shardings.items() if name not in held}
    return RankState(rank, {**leaves, **buffers}, parameters, buffers, holders, own, graph.parts, elsewhere)
