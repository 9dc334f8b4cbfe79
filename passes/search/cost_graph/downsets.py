"""Downsets (ideals) of the order between groups: the cuts that contiguous placements are made of.

A set of groups is a downset if it holds whatever comes before its members. Devices of a contiguous placement, in the order
of the quotient, fill the graph downset by downset. A downset is a Python int with bit g for group g.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from passes.graph.contraction import grow_downsets
from passes.search.cost_graph.groups import GroupProblem


class Order:
    """Predecessors and successors of every group, as bits."""

    def __init__(self, problem: GroupProblem) -> None:
        self.count = problem.count
        self.before = [0] * self.count
        self.after: list[list[int]] = [[] for _ in range(self.count)]
        for g, h in problem.order:
            self.before[h] |= 1 << g
            self.after[g].append(h)
        self.full = (1 << self.count) - 1

    def addable(self, downset: int) -> list[int]:
        """List groups that make a downset again when they are added."""
        return [
            g
            for g in range(self.count)
            if not downset >> g & 1 and self.before[g] & downset == self.before[g]
        ]

    def removable(self, downset: int) -> list[int]:
        """List groups that leave a downset when they are taken away."""
        return [
            g
            for g in range(self.count)
            if downset >> g & 1 and not any(downset >> h & 1 for h in self.after[g])
        ]

    def all_downsets(self, most: int) -> list[int] | None:
        """List every downset, smaller ones first; None if there are more than ``most``."""
        return grow_downsets(self.before, self.after, most)

    def linear(self, key: Callable[[int], tuple[float, ...]]) -> list[int]:
        """Return the topological order that takes the smallest key first."""
        waiting = [self.before[h].bit_count() for h in range(self.count)]
        ready = [(key(g), g) for g in range(self.count) if not waiting[g]]
        heapq.heapify(ready)
        found = []
        while ready:
            _, g = heapq.heappop(ready)
            found.append(g)
            for h in self.after[g]:
                waiting[h] -= 1
                if not waiting[h]:
                    heapq.heappush(ready, (key(h), h))
        return found


def prefixes(linear: Sequence[int]) -> list[int]:
    """List the downsets along a topological order."""
    found = [0]
    for g in linear:
        found.append(found[-1] | 1 << g)
    return found


def linear_orders(problem: GroupProblem, order: Order) -> list[list[int]]:
    """List topological orders whose prefixes make good cuts: as written, deep first, broad first, least to send."""
    depth = [0] * order.count
    height = [0] * order.count
    written = order.linear(lambda g: (problem.members[g][0],))
    for g in written:
        for h in order.after[g]:
            depth[h] = max(depth[h], depth[g] + 1)
    for g in reversed(written):
        for h in order.after[g]:
            height[g] = max(height[g], height[h] + 1)
    orders = [
        written,
        order.linear(lambda g: (depth[g], g)),
        order.linear(lambda g: (-height[g], g)),
        order.linear(lambda g: (-depth[g], g)),
        _least_sent(problem, order),
    ]
    return list({tuple(found): found for found in orders}.values())


def _least_sent(problem: GroupProblem, order: Order) -> list[int]:
    """Take next the group after which the prefix has least to send to the rest; of equals, the last made ready."""
    held = [0] * len(problem.nets)
    waiting = [order.before[h].bit_count() for h in range(order.count)]
    ready = {g: 0 for g in range(order.count) if not waiting[g]}
    found: list[int] = []
    while ready:
        g = min(ready, key=lambda g: (problem.growth(g, held), -ready[g]))
        del ready[g]
        found.append(g)
        for e in problem.nets_of[g]:
            held[e] += 1
        for h in order.after[g]:
            waiting[h] -= 1
            if not waiting[h]:
                ready[h] = len(found)
    return found


def membership(downsets: Sequence[int], count: int) -> NDArray[np.bool_]:
    """Return [downsets, groups]: True where the group is in the downset."""
    width = max(1, (count + 7) // 8)
    packed = np.frombuffer(b"".join(d.to_bytes(width, "little") for d in downsets), dtype=np.uint8)
    return np.unpackbits(packed.reshape(len(downsets), width), axis=1, count=count, bitorder="little").astype(
        bool
    )
