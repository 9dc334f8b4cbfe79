"""Stages on meshes, each sharded, costed and profiled once: equal ones take its numbers under their own names.

    16 stages x 8 chunks of 126 equal layers     ─►   3 graphs on shards: the first, the last, any other

A search keeps them for all that it simulates.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace

from cost_models.cluster import ClusterSpec
from cost_models.conversion import AxisLinks, group_links
from cost_models.layout import Mesh
from passes.costs.allocations import Allocations
from passes.graph.graph import OpGraph
from passes.graph.part import part_of
from passes.graph.verify import verify_graph
from passes.lower.alike import StageNames, stage_key
from passes.lower.candidate import Candidate
from passes.lower.job import Job
from passes.lower.on_mesh import OnMesh, allocations_on_mesh, cost_on_mesh
from passes.lower.placed_graph import common_unit, meshes_of
from passes.lower.segment import Segmentation
from passes.lower.summarize import shared_state
from passes.shard.shard import ShardedGraph, samples_multiple, shard_graph
from passes.shard.words import FeaturePlacement
from runtime.mesh.ranks_along import all_ranks_along
from runtime.schedules import SCHEDULES


@dataclass(frozen=True)
class _MeshStage:
    """A stage, and all that its numbers follow from."""

    index: int
    ops: list[str]
    copied: frozenset[str]
    """Ops of which every stage has copies."""
    placement: FeaturePlacement
    shared: frozenset[str]
    """Parameters and buffers of several stages."""
    key: Hashable
    """Equal for stages with one graph on shards."""
    names: StageNames
    regions: tuple[tuple[int, ...], ...]
    """Numbers of the ops of each block that it computes again."""
    around: Hashable
    """All else that its seconds and bytes follow from: devices and links."""


@dataclass(eq=False)
class MeshStages:
    """The stages on meshes that were costed so far, for one graph, cluster and job."""

    graph: OpGraph
    cluster: ClusterSpec
    job: Job
    _known: dict[Hashable, tuple[OnMesh, StageNames]] = field(default_factory=dict)
    _sharded: dict[Hashable, tuple[ShardedGraph, StageNames]] = field(default_factory=dict)
    """Graphs of the last candidate's stages, by key and unit of samples: the next one's are often the same."""
    _multiples: dict[Hashable, int] = field(default_factory=dict)
    """The samples that these, and those before, have multiples of."""

    def of(self, candidate: Candidate, segmentation: Segmentation) -> dict[int, OnMesh]:
        """Return the segments of a candidate on meshes, by number; all of them count samples in one unit."""
        if not candidate.shardings:
            return {}
        stages, unit = self._in_one_unit(candidate, segmentation)
        size = self.job.batch_size // candidate.microbatches
        deferring = SCHEDULES[candidate.schedule].splits_backward
        found = {}
        for stage in stages:
            key = (stage.key, unit, stage.regions, size, deferring, stage.around)
            if key not in self._known:
                self._known[key] = self._costed(stage, unit, size, deferring)
            found[stage.index] = _named(stage, *self._known[key])
        used = {(stage.key, unit) for stage in stages}
        self._sharded = {key: own for key, own in self._sharded.items() if key in used}
        return found

    def allocations(self, candidate: Candidate, segmentation: Segmentation) -> dict[int, Allocations]:
        """Return what a rank of each segment on a mesh allocates for a micro-batch."""
        if not candidate.shardings:
            return {}
        stages, unit = self._in_one_unit(candidate, segmentation)
        size = self.job.batch_size // candidate.microbatches
        known: dict[Hashable, Allocations] = {}
        found = {}
        for stage in stages:
            sharded, names = self._on_shards(stage, unit)
            key = (stage.key, stage.regions, self._computers(stage.placement.mesh))
            if key not in known:
                on_ranks = replace(sharded, placement=replace(sharded.placement, mesh=stage.placement.mesh))
                regions = [[names.nodes[number] for number in own] for own in stage.regions]
                known[key] = allocations_on_mesh(on_ranks, self.cluster, size, regions)
            own_name = dict(zip(names.state, stage.names.state, strict=True))
            made = known[key]
            found[stage.index] = replace(made, parameters=tuple(own_name[name] for name in made.parameters))
        return found

    def _in_one_unit(self, candidate: Candidate, segmentation: Segmentation) -> tuple[list[_MeshStage], int]:
        """Return the stages of a candidate, and the unit in which all of them count samples."""
        stages = list(self._stages(candidate, segmentation))
        unit = common_unit(
            self.graph.batch.multiple, lambda unit: {self._multiple(stage, unit) for stage in stages}
        )
        return stages, unit

    def _stages(self, candidate: Candidate, segmentation: Segmentation) -> Iterator[_MeshStage]:
        shared, copied = shared_state(self.graph, segmentation), segmentation.recomputed
        for index, ops, placement in meshes_of(self.graph, segmentation, candidate.shardings):
            key, names = stage_key(self.graph, ops, copied, placement, shared)
            number = {name: i for i, name in enumerate(names.nodes)}
            regions = tuple(tuple(number[name] for name in own) for own in segmentation.regions_of(index))
            around = (*self._computers(placement.mesh), *self._links(placement.mesh))
            yield _MeshStage(index, ops, copied, placement, shared, key, names, regions, around)

    def _multiple(self, stage: _MeshStage, unit: int) -> int:
        """Return the samples that a stage has multiples of, sharded for multiples of ``unit``."""
        key = (stage.key, unit)
        if key not in self._multiples:
            part = part_of(self.graph, stage.ops, stage.copied)
            self._multiples[key] = samples_multiple(part, stage.placement, unit, stage.shared)
        return self._multiples[key]

    def _on_shards(self, stage: _MeshStage, unit: int) -> tuple[ShardedGraph, StageNames]:
        """Return the graph on shards of a stage, or of an equal one, with the names of that."""
        key = (stage.key, unit)
        if key not in self._sharded:
            part = part_of(self.graph, stage.ops, stage.copied)
            sharded = shard_graph(part, stage.placement, unit, stage.shared)
            verify_graph(sharded.graph, after="shard")
            self._sharded[key] = sharded, stage.names
        return self._sharded[key]

    def _costed(self, stage: _MeshStage, unit: int, size: int, deferring: bool) -> tuple[OnMesh, StageNames]:
        """Cost a stage on its ranks, under the names of the one that was sharded."""
        sharded, names = self._on_shards(stage, unit)
        on_ranks = replace(sharded, placement=replace(sharded.placement, mesh=stage.placement.mesh))
        regions = [[names.nodes[number] for number in own] for own in stage.regions]
        costed = cost_on_mesh(
            self.graph, on_ranks, self.cluster, self.job, stage.index, size, regions, deferring
        )
        return costed, names

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


def _named(stage: _MeshStage, costed: OnMesh, names: StageNames) -> OnMesh:
    """Return the numbers of an equal stage, which has these names, as those of ``stage``."""
    nodes = dict(zip(names.nodes, stage.names.nodes, strict=True))
    state = dict(zip(names.state, stage.names.state, strict=True))
    return costed.named(stage.placement, stage.index, nodes, state)
