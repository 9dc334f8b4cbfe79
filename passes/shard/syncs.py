"""Sums of parameters' gradients after the last backward: over which axes, and where the sums go.

stored R, gradient a part of a sum on "data"             all-reduce over "data"
the same, with gradient and optimizer state S(0) there   reduce-scatter over "data": each rank keeps its part (ZeRO-1, 2)
stored S(0) on "data" (ZeRO-3)                           nothing: bridges in the graph have done it
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from torch import fx

from cost_models.errors import InternalError
from cost_models.layout import Mesh, Partial, Replicate, Shard
from passes.graph.graph import OpGraph
from passes.shard.words import FeaturePlacement, Need, Placements, operands


@dataclass(frozen=True)
class GradientSync:
    """One kind of sum after the last backward. ``axes``: axes of the mesh, taken together."""

    parameters: tuple[str, ...]
    axes: tuple[str, ...]
    scattered: bool = False
    """True if each rank keeps its part only, as ``FeaturePlacement.sharded_state`` says."""


def deferred_axes(
    graph: OpGraph,
    stored: Callable[[str], Placements],
    needs_of: Callable[[fx.Node, int], tuple[Need, ...]],
    shared: Mapping[str, frozenset[int]],
    returned: Mapping[str, Placements],
) -> dict[str, frozenset[int]]:
    """Find the axes along which each rank makes a part of the gradient of a parameter, or of another stage's value, by the
    placeholder.

    ``shared``: the axes of parameters whose gradients are summed beyond the mesh: each rank makes a part along all.
    ``returned``: the placements of values' gradients, where parts of them leave the mesh.
    """
    found: dict[str, frozenset[int]] = {}
    for given in graph.inputs:
        if given.kind == "value" and given.name in returned and given.node in graph.needs_grad:
            parts = enumerate(returned[given.name])
            found[given.node] = frozenset(axis for axis, p in parts if isinstance(p, Partial))
        if given.kind != "parameter" or given.node not in graph.needs_grad:
            continue
        node = graph.nodes[given.node]
        axes = set(shared.get(given.name, ()))
        for user in node.users:
            if user.op == "output":
                continue
            for position, source in enumerate(operands(user)):
                if source is not node:
                    continue
                for axis, need in enumerate(needs_of(user, position)):
                    whole = isinstance(stored(given.name)[axis], Replicate)
                    if whole and need.partial_gradient and isinstance(need.placement, Replicate):
                        axes.add(axis)
        if axes:
            found[given.node] = frozenset(axes)
    return found


def gradient_syncs(
    graph: OpGraph,
    deferred: Mapping[str, frozenset[int]],
    stored: Callable[[str], Placements],
    placement: FeaturePlacement,
    mesh: Mesh,
) -> tuple[GradientSync, ...]:
    """List sums in the order in which they are made: those that scatter first, so that what follows is smaller."""
    groups: dict[tuple[bool, tuple[int, ...]], list[str]] = defaultdict(list)
    for given in graph.inputs:
        if given.kind != "parameter":
            continue
        axes = {axis for axis in deferred.get(given.node, ()) if mesh.shape[axis] > 1}
        state = placement.sharded_state.get(given.name, stored(given.name))
        for axis in sorted(axes):
            if isinstance(state[axis], Shard) and isinstance(stored(given.name)[axis], Replicate):
                groups[True, (axis,)].append(given.name)
                axes.discard(axis)
        if axes:
            groups[False, tuple(sorted(axes))].append(given.name)
    return tuple(
        GradientSync(tuple(names), tuple(mesh.axes[axis] for axis in axes), scattered)
        for (scattered, axes), names in sorted(groups.items(), key=lambda item: (not item[0][0], item[0][1]))
    )


def refuse_blocks(shared: Collection[str], placement: FeaturePlacement) -> None:
    """Raise InternalError where ``placement`` cuts what other parts of the model read too: their blocks would be unlike."""
    placed = (placement.stored, placement.sharded_state)
    cut = {n for n in shared for layouts in placed if any(isinstance(p, Shard) for p in layouts.get(n, ()))}
    if cut:
        raise InternalError("store blocks of what several stages read", sorted(cut)[:5])
