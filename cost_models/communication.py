"""Seconds of communication: the α–β model of messages and collectives, and the field's closed forms.

Symbols
    n   bytes of the whole tensor that is reduced, broadcast or gathered; for all-to-all, of what each rank holds
    p   ranks
    g   ranks of a node, k = p / g nodes
    α   latency of a message, seconds
    β   seconds per byte (1 / bandwidth)

Sources: Hockney, "The communication challenge for MPP", Parallel Computing 20 (1994) for α + nβ; Thakur, Rabenseifner,
Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19 (2005) for the collectives; Patarasuk,
Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69 (2009) for the ring; Sanders, Speck,
Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel Computing 35 (2009) for the trees.

The arithmetic of a reduction is not counted: it is bound by the same memory the messages pass through.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from cost_models.links import Link, Path, fair_rates


class Connection(Protocol):
    """The part of a link or path that a formula reads; ``cost_models.links.Path`` is one."""

    @property
    def latency_seconds(self) -> float: ...
    @property
    def bandwidth_bytes_per_second(self) -> float: ...


@dataclass(frozen=True)
class AlphaBeta:
    """A connection by its two numbers."""

    latency_seconds: float
    bandwidth_bytes_per_second: float


def point_to_point_seconds(size_bytes: float, link: Connection) -> float:
    """Return the seconds of one message: α + n·β."""
    return link.latency_seconds + size_bytes / link.bandwidth_bytes_per_second


def ring_reduce_scatter_seconds(size_bytes: float, ranks: int, link: Connection) -> float:
    """Return (p−1)·α + (p−1)/p·n·β: each rank ends with the sum of its 1/p of the tensor, after p − 1 steps."""
    steps = ranks - 1
    return steps * point_to_point_seconds(size_bytes / ranks, link)


def ring_all_gather_seconds(size_bytes: float, ranks: int, link: Connection) -> float:
    """Return (p−1)·α + (p−1)/p·n·β: each rank ends with the whole tensor of n bytes, after p − 1 steps."""
    return ring_reduce_scatter_seconds(size_bytes, ranks, link)


def ring_all_reduce_seconds(size_bytes: float, ranks: int, link: Connection) -> float:
    """Return 2(p−1)·α + 2(p−1)/p·n·β: reduce-scatter, then all-gather. Moves the fewest bytes possible."""
    return 2 * ring_reduce_scatter_seconds(size_bytes, ranks, link)


def tree_all_reduce_seconds(size_bytes: float, ranks: int, link: Connection) -> float:
    """Return 2⌈log₂ p⌉·α + 2·n·β: two binary trees, pipelined, each for half of the tensor.

    Few steps, so it is for small tensors. The time to fill the pipeline with the first piece is neglected.
    """
    if ranks == 1:
        return 0.0
    return 2 * _log2_ceil(ranks) * link.latency_seconds + 2 * size_bytes / link.bandwidth_bytes_per_second


def hierarchical_all_reduce_seconds(
    size_bytes: float, ranks_per_node: int, nodes: int, inside: Connection, between: Connection
) -> float:
    """Return 2(g−1)(α₁ + n/g·β₁) + 2(k−1)(α₂ + n/(g·k)·β₂), for a hierarchy of nodes.

    Reduce-scatter in each node, g rings of n/g bytes between nodes at once, all-gather in each node. ``between`` is what
    *one* of the g rings gets: a network card shared by a node's ranks gives each ring 1/g of its bandwidth.
    """
    within = ring_all_reduce_seconds(size_bytes, ranks_per_node, inside)
    return within + ring_all_reduce_seconds(size_bytes / ranks_per_node, nodes, between)


def all_to_all_seconds(size_bytes: float, ranks: int, link: Connection) -> float:
    """Return (p−1)·(α + n/p·β): each rank sends 1/p of its n bytes to every other, pairwise in p − 1 steps."""
    return (ranks - 1) * point_to_point_seconds(size_bytes / ranks, link)


def broadcast_seconds(size_bytes: float, ranks: int, link: Connection) -> float:
    """Return the faster of a binomial tree, ⌈log₂ p⌉·(α + n·β), and scatter + all-gather for long messages.

    Scatter by a binomial tree, then a ring all-gather: (⌈log₂ p⌉ + p − 1)·α + 2(p−1)/p·n·β (Thakur et al., 2005).
    """
    if ranks == 1:
        return 0.0
    tree = _log2_ceil(ranks) * point_to_point_seconds(size_bytes, link)
    steps = _log2_ceil(ranks) + ranks - 1
    moved_bytes = 2 * (ranks - 1) / ranks * size_bytes
    return min(tree, steps * link.latency_seconds + moved_bytes / link.bandwidth_bytes_per_second)


def parameter_server_seconds(size_bytes: float, workers: int, link: Connection) -> float:
    """Return 2α + 2(p−1)·n·β: one of p workers is the server; all push to it, it sums, all pull, over its link."""
    if workers == 1:
        return 0.0
    return 2 * link.latency_seconds + 2 * (workers - 1) * size_bytes / link.bandwidth_bytes_per_second


# --------------------------------------------------------------------------------------------------
# Counts that do not depend on the machine. L layer partitions, F feature partitions, fully connected layers, one
# message per pair of partitions, per iteration (forward and backward).


def layer_wise_messages(layers: int) -> int:
    """Return 2(L−1): each of the L−1 cuts carries one activation forward and one gradient back."""
    return 2 * (layers - 1)


def feature_wise_messages(layers: int, features: int) -> int:
    """Return 2(L−1)·F(F−1): between two layers every feature partition sends to the F−1 others, both ways."""
    return 2 * (layers - 1) * features * (features - 1)


def hybrid_messages(layers: int, features: int) -> int:
    """Return 2(L−1)·F²: every partition of a layer is on another device than all F of the next."""
    return 2 * (layers - 1) * features**2


def parameter_server_elements(elements: int, workers: int) -> int:
    """Return N(P−1): elements through the server's link, in each direction, to all-reduce N elements over P workers."""
    return elements * (workers - 1)


