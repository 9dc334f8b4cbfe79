"""Values that cross from segment to segment: on which layouts they leave and arrive, and what their ranks send.

segment 0 on ranks (0, 1), leaves S0        0 -> 2 rows 0-3     1 -> 2 rows 4-7
segment 1 on rank 2, arrives whole          and the gradient's rows back

segment 0 on ranks (0, 1), leaves S0        0 -> 2, 0 -> 3 rows 0-3     1 -> 2, 1 -> 3 rows 4-7
segment 1 on ranks (2, 3), arrives whole    and the gradient's rows back once; from both ranks, where each has a part of it

Wherever a producer's layout differs from what a consumer needs, a bridge converts the value. Between device groups that is
a send/recv pair for each piece (``runtime.mesh.cross_mesh``); its conjugate in backward sends the gradient the other way.
Bridges inside a group are ops of its graph (``passes.shard.bridges``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Annotated, NamedTuple, Self

from pydantic import Field, NonNegativeInt

from cost_models.cluster import ClusterSpec
from cost_models.errors import InternalError
from cost_models.layout import Layout, Replicate
from passes.graph.graph import OpGraph
from passes.lower.lower import crossing_values, value_spec
from passes.lower.segment import Segmentation
from passes.shard.words import FeaturePlacement
from runtime.mesh.cross_mesh import pieces
from runtime.mesh.sharding import block_of
from runtime.program.crossings import crossings
from runtime.program.program import PieceBytes, SegmentGraph, Value
from runtime.segment.code import Interface


@dataclass(frozen=True)
class Crossings:
    """The values of a graph between its segments."""

    graph: OpGraph
    segmentation: Segmentation
    placements: Mapping[int, FeaturePlacement]
    """Segment -> how the ranks of its mesh share it; a segment without one runs on a single rank."""

    @cached_property
    def consumers(self) -> dict[str, tuple[int, ...]]:
        """The segments that use each value that leaves its own, in the order of production."""
        return crossing_values(self.graph, self.segmentation)

    def layout(self, value: str, segment: int) -> Layout:
        """Return the layout in which ``value`` leaves a segment, or arrives there."""
        return self._side(value, segment).layout

    def _side(self, value: str, segment: int) -> Side:
        return Side.of(self.placements.get(segment), self.segmentation.ranks[segment], value)

    def value(self, name: str, samples: int, cluster: ClusterSpec) -> Value:
        """Describe a value for micro-batches of ``samples``, with the pieces between groups of several ranks."""
        spec = value_spec(self.graph, name)
        shape = spec.concrete({**self.graph.example_sizes, self.graph.batch.batch_symbol: samples})
        producer, consumers = self.segmentation.segment_of[name], self.consumers[name]
        sides = {s: self._side(name, s) for s in (producer, *consumers)}
        needs_grad = name in self.graph.needs_grad
        return crossing_value(
            name, producer, consumers, needs_grad, Extent(tuple(shape), spec.dtype.itemsize), sides, cluster
        )

    def interfaces(self, segment: int) -> dict[str, Interface]:
        """Return how a segment's values leave and arrive, those that go in pieces."""
        found, own = {}, self.segmentation.ranks[segment]
        for name, consumers in self.consumers.items():
            producer = self.segmentation.segment_of[name]
            if producer == segment:
                groups = dict.fromkeys(self.segmentation.ranks[consumer] for consumer in consumers)
                others = tuple(self.arriving(name, group) for group in groups if group != own)
            elif segment in consumers and self.segmentation.ranks[producer] != own:
                others = (self.layout(name, producer),)
            else:
                continue
            if others and (len(own) > 1 or any(len(layout.ranks) > 1 for layout in others)):
                found[name] = Interface(self.layout(name, segment), others)
        return found

    def arriving(self, value: str, group: tuple[int, ...]) -> Layout:
        """Return the layout in which ``value`` arrives on a group: one for all its segments."""
        users = [s for s in self.consumers[value] if self.segmentation.ranks[s] == group]
        return arriving_side(value, [self._side(value, segment) for segment in users]).layout


