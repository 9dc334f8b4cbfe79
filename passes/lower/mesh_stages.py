"""Stages on meshes, each sharded, costed and profiled once: equal ones take its numbers under their own names.

    16 stages x 8 chunks of 126 equal layers     ─►   3 graphs on shards: the first, the last, any other

A search keeps them for all that it simulates.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable
from dataclasses import dataclass, field

from cost_models.cluster import ClusterSpec
from cost_models.conversion import AxisLinks, group_links
from cost_models.layout import Mesh
from passes.graph.graph import OpGraph
from passes.graph.part import part_of
from passes.lower.alike import StageNames, stage_key
from passes.lower.candidate import Candidate
from passes.lower.job import Job
from passes.lower.on_mesh import OnMesh, cost_on_mesh
from passes.lower.placed_graph import meshes_of
from passes.lower.segment import Segmentation
from passes.lower.summarize import shared_state
from passes.shard.shard import ShardedGraph, shard_graph
from passes.shard.words import FeaturePlacement
from runtime.mesh.ranks_along import all_ranks_along
from runtime.schedules import SCHEDULES


@dataclass(frozen=True)
class _Stage:
    """A stage, and all that its numbers follow from."""

    index: int
    ops: list[str]
    placement: FeaturePlacement
    key: Hashable
    names: StageNames


@dataclass(eq=False)
class MeshStages:
    """The stages on meshes that were costed so far, for one graph, cluster and job."""

    graph: OpGraph
    cluster: ClusterSpec
    job: Job
    _known: dict[Hashable, tuple[OnMesh, StageNames]] = field(default_factory=dict)

    def of(self, candidate: Candidate, segmentation: Segmentation) -> dict[int, OnMesh]:
        """Return the segments of a candidate on meshes, by number; all of them count samples in one unit."""
        if not candidate.shardings:
            return {}
        shared = shared_state(self.graph, segmentation)
        size = self.job.batch_size // candidate.microbatches
        deferring = SCHEDULES[candidate.schedule].splits_backward
        stages = []
        for index, ops, placement in meshes_of(self.graph, segmentation, candidate.shardings):
            regions = segmentation.regions_of(index)
            alike, names = stage_key(self.graph, ops, segmentation.recomputed, placement, shared, regions)
            key = (alike, size, deferring, *self._computers(placement.mesh), *self._links(placement.mesh))
            stages.append(_Stage(index, ops, placement, key, names))
        sharded, unit = self._sharded(stages, segmentation, shared)
        found = {}
        for stage in stages:
            key = (stage.key, unit)
            if key not in self._known:
                regions = segmentation.regions_of(stage.index)
                costed = cost_on_mesh(
                    self.graph,
                    sharded[stage.key],
                    self.cluster,
                    self.job,
                    stage.index,
                    size,
                    regions,
                    deferring,
                )
                self._known[key] = costed, stage.names
            found[stage.index] = self._named(stage, *self._known[key])
        return found

    def _sharded(
        self, stages: list[_Stage], segmentation: Segmentation, shared: frozenset[str]
    ) -> tuple[dict[Hashable, ShardedGraph], int]:
        """Shard the stages that are not known, one of each key, for the least unit of samples that serves every one."""
        unit = 1
        while True:
            sharded: dict[Hashable, ShardedGraph] = {}
            for stage in stages:
                if (stage.key, unit) not in self._known and stage.key not in sharded:
                    part = part_of(self.graph, stage.ops, segmentation.recomputed)
                    sharded[stage.key] = shard_graph(part, stage.placement, unit, shared)
            multiples = {own.graph.batch.multiple for own in sharded.values()}
            multiples |= {
                self._known[stage.key, unit][0].samples_multiple
                for stage in stages
                if stage.key not in sharded
            }
            unit = math.lcm(self.graph.batch.multiple, *multiples)
            if multiples == {unit}:
                return sharded, unit

    def _named(self, stage: _Stage, known: OnMesh, names: StageNames) -> OnMesh:
        nodes = dict(zip(names.nodes, stage.names.nodes, strict=True))
        state = dict(zip(names.state, stage.names.state, strict=True))
        return known.named(stage.placement, stage.index, nodes, state)

    def _computers(self, mesh: Mesh) -> tuple[Hashable, Hashable]:
        """Return what the ranks compute with: the first, whose kind is all ranks', and each that is unlike others."""
        return self.cluster.unlike(mesh.ranks[:1]), self.cluster.unlike(mesh.ranks)

    def _links(self, mesh: Mesh) -> tuple[AxisLinks, ...]:
        """Return the links along the axes of the mesh, and along several of them together."""
        return tuple(
            group_links(all_ranks_along(mesh, axes), self.cluster)
            for count in range(1, len(mesh.axes) + 1)
            for axes in itertools.combinations(mesh.axes, count)
        )
