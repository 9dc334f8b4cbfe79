"""Segments: the pieces of the DAG that a device group runs as one call.

    placed ops  ->  segments, numbered in topological order

``layer`` and ``hybrid`` plans have one segment per stage. A free placement has no stages; there, ops share a segment iff
they have the same device group, the same received values they transitively need, and the same sent values that depend on
them. This is acyclic: were there a cycle through segments A and B, some value sent by A would be received by B and the
other way round, so it would be both an ancestor and a descendant of the same op.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import networkx as nx
from torch import fx

from cost_models.errors import InternalError
from cost_models.layout import Mesh
from passes.graph.blocks import regions_of_stages
from passes.graph.graph import OpGraph

SegmentKey = TypeVar("SegmentKey")


@dataclass(frozen=True)
class Segmentation:
    """The segment of each placed op, and the ranks that run each segment.

    Ops in ``recomputed`` belong to none: every segment that needs one runs its own copy.
    """

    segment_of: Mapping[str, int]
    ranks: tuple[tuple[int, ...], ...]
    recomputed: frozenset[str]
    regions: tuple[tuple[tuple[str, ...], ...], ...] = ()
    """Per segment: the ops of each block whose activations are computed again in backward. Empty: none anywhere."""
    meshes: tuple[Mesh | None, ...] = ()
    """Per segment: how its ranks are arranged, where several run it on their shards. Empty: nowhere."""

    def regions_of(self, segment: int) -> tuple[tuple[str, ...], ...]:
        """The ops of each block that the segment computes again in backward."""
        return self.regions[segment] if self.regions else ()

    def mesh_of(self, segment: int) -> Mesh | None:
        """The mesh of the ranks of a segment that several run on their shards."""
        return self.meshes[segment] if self.meshes else None

    def __len__(self) -> int:
        return len(self.ranks)


def on_mesh(graph: OpGraph, mesh: Mesh) -> Segmentation:
    """One segment on all ranks of a mesh: what ``passes.shard.shard`` made is run so."""
    return Segmentation({node.name: 0 for node in graph.ops}, (mesh.ranks,), frozenset(), meshes=(mesh,))


def by_stage(
    graph: OpGraph,
    stage_of: Mapping[str, int],
    groups: Sequence[tuple[int, ...]],
    recomputed: frozenset[str],
    recomputed_blocks: Sequence[Collection[str]] = (),
    meshes: Sequence[Mesh | None] = (),
) -> Segmentation:
    """Make one segment per stage. Every edge must lead to the same or a later stage.

    ``groups``: per stage, the ranks that run it; ``meshes``: how they are arranged where several share it.
    ``recomputed_blocks``: per stage, the blocks that it computes again in backward.
    """
    backwards = [
        f"{node.name} (stage {stage_of[node.name]}) -> {user.name} (stage {stage_of[user.name]})"
        for node in graph.ops
        if node.name in stage_of
        for user in node.users
        if user.name in stage_of and stage_of[user.name] < stage_of[node.name]
    ]
    if backwards:
        raise InternalError("segment: a stage reads from a later stage", because=backwards[:10])
    regions = regions_of_stages(graph, stage_of, recomputed_blocks)
    arranged = tuple(meshes) if any(mesh is not None for mesh in meshes) else ()
    return Segmentation(dict(stage_of), tuple(groups), recomputed, regions, arranged)


def by_reach(
    graph: OpGraph,
    group_of: Mapping[str, tuple[int, ...]],
    recomputed: frozenset[str],
    unit_of: Mapping[str, int] | None = None,
) -> Segmentation:
    """Segments of a free placement: equal device group, equal received ancestors, equal sent descendants.

    ``unit_of``: ops of one unit are never parted (``passes.graph.state.owning_units``); None: every op is one by itself.
    """
    crossing = [
        node.name
        for node in graph.ops
        if node.name in group_of
        and any(group_of.get(user.name, group_of[node.name]) != group_of[node.name] for user in node.users)
    ]
    bit = {name: 1 << position for position, name in enumerate(crossing)}
    received: dict[tuple[int, ...], int] = defaultdict(int)
    sent: dict[tuple[int, ...], int] = defaultdict(int)
    for name in crossing:
        sent[group_of[name]] |= bit[name]
        for user in graph.nodes[name].users:
            if user.name in group_of and group_of[user.name] != group_of[name]:
                received[group_of[user.name]] |= bit[name]
    units = _units(graph, group_of, unit_of)
    ancestors: dict[str, int] = {}
    for members in units:
        mask = 0
        for source in (source for node in members for source in node.all_input_nodes):
            mask |= ancestors.get(source.name, 0) | bit.get(source.name, 0)
        ancestors |= dict.fromkeys((node.name for node in members), mask)
    descendants: dict[str, int] = {}
    for members in reversed(units):
        mask = 0
        for node in members:
            mask |= bit.get(node.name, 0)
            for user in node.users:
                mask |= descendants.get(user.name, 0)
        descendants |= dict.fromkeys((node.name for node in members), mask)
    key_of: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for node in (node for members in units for node in members):
        group = group_of[node.name]
        key = (group, ancestors[node.name] & received[group], descendants[node.name] & sent[group])
        tuple_op = node.all_input_nodes[0].name if node.target is operator.getitem else None
        if tuple_op is not None and group_of.get(tuple_op) == group:
            key = key_of[tuple_op]  # a tuple is taken apart where it was made: only tensors travel
        key_of[node.name] = key
    return _numbered(graph, key_of, {key: key[0] for key in key_of.values()}, recomputed)


def _units(
    graph: OpGraph, group_of: Mapping[str, tuple[int, ...]], unit_of: Mapping[str, int] | None
) -> list[list[fx.Node]]:
    """Placed ops by unit, in a topological order. Raises InternalError where a unit is on several devices."""
    placed = [node for node in graph.ops if node.name in group_of]
    if unit_of is None:
        return [[node] for node in placed]
    units: dict[int, list[fx.Node]] = defaultdict(list)
    for node in placed:
        units[unit_of[node.name]].append(node)
    apart = [nodes for nodes in units.values() if len({group_of[node.name] for node in nodes}) > 1]
    if apart:
        names = [", ".join(node.name for node in nodes[:5]) for nodes in apart[:5]]
        raise InternalError("segment: ops that share a written buffer are on several devices", names)
    return [units[number] for number in sorted(units)]


def segment_edges(graph: OpGraph, segment_of: Mapping[str, SegmentKey]) -> set[tuple[SegmentKey, SegmentKey]]:
    """(producer, consumer) pairs of different segments, whatever they are named by."""
    return {
        (segment_of[node.name], segment_of[user.name])
        for node in graph.ops
        if node.name in segment_of
        for user in node.users
        if user.name in segment_of and segment_of[user.name] != segment_of[node.name]
    }


def _numbered(
    graph: OpGraph,
    key_of: Mapping[str, object],
    ranks: Mapping[object, tuple[int, ...]],
    recomputed: frozenset[str],
) -> Segmentation:
    """Number segments in a topological order, ties by first op in graph order."""
    first: dict[object, int] = {}
    for position, node in enumerate(graph.ops):
        if node.name in key_of:
            first.setdefault(key_of[node.name], position)
    dag: nx.DiGraph[object] = nx.DiGraph()
    dag.add_nodes_from(first)
    dag.add_edges_from(segment_edges(graph, key_of))
    order = list(nx.lexicographical_topological_sort(dag, key=lambda key: first[key]))
    index = {key: position for position, key in enumerate(order)}
    return Segmentation(
        {name: index[key] for name, key in key_of.items()}, tuple(ranks[key] for key in order), recomputed
    )