class Extent(NamedTuple):
    """The extent of a tensor: its shape, and the bytes of an element."""

    shape: tuple[int, ...]
    element_bytes: int


class Side(NamedTuple):
    """One side of a value's way: its layout there, and its gradient's, which may be parts of a sum where it goes back."""

    layout: Layout
    gradient: Layout

    @classmethod
    def of(cls, placement: FeaturePlacement | None, ranks: Sequence[int], value: str) -> Self:
        """Return the side of a segment on ``ranks``, that of a single rank where it has no placement."""
        if placement is None:
            alone = Layout.on(*ranks)
            return cls(alone, alone)
        layout = placement.values.get(value, (Replicate(),) * len(placement.mesh.shape))
        gradient = placement.returned.get(value, layout)
        return cls(Layout(placement.mesh, layout), Layout(placement.mesh, gradient))


def crossing_value(
    name: str,
    producer: int,
    consumers: Sequence[int],
    needs_grad: bool,
    extent: Extent,
    sides: Mapping[int, Side],
    cluster: ClusterSpec,
) -> Value:
    """Describe a value of ``extent``, with the pieces between groups of several ranks.

    ``sides``: by segment, in which layouts it leaves its producer or arrives.
    """
    leaving = sides[producer].layout
    there: list[PieceBytes] = []
    back: list[PieceBytes] = []

    for group in dict.fromkeys(sides[consumer].layout.ranks for consumer in consumers):
        if group == leaving.ranks or len(group) == len(leaving.ranks) == 1:
            continue
        own = [sides[consumer] for consumer in consumers if sides[consumer].layout.ranks == group]
        arriving = arriving_side(name, own)
        there += _between(extent, leaving, arriving.layout, cluster)
        back += _between(extent, arriving.gradient, leaving, cluster) if needs_grad else ()
    made = block_of(extent.shape, leaving.placements, leaving.mesh, leaving.ranks[0])
    size_bytes = math.prod(made.shape) * extent.element_bytes
    return Value(name, producer, tuple(consumers), size_bytes, needs_grad, tuple(there), tuple(back))


@lru_cache(maxsize=256)
def _between(extent: Extent, source: Layout, target: Layout, cluster: ClusterSpec) -> tuple[PieceBytes, ...]:
    """Return the pieces between two groups; kept, for stages that go round share theirs."""
    found = pieces(extent.shape, source, target, lambda a, b: cluster.path(a, b).transfer_seconds(1))
    return tuple(PieceBytes(p.source, p.target, p.elements * extent.element_bytes) for p in found)


def arriving_side(value: str, sides: Sequence[Side]) -> Side:
    """Return the one way in which ``value`` arrives on a group, given those of its segments there."""
    first, *others = dict.fromkeys(sides)
    if others:
        raise InternalError(
            f"send {value} to ranks {first.layout.ranks}",
            [
                f"it arrives as {side.layout}, its gradient leaves as {side.gradient}"
                for side in (first, *others)
            ],
        )
    return first


@dataclass(frozen=True)
class Bridge:
    """A bridge: one value sent from a device to another, or from group to group, once per micro-batch."""

    value: str
    kind: str
    source: Annotated[NonNegativeInt, Field(description="device, the first of its group")]
    target: Annotated[NonNegativeInt, Field(description="device, the first of its group")]
    size_bytes: Annotated[
        NonNegativeInt, Field(description="per micro-batch, one direction, all pieces together")
    ]
    gradient: Annotated[bool, Field(description="whether its gradient is sent back")]
    messages: Annotated[
        NonNegativeInt, Field(description="between groups, in one direction: pieces of the value")
    ] = 1


def bridges(graph: SegmentGraph) -> tuple[Bridge, ...]:
    """One bridge per value and group of ranks that takes it from another, in the order in which values are produced."""
    return tuple(
        Bridge(
            value.name,
            "send_recv",
            graph.segments[value.producer].rank,
            way.ranks[0],
            sum(piece.size_bytes for piece in way.there),
            value.needs_grad,
            len(way.there),
        )
        for value in graph.values
        for way in crossings(graph, value)
    )
