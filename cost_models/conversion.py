"""Bridges on a mesh: which collectives a change of placements needs, and what they cost.

    produced as S(0) R,  needed as R S(1)       forward   all-gather axis 0 dim 0 · slice axis 1 dim 1
                                                backward  all-gather axis 1 dim 1 · slice axis 0 dim 0

The forward steps take the value from how it was produced to how it is needed, the backward steps its gradient from how
the consumer leaves it to how the producer expects it (the table in ``passes.shard.words``); both are the same search.

S(d) on several axes nests, the first axis outermost. The blocks of an inner axis lie inside those of an outer one, so an
axis goes into or out of S(d) only while no later axis is S(d): such a later axis is gathered first and sliced again
afterwards. Among the orders that are right the one is taken that moves the fewest bytes per rank, then the fewest
collectives, then the fewest steps, then the earliest axes: a function of placements and mesh shape alone, so that what is
costed is what is lowered.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from cost_models.communication import (
    AlphaBeta,
    all_to_all_seconds,
    hierarchical_all_reduce_seconds,
    hierarchical_all_to_all_seconds,
    ring_all_gather_seconds,
    ring_all_reduce_seconds,
    slowest_hop,
    tree_all_reduce_seconds,
)
from cost_models.gpu_collectives import START_SECONDS, GpuLinks
from cost_models.layout import Mesh, Partial, Placement, Replicate, Shard

if TYPE_CHECKING:
    from cost_models.cluster import ClusterSpec

CollectiveKind: TypeAlias = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "slice", "keep_first"
]

COLLECTIVES: frozenset[CollectiveKind] = frozenset(
    {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
)


class NeedLike(Protocol):
    """The part of ``passes.shard.words.Need`` that is read here."""

    @property
    def placement(self) -> Placement: ...
    @property
    def partial_gradient(self) -> bool: ...


@dataclass(frozen=True)
class AxisChange:
    """One change on one mesh axis.

    dim      the dimension that is gathered, scattered or sliced, or that all-to-all puts together; -1 for all_reduce
             and keep_first
    to_dim   the dimension that all-to-all splits; -1 otherwise
    share    one rank's tensor over the whole one, if this axis did not split it (the other axes do): the n of the
             formulas in ``cost_models.communication`` as a fraction
    """

    kind: CollectiveKind
    axis: int
    dim: int
    share: float
    to_dim: int = -1

    def __str__(self) -> str:
        dims = "" if self.dim < 0 else f" dim {self.dim}" + (f"→{self.to_dim}" if self.to_dim >= 0 else "")
        return f"{self.kind} axis {self.axis}{dims}"


Steps: TypeAlias = tuple[AxisChange, ...]


def steps(source: Sequence[Placement], target: Sequence[NeedLike], mesh: Mesh) -> tuple[Steps, Steps]:
    """Return the (forward, backward) steps of the bridge between a value produced as ``source`` and a consumer's need."""
    needed = tuple(need.placement for need in target)
    return path(tuple(source), needed, mesh.shape), path(
        given_gradient(target), expected_gradient(source), mesh.shape
    )


def given_gradient(target: Sequence[NeedLike]) -> tuple[Placement, ...]:
    """Return the placement in which the gradient leaves a consumer that took its operand so."""
    return tuple(
        need.placement
        if isinstance(need.placement, Shard)
        else Partial()
        if isinstance(need.placement, Replicate) and need.partial_gradient
        else Replicate()
        for need in target
    )


def expected_gradient(source: Sequence[Placement]) -> tuple[Placement, ...]:
    """Return the placement in which the producer's backward expects the gradient of an output placed so."""
    return tuple(p if isinstance(p, Shard) else Replicate() for p in source)


def local_share(placements: Sequence[Placement], shape: Sequence[int]) -> float:
    """Return the fraction of a tensor's bytes that one rank holds: 1 / product of the axes that split it."""
    share = 1.0
    for placement, size in zip(placements, shape, strict=True):
        if isinstance(placement, Shard):
            share /= size
    return share


@cache
def path(source: tuple[Placement, ...], target: tuple[Placement, ...], shape: tuple[int, ...]) -> Steps:
    """Find the steps from one layout to another, by uniform-cost search over orders.

    Every axis passes only through its source's placement, R, and its target's, so that nothing is split that need not
    divide."""
    assert len(source) == len(target) == len(shape)
    visited: set[tuple[Placement, ...]] = set()
    # (bytes per rank as a fraction of the tensor, collectives, steps, axes in order) decides; the counter never does.
    queue: list[tuple[float, int, int, tuple[int, ...], int, tuple[Placement, ...], Steps]] = []
    heapq.heappush(queue, (0.0, 0, 0, (), 0, source, ()))
    pushed = 0
    while queue:
        volume, collectives, count, axes, _, here, taken = heapq.heappop(queue)
        if here == target:
            return taken
        if here in visited:
            continue
        visited.add(here)
        for axis, size in enumerate(shape):
            for wanted in dict.fromkeys((target[axis], source[axis], Replicate())):
                step = _step(here, axis, wanted, shape)
                if step is None:
                    continue
                pushed += 1
                there = (*here[:axis], wanted, *here[axis + 1 :])
                more = round(volume + volume_share(step, size), 12)
                talks = collectives + (step.kind in COLLECTIVES)
                heapq.heappush(queue, (more, talks, count + 1, (*axes, axis), pushed, there, (*taken, step)))
    raise AssertionError(f"no way from {source} to {target}")  # through R there always is one


