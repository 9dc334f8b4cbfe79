"""Seconds of collectives between GPUs, as NCCL runs them.

Symbols, beside those of ``cost_models.communication``
    g   ranks of each node, k nodes, p = g·k
    α₁ β₁   inside a node; α₂, β₂ what one of g rings has between nodes
    s   seconds in which the kernels of a collective start and meet
    m   seconds in which the bytes move, were all links busy from the first moment to the last

    t = a + m + √(a·m)     a = s + steps·α

The root is what fills and drains: a tensor goes in pieces, a step can pass a piece on only when it has it, and fewer pieces
waste links where more waste latency. The best number of pieces leaves 2·√(a·m) (Sanders, Speck, Träff 2009); with pieces
already spread over ranks and channels half of it is measured. NCCL's own model corrects these sizes by a table.

    ring            a = s + f·((p−k)·α₁ + (k−1)·α₂)         m = f·(p−1)/p·n·max(β₁, β₂/g)    f = 2 for an all-reduce, else 1
    trees           a = s + 2·(⌈log₂ g⌉·α₁ + ⌈log₂ k⌉·α₂)   m = n·max(2·β₁, h·β₂/g)          h = 0, 1, 2 for k = 1, 2, more
    in the switch   a = s + S + 2·⌈log₂ k⌉·α₂               m = n·max(1/R, h·β₂/g)

A ring passes every node once, and g rings begin at g ranks: together they have all cards of a node. Two trees, each for
half of the tensor, send n bytes between two nodes and up to 2·n between more. All-gather and reduce-scatter have rings
alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cost_models.communication import AlphaBeta

START_SECONDS = 8.4e-6
"""s: ``baseLat`` of rings with the simple protocol in NVIDIA/nccl src/graph/tuning.cc."""
SWITCH_SECONDS = 25e-6
"""S, what an all-reduce in the switch starts later: fitted on the H200 and H100 of ``benchmarks/data/collectives.csv``."""
DEVICES_IN_NETWORK = 5
"""Devices of a node from which on the switch sums: with two to four it is as fast as a ring (NVIDIA/nccl issue 1455)."""


def _levels(ranks: int) -> int:
    """Return ⌈log₂ ranks⌉."""
    return (ranks - 1).bit_length()


def filled_seconds(start: float, moving: float) -> float:
    """Return a + m + √(a·m). The root's factor of 1 is fitted on all rows of ``benchmarks/data/collectives.csv``."""
    return start + moving + math.sqrt(start * moving)


@dataclass(frozen=True)
class GpuLinks:
    """The links of a group of GPUs, equally many in each of its nodes. ``between``: what one of g rings has."""

    per_node: int
    nodes: int
    inside: AlphaBeta | None = None
    between: AlphaBeta | None = None
    in_network_bytes_per_second: float = 0.0
    """R, at which a node's switch sums; 0 where it does not."""

    @property
    def size(self) -> int:
        return self.per_node * self.nodes

    def ring_seconds(self, size_bytes: float, passes: int = 1) -> float:
        """Return the seconds of an all-gather or reduce-scatter; of an all-reduce with two passes."""
        hops = (self.size - self.nodes) * self._latency(self.inside) + (self.nodes - 1) * self._latency(
            self.between
        )
        moved = passes * (self.size - 1) / self.size * size_bytes
        return filled_seconds(START_SECONDS + passes * hops, moved * max(self._inside(), self._between()))

    def all_reduce_seconds(self, size_bytes: float) -> float:
        """Return the seconds of the fastest of ring, trees and the switch."""
        across = 2 * _levels(self.nodes) * self._latency(self.between)
        within = 2 * _levels(self.per_node) * self._latency(self.inside)
        sent = min(self.nodes - 1, 2) * size_bytes * self._between()
        ways = [
            self.ring_seconds(size_bytes, passes=2),
            filled_seconds(START_SECONDS + within + across, max(2 * size_bytes * self._inside(), sent)),
        ]
        if self.in_network_bytes_per_second and self.per_node >= DEVICES_IN_NETWORK:
            summing = max(size_bytes / self.in_network_bytes_per_second, sent)
            ways.append(filled_seconds(START_SECONDS + SWITCH_SECONDS + across, summing))
        return min(ways)

    def _inside(self) -> float:
        """Return β₁."""
        return 1.0 / self.inside.bandwidth_bytes_per_second if self.inside else 0.0

    def _between(self) -> float:
        """Return β₂/g."""
        return 1.0 / (self.per_node * self.between.bandwidth_bytes_per_second) if self.between else 0.0

    @staticmethod
    def _latency(link: AlphaBeta | None) -> float:
        return link.latency_seconds if link else 0.0
