"""Values that cross from segment to segment: on which layouts they leave and arrive, and what their ranks send.

segment 0 on ranks (0, 1), leaves S0        0 -> 2 rows 0-3     1 -> 2 rows 4-7
segment 1 on rank 2, arrives whole          and the gradient's rows back
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from cost_models.cluster import ClusterSpec
from cost_models.errors import InternalError
from cost_models.layout import Layout, Replicate
from passes.graph.graph import OpGraph
from passes.lower.lower import crossing_values, value_spec
from passes.lower.segment import Segmentation
from passes.shard.words import FeaturePlacement
from runtime.mesh.cross_mesh import pieces
from runtime.mesh.sharding import block_of
from runtime.program.program import PieceBytes, Value
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
        placement = self.placements.get(segment)
        if placement is None:
            return Layout.on(*self.segmentation.ranks[segment])
        whole = (Replicate(),) * len(placement.mesh.shape)
        return Layout(placement.mesh, placement.values.get(value, whole))

    def value(self, name: str, samples: int, cluster: ClusterSpec) -> Value:
        """Describe a value for micro-batches of ``samples``, with the pieces between groups of several ranks."""
        spec = value_spec(self.graph, name)
        shape = spec.concrete({**self.graph.example_sizes, self.graph.batch.batch_symbol: samples})
        producer, consumers = self.segmentation.segment_of[name], self.consumers[name]
        layouts = {s: self.layout(name, s) for s in (producer, *consumers)}
        needs_grad = name in self.graph.needs_grad
        return crossing_value(
            name, producer, consumers, needs_grad, Extent(tuple(shape), spec.dtype.itemsize), layouts, cluster
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
        return arriving_layout(value, [self.layout(value, segment) for segment in users])


class Extent(NamedTuple):
    """The extent of a tensor: its shape, and the bytes of an element."""

    shape: tuple[int, ...]
    element_bytes: int


def crossing_value(
    name: str,
    producer: int,
    consumers: Sequence[int],
    needs_grad: bool,
    extent: Extent,
    layouts: Mapping[int, Layout],
    cluster: ClusterSpec,
) -> Value:
    """Describe a value of ``extent``, with the pieces between groups of several ranks.

    ``layouts``: by segment, in which it leaves its producer or arrives.
    """
    leaving = layouts[producer]
    there: list[PieceBytes] = []
    back: list[PieceBytes] = []

    def between(source: Layout, target: Layout) -> list[PieceBytes]:
        found = pieces(extent.shape, source, target, lambda a, b: cluster.path(a, b).transfer_seconds(1))
        return [PieceBytes(p.source, p.target, p.elements * extent.element_bytes) for p in found]

    for group in dict.fromkeys(layouts[consumer].ranks for consumer in consumers):
        if group == leaving.ranks or len(group) == len(leaving.ranks) == 1:
            continue
        arriving = arriving_layout(name, [layouts[c] for c in consumers if layouts[c].ranks == group])
        there += between(leaving, arriving)
        back += between(arriving, leaving) if needs_grad else []
    own = block_of(extent.shape, leaving.placements, leaving.mesh, leaving.ranks[0])
    size_bytes = math.prod(own.shape) * extent.element_bytes
    return Value(name, producer, tuple(consumers), size_bytes, needs_grad, tuple(there), tuple(back))


def arriving_layout(value: str, layouts: Sequence[Layout]) -> Layout:
    """Return the one layout in which ``value`` arrives on a group, given those of its segments there."""
    first, *others = dict.fromkeys(layouts)
    if others:
        raise InternalError(
            f"send {value} to ranks {first.ranks}", [f"it arrives as {layout}" for layout in (first, *others)]
        )
    return first