def ring_elements(elements: int, workers: int) -> float:
    """Return 2(N/P)(P−1): elements through each link of a ring to all-reduce N elements over P workers."""
    return 2 * elements / workers * (workers - 1)


def bubble_fraction(stages: int, microbatches: int, chunks: int = 1) -> float:
    """Return the idle share of a pipeline: (p−1)/(v·m + p−1) of p equal stages, m micro-batches, v interleaved chunks.

    GPipe and 1F1B have v = 1 (Huang et al. 2019; Narayanan et al. 2021).
    """
    return (stages - 1) / (chunks * microbatches + stages - 1)


# --------------------------------------------------------------------------------------------------
# Plain data parallelism on a cluster.


class DeviceOnNode(Protocol):
    """A rank's place."""

    @property
    def node(self) -> int: ...


class Machine(Protocol):
    """The part of ``cost_models.cluster.ClusterSpec`` that is read here."""

    @property
    def world_size(self) -> int: ...
    @property
    def devices(self) -> Sequence[DeviceOnNode]: ...
    @property
    def links(self) -> Mapping[str, Link]: ...
    def path(self, a: int, b: int, /) -> Path: ...


def data_parallel_seconds(gradient_bytes: float, machine: Machine) -> float:
    """Return the seconds to all-reduce ``gradient_bytes`` over all ranks, by the faster of ring and hierarchy.

    The sum begins after the last backward. One ring through the ranks in order; or a ring inside each node and, at the same
    time for each place in a node, a ring across nodes (only when all nodes have equally many ranks). Rings that share links
    share their bandwidth.
    """
    ranks = list(range(machine.world_size))
    if len(ranks) == 1:
        return 0.0
    seconds = ring_all_reduce_seconds(gradient_bytes, len(ranks), slowest_hop([ranks], machine))
    nodes: dict[int, list[int]] = {}
    for rank in ranks:
        nodes.setdefault(machine.devices[rank].node, []).append(rank)
    per_node = {len(members) for members in nodes.values()}
    if len(nodes) > 1 and len(per_node) == 1 and per_node != {1}:
        across = [list(column) for column in zip(*nodes.values(), strict=True)]
        hierarchy = hierarchical_all_reduce_seconds(
            gradient_bytes,
            len(across),
            len(nodes),
            slowest_hop(list(nodes.values()), machine),
            slowest_hop(across, machine),
        )
        seconds = min(seconds, hierarchy)
    return seconds


def slowest_hop(rings: Sequence[Sequence[int]], machine: Machine) -> AlphaBeta:
    """Find the hop that paces the rings while all of them run: largest latency, smallest fair share of bandwidth."""
    paths = [machine.path(a, b) for ring in rings for a, b in zip(ring, [*ring[1:], ring[0]], strict=True)]
    return AlphaBeta(max(path.latency_seconds for path in paths), min(fair_rates(paths, machine.links)))


def _log2_ceil(ranks: int) -> int:
    return (ranks - 1).bit_length()
