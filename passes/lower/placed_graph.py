"""A graph on its devices: segments on groups of ranks, and what each rank of a group runs.

segment on one rank     its ops as they are                    lowered from the graph itself
segment on a mesh       its ops on shards, with bridges        lowered from a graph of local shapes, its own
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import cached_property

from cost_models.errors import InternalError
from cost_models.layout import Mesh, Placement
from passes.graph.graph import OpGraph
from passes.graph.part import part_of
from passes.lower.crossing import Crossings
from passes.lower.lower import lower
from passes.lower.segment import Segmentation
from passes.lower.summarize import ops_by_segment, shared_state
from passes.shard.regions import regions_on_shards
from passes.shard.shard import ShardedGraph, samples_multiple, shard_graph
from passes.shard.state import shardings
from passes.shard.words import FeaturePlacement
from runtime.mesh.sharding import Sharding
from runtime.segment.code import BatchSpec, SegmentCode


@dataclass(frozen=True)
class PlacedGraph:
    """A graph and its segments."""

    graph: OpGraph
    """The model's own shapes, with the ops in blocks that run in blocks."""
    segmentation: Segmentation
    sharded: Mapping[int, ShardedGraph] = field(default_factory=dict)
    """Segment -> what each of its ranks runs; empty where no segment has several."""
    placements: Mapping[int, FeaturePlacement] = field(default_factory=dict)
    """Segment -> its mesh and the layouts of values there, also of segments that only others run: they send to these."""

    def graph_of(self, segment: int) -> OpGraph:
        """Return the graph that a segment's ops are of, as each of its ranks runs them."""
        return self.sharded[segment].graph if segment in self.sharded else self.graph

    def lowered(self, *, device: str = "cpu", only: frozenset[int] | None = None) -> dict[int, SegmentCode]:
        """Make the code of every segment (or of those in ``only``), for ``device``."""
        wanted = frozenset(range(len(self.segmentation))) if only is None else only
        codes = lower(self.graph, self.segmentation, device=device, only=wanted - self.sharded.keys())
        for index in wanted & self.sharded.keys():
            local = self.sharded[index].graph
            again = regions_on_shards(local, self.segmentation.regions_of(index))
            own = replace(
                self.segmentation,
                segment_of=dict.fromkeys((node.name for node in local.ops), index),
                recomputed=frozenset(),
                regions=tuple(again if i == index else () for i in range(len(self.segmentation))),
            )
            (code,) = lower(local, own, device=device, only=frozenset({index})).values()
            codes[index] = replace(code, interfaces=self._crossings.interfaces(index))
        return dict(sorted(codes.items()))

    @cached_property
    def _crossings(self) -> Crossings:
        return Crossings(self.graph, self.segmentation, self.placements)

    @cached_property
    def shardings(self) -> dict[str, Sharding]:
        """The spread of parameters and buffers over the ranks of a mesh; others are whole wherever they are."""
        return {
            name: held
            for own in self.sharded.values()
            for name, held in shardings(own).items()
            if name not in own.shared
        }

    @property
    def multiple(self) -> int:
        """The number of samples of which every micro-batch has a multiple."""
        return math.lcm(
            self.graph.batch.multiple, *(own.graph.batch.multiple for own in self.sharded.values())
        )

    def batch_of(self, rank: int) -> BatchSpec:
        """Return how ``rank`` reads batches: as its segments do, each its own leaves. Ranks of a mesh may read parts."""
        own = [index for index, ranks in enumerate(self.segmentation.ranks) if rank in ranks]
        graphs = [self.graph_of(index) for index in own] or [self.graph]
        spec = graphs[0].batch
        found: dict[str, tuple[Placement, ...]] = {}
        for graph in graphs:
            read = {i.name: graph.batch.placements.get(i.name, ()) for i in graph.inputs if i.kind == "batch"}
            unlike = any(found.setdefault(name, layout) != layout for name, layout in read.items())
            if unlike or graph.batch.mesh != spec.mesh:
                raise InternalError(
                    f"cut batches for rank {rank}", [f"segments {own} read them in unlike ways"]
                )
        return replace(spec, placements={name: layout for name, layout in found.items() if layout})


def on_meshes(
    graph: OpGraph, segmentation: Segmentation, placements: Mapping[int, FeaturePlacement], unit: int = 1
) -> PlacedGraph:
    """Shard the segments in ``placements``, each on its mesh, for micro-batches of multiples of ``unit`` samples.

    All of them count samples in one unit, the least that serves every one; so a rank alone beside meshes is a mesh of its
    own. A parameter of several segments is whole on all their ranks, and each of them makes a part of its gradient.
    """
    if not placements:
        return PlacedGraph(graph, segmentation)
    shared = shared_state(graph, segmentation)
    parts = {
        index: (part_of(graph, ops, segmentation.recomputed), placement)
        for index, ops, placement in meshes_of(graph, segmentation, placements)
    }
    unit = common_unit(
        graph.batch.multiple,
        lambda unit: {samples_multiple(*part, unit, shared) for part in parts.values()},
        unit,
    )
    sharded = {index: shard_graph(*part, unit, shared) for index, part in parts.items()}
    known = {index: own.placement for index, own in sharded.items()}
    return PlacedGraph(graph, segmentation, sharded, {**placements, **known})


def common_unit(multiple: int, multiples_for: Callable[[int], Set[int]], unit: int = 1) -> int:
    """Return the least multiple of ``unit`` samples with which all parts of a model count alike.

    multiple        samples that every micro-batch has multiples of anyway
    multiples_for   unit -> the samples that the parts have multiples of, each sharded for multiples of the unit
    """
    while True:
        multiples = multiples_for(unit)
        needed = math.lcm(multiple, *multiples)
        if multiples == {needed}:
            return unit
        unit = needed


def meshes_of(
    graph: OpGraph, segmentation: Segmentation, placements: Mapping[int, FeaturePlacement]
) -> Iterator[tuple[int, list[str], FeaturePlacement]]:
    """Yield each segment that is known with its ops and its mesh: one of a single rank where ``placements`` has none."""
    members = ops_by_segment(graph, segmentation)
    for index, ranks in enumerate(segmentation.ranks):
        if index in placements or len(ranks) == 1:  # others run the rest, and know how
            ops = [graph.ops[number].name for number in members[index]]
            yield index, ops, placements.get(index) or alone(ranks[0])


def alone(rank: int) -> FeaturePlacement:
    """Place ops on a mesh of one rank, whole."""
    return FeaturePlacement(Mesh((rank,), (1,), ("alone",)), {}, {}, {}, 1)
