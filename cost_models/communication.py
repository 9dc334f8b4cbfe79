"""Seconds of communication: the α–β model of messages and collectives.

Symbols
    n   bytes of the whole tensor that is reduced or gathered; for all-to-all, of what each rank holds
    p   ranks
    c   factor by which computing slows down while something is sent (``HostSpec.contention``)
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

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from cost_models.arrays import FloatArray
from cost_models.links import Path, RingRates, least_fair_rate

if TYPE_CHECKING:
    from cost_models.cluster import ClusterSpec  # imports torch, which takes seconds


@dataclass(frozen=True)
class AlphaBeta:
    """A connection by its two numbers."""

    latency_seconds: float
    bandwidth_bytes_per_second: float


Connection: TypeAlias = AlphaBeta | Path


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
    levels = (ranks - 1).bit_length()  # ⌈log₂ p⌉
    return 2 * levels * link.latency_seconds + 2 * size_bytes / link.bandwidth_bytes_per_second


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


def hierarchical_all_to_all_seconds(
    size_bytes: float, ranks_per_node: int, nodes: int, inside: Connection, between: Connection
) -> float:
    """Return max((g−1)·(α₁ + n/p·β₁), α₂ + (p−g)/p·n·β₂), p = g·k, for a hierarchy of nodes.

    Each rank sends 1/p of its n bytes to every other: g − 1 pieces in its own node, pairwise as without a hierarchy, and
    meanwhile p − g to other nodes, over links of their own. Those are all begun at once (an all-to-all is a group of sends
    and receives: NCCL user guide, point-to-point communication), so the way there is waited for once. ``between`` is what
    *one* rank of a node gets, as in ``hierarchical_all_reduce_seconds``.
    """
    ranks = ranks_per_node * nodes
    leaving_bytes = size_bytes * (ranks - ranks_per_node) / ranks
    within = (ranks_per_node - 1) * point_to_point_seconds(size_bytes / ranks, inside)
    return max(within, point_to_point_seconds(leaving_bytes, between) if nodes > 1 else 0.0)


def hidden_seconds(
    sending: float | FloatArray, computing: float | FloatArray, contention: float
) -> FloatArray:
    """Return the seconds less that both take beside each other than one after the other: ``min(computing, sending / c)``.

    While something is sent computing goes on at 1 / c of its speed, so in s seconds it does s / c seconds of work.
    """
    hidden: FloatArray = np.minimum(computing, np.asarray(sending) / contention)
    return hidden


def slowest_hop(rings: Sequence[Sequence[int]], cluster: ClusterSpec) -> AlphaBeta:
    """Find the hop that paces the rings while all of them run: largest latency, smallest fair share of bandwidth.

    Inside machines of which it is known what rings of so many devices reach (``RingRates``), that counts instead.
    """
    latency, rates = 0.0, [math.inf]
    free: list[Path] = []
    known: dict[int, RingRates] = {}
    talking: dict[int, set[int]] = {}
    for ring in rings:
        inside = Counter(cluster.devices[rank].node for rank in ring)
        for a, b in zip(ring, [*ring[1:], ring[0]], strict=True):
            path, node = cluster.path(a, b), cluster.devices[a].node
            latency = max(latency, path.latency_seconds)
            reached = cluster.links[path.links[0]].rings if path.links else None
            if reached is None or inside[node] < reached.fewest:
                free.append(path)
            elif reached.shared:
                known[node] = reached
                talking.setdefault(node, set()).update((a, b))
            else:
                rates.append(reached.reached(inside[node]))
    rates += [known[node].reached(len(ranks)) for node, ranks in talking.items()]
    return AlphaBeta(latency, min(least_fair_rate(free, cluster.links), *rates))