def _step(
    here: tuple[Placement, ...], axis: int, wanted: Placement, shape: Sequence[int]
) -> AxisChange | None:
    """Return the step that takes ``axis`` from its placement to ``wanted``; None where there is none."""
    now = here[axis]
    if now == wanted:
        return None
    for placement in (now, wanted):
        if isinstance(placement, Shard) and placement in here[axis + 1 :]:
            return None
    share = local_share((*here[:axis], Replicate(), *here[axis + 1 :]), shape)
    if isinstance(now, Shard):
        if isinstance(wanted, Shard):
            return AxisChange("all_to_all", axis, now.dim, share, wanted.dim)
        return AxisChange("all_gather", axis, now.dim, share) if isinstance(wanted, Replicate) else None
    if isinstance(wanted, Shard):
        kind: CollectiveKind = "reduce_scatter" if isinstance(now, Partial) else "slice"
        return AxisChange(kind, axis, wanted.dim, share)
    return AxisChange("all_reduce" if isinstance(now, Partial) else "keep_first", axis, -1, share)


def volume_share(step: AxisChange, size: int) -> float:
    """Return the bytes that each rank of the axis sends, by the bandwidth-optimal algorithm, over the whole tensor's.

    All-gather and reduce-scatter (p−1)/p·n, all-reduce twice that, all-to-all (p−1)/p·n/p; n = ``step.share``.
    """
    once = step.share * (size - 1) / size
    factor = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0 / size}
    return once * factor.get(step.kind, 0.0)


def buffer_share(step: AxisChange, size: int) -> float:
    """Return the larger of a rank's input and output of a collective, as a fraction of the whole tensor."""
    if step.kind not in COLLECTIVES:
        return 0.0
    return step.share / size if step.kind == "all_to_all" else step.share


@dataclass(frozen=True)
class AxisLinks:
    """The links of collectives along one mesh axis, paced by the slowest of its groups while all of them talk.

    ``inside`` and ``between`` are those of a hierarchy of nodes, where every group has equally many ranks
    (``per_node`` > 1) in each of several nodes. ``gpus``: of groups of GPUs alone, whose collectives are NCCL's; those of
    others take what latency and bandwidth say, as a calibration measured them.
    """

    size: int
    ring: AlphaBeta
    per_node: int = 1
    inside: AlphaBeta | None = None
    between: AlphaBeta | None = None
    gpus: GpuLinks | None = None
    measured: tuple[tuple[CollectiveKind, tuple[tuple[float, float], ...]], ...] = ()
    """Collectives of two workers of one machine by kind: (bytes, seconds), where a calibration measured them."""

    def seconds(self, kind: CollectiveKind, size_bytes: float) -> float:
        """Return the seconds of one collective; ``size_bytes`` is the n of ``Step.share`` times the tensor's bytes."""
        if self.size == 1 or kind not in COLLECTIVES:
            return 0.0
        for known, curve in self.measured:
            if known == kind:
                return _of_pairs_seconds(kind, size_bytes, self.size, curve)
        if kind == "all_to_all":
            start = START_SECONDS if self.gpus else 0.0
            return start + self._all_to_all_seconds(size_bytes / self.size)
        if self.gpus is not None:
            if kind == "all_reduce":
                return self.gpus.all_reduce_seconds(size_bytes)
            return self.gpus.ring_seconds(size_bytes)
        if kind != "all_reduce":
            # Half of the all-reduce's hierarchy: the pieces across nodes at once, then inside each node.
            halves = self.hierarchy_seconds(size_bytes) / 2
            return min(ring_all_gather_seconds(size_bytes, self.size, self.ring), halves)
        return min(
            ring_all_reduce_seconds(size_bytes, self.size, self.ring),
            tree_all_reduce_seconds(size_bytes, self.size, self.ring),
            self.hierarchy_seconds(size_bytes),
        )

    def _all_to_all_seconds(self, size_bytes: float) -> float:
        """Return the seconds in which each rank gives away ``size_bytes``, a piece to every rank."""
        if self.inside is None or self.between is None:
            return all_to_all_seconds(size_bytes, self.size, self.ring)
        nodes = self.size // self.per_node
        return hierarchical_all_to_all_seconds(size_bytes, self.per_node, nodes, self.inside, self.between)

    def hierarchy_seconds(self, size_bytes: float) -> float:
        """Return the seconds of an all-reduce by a hierarchy of nodes; infinite if there is none."""
        if self.inside is None or self.between is None:
            return math.inf
        nodes = self.size // self.per_node
        return hierarchical_all_reduce_seconds(size_bytes, self.per_node, nodes, self.inside, self.between)


def _of_pairs_seconds(
    kind: CollectiveKind, size_bytes: float, size: int, curve: Sequence[tuple[float, float]]
) -> float:
    """Return the seconds of a collective of ``size`` workers from those of two, ``curve``: (bytes, seconds).

    Two send pieces of n/2 to each other once, or twice for an all-reduce; p send p - 1 times as many of n/p, so it is
    p - 1 times what two take for 2n/p. An all-to-all's pieces are n/p², so it is that of 4n/p². Between sizes, and beyond
    the largest, seconds are linear.
    """
    pair_bytes = size_bytes * (4 / size**2 if kind == "all_to_all" else 2 / size)
    sizes, seconds = zip(*curve, strict=True)
    upper = min(max(bisect.bisect_left(sizes, pair_bytes), 1), len(sizes) - 1)
    slope = (seconds[upper] - seconds[upper - 1]) / (sizes[upper] - sizes[upper - 1])
    found = seconds[upper] + slope * (pair_bytes - sizes[upper])
    return (size - 1) * max(float(found), 0.0)


def axis_groups(mesh: Mesh, axis: int) -> list[list[int]]:
    """List the groups of ranks that differ in this axis only, each in the axis' order."""
    size, stride = mesh.shape[axis], math.prod(mesh.shape[axis + 1 :])
    starts = [i for i in range(len(mesh.ranks)) if (i // stride) % size == 0]
    return [[mesh.ranks[start + j * stride] for j in range(size)] for start in starts]


def axis_links(mesh: Mesh, axis: int, cluster: ClusterSpec) -> AxisLinks:
    """Return the links of ``mesh``'s axis on ``cluster``."""
    return group_links(axis_groups(mesh, axis), cluster)


def group_links(groups: Sequence[Sequence[int]], cluster: ClusterSpec) -> AxisLinks:
    """Return the links of groups of ranks, equally large, that all talk at once."""
    return _group_links(tuple(map(tuple, groups)), cluster)


@lru_cache(maxsize=1024)
def _group_links(groups: tuple[tuple[int, ...], ...], cluster: ClusterSpec) -> AxisLinks:
    size = len(groups[0])
    if size == 1:
        return AxisLinks(1, AlphaBeta(0.0, 1.0))
    members_of = [list(group) for group in groups]
    ring = slowest_hop(members_of, cluster)
    split = [_by_node(group, cluster) for group in members_of]
    widths = {len(members) for nodes in split for members in nodes}
    with_gpus = all(cluster.devices[rank].counted_as == "cuda" for group in groups for rank in group)
    if len(widths) != 1 or widths in ({1}, {size}):
        gpus = GpuLinks(1, size, between=ring) if widths == {1} else GpuLinks(size, 1, ring)
        if widths == {size}:
            gpus = replace(gpus, in_network_bytes_per_second=_in_network(members_of, cluster))
        measured = _measured(cluster) if widths == {size} and not with_gpus else ()
        return AxisLinks(size, ring, gpus=gpus if with_gpus else None, measured=measured)
    insides = [members for nodes in split for members in nodes]
    inside = slowest_hop(insides, cluster)
    across = slowest_hop([list(column) for nodes in split for column in zip(*nodes, strict=True)], cluster)
    per_node = widths.pop()
    gpus = GpuLinks(per_node, size // per_node, inside, across, _in_network(insides, cluster))
    return AxisLinks(size, ring, per_node, inside, across, gpus if with_gpus else None)


def _measured(cluster: ClusterSpec) -> tuple[tuple[CollectiveKind, tuple[tuple[float, float], ...]], ...]:
    return tuple((spec.kind, spec.measured) for spec in cluster.host_costs.collectives)


def _in_network(groups: Sequence[Sequence[int]], cluster: ClusterSpec) -> float:
    """Return the bytes per second at which the switch sums for each of these groups of one node; 0 if it cannot for one."""
    links = {link for group in groups for rank in group[1:] for link in cluster.path(group[0], rank).links}
    return min((cluster.links[link].in_network_bytes_per_second for link in links), default=0.0)


def data_parallel_seconds(gradient_bytes: float, cluster: ClusterSpec) -> float:
    """Return the seconds to all-reduce ``gradient_bytes`` over all ranks. The sum begins after the last backward."""
    return group_links([range(cluster.world_size)], cluster).seconds("all_reduce", gradient_bytes)


def _by_node(group: Sequence[int], cluster: ClusterSpec) -> list[list[int]]:
    nodes: dict[int, list[int]] = {}
    for rank in group:
        nodes.setdefault(cluster.devices[rank].node, []).append(rank)
    return list(nodes.values())


def steps_seconds(taken: Steps, tensor_bytes: float, links: Sequence[AxisLinks]) -> float:
    """Return the seconds of these steps one after the other, for a tensor of ``tensor_bytes`` as a whole."""
    return sum(links[step.axis].seconds(step.kind, step.share * tensor_bytes) for step in taken)


def steps_bytes_per_rank(taken: Steps, tensor_bytes: float, shape: Sequence[int]) -> float:
    """Return the bytes that each rank sends for these steps, by the algorithm's volume (``volume_share``)."""
    return sum(volume_share(step, shape[step.axis]) for step in taken) * tensor_bytes
