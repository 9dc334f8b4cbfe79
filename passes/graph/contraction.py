"""Coarsening: thousands of ops become a few hundred units that a search may cut between.

Two ways, on plain arrays (ops 0 … n-1 in a topological order):

    intervals   runs of the order between promising cuts: positions where few bytes cross, compared with other
                positions within a small amount of work. Getitems, views and other weightless ops thus stay with a
                neighbour, and identical blocks are cut at identical places because the comparison is local
    clusters    a smaller DAG that keeps its branches (towers, parallel paths, long skips), from which downsets
                are listed

An op merges into its only producer, or into its only consumer: that never closes a cycle.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from cost_models.arrays import FloatArray

PLATEAU = 0.25
"""Equal positions closer than this part of the window count as one (empirically: it only thins out runs of tiny ops)."""


@dataclass(frozen=True, eq=False)
class OpArrays:
    """The arrays of a graph that coarsening reads. Shapes: [n ops]."""

    readers: tuple[tuple[int, ...], ...]
    """Ops that read the op's result."""
    work: FloatArray
    """Seconds, or anything proportional to them."""
    crossing_bytes: FloatArray
    """Bytes that a cut between the op and a reader moves, forward and backward."""
    together: tuple[tuple[int, ...], ...] = ()
    """Groups of ops that no cut may separate."""
    pins: Mapping[int, int] = field(default_factory=dict)
    """Op to stage; differently pinned ops are never put together."""

    def __len__(self) -> int:
        return len(self.readers)


def intervals(ops: OpArrays, max_units: int = 480) -> tuple[int, ...]:
    """Number the unit of each op: at most about ``max_units`` intervals of the order, numbered along it."""
    n = len(ops)
    if n == 0:
        return ()
    crossing = _crossing(ops)
    allowed = np.ones(n + 1, dtype=bool)
    for group in ops.together:
        allowed[min(group) + 1 : max(group) + 1] = False
    forced = _forced(ops, crossing, allowed)
    done = np.concatenate([[0.0], np.cumsum(ops.work)])
    window = float(done[-1]) / max(1, max_units)
    while True:
        cuts = sorted({*_local_minima(crossing, done, allowed, window), *forced})
        if len(cuts) < max_units or window >= done[-1]:
            break
        window *= 1.3
    unit_of = np.zeros(n, dtype=np.int64)
    unit_of[[cut for cut in cuts if 0 < cut < n]] = 1
    return tuple(np.cumsum(unit_of).tolist())


def _crossing(ops: OpArrays) -> FloatArray:
    """Return the bytes that cross a cut before each op, and behind the last: [n + 1]."""
    n = len(ops)
    difference = np.zeros(n + 2)
    for index, readers in enumerate(ops.readers):
        last = max(readers, default=index)
        difference[index + 1] += ops.crossing_bytes[index]
        difference[last + 1] -= ops.crossing_bytes[index]
    total: FloatArray = np.cumsum(difference)[: n + 1]
    return total


def _forced(ops: OpArrays, crossing: FloatArray, allowed: NDArray[np.bool_]) -> list[int]:
    """Choose the narrowest allowed position between any two neighbours in the order that are pinned to different stages."""
    cuts = []
    pinned = sorted(ops.pins)
    for left, right in itertools.pairwise(pinned):
        if ops.pins[left] != ops.pins[right]:
            positions = [i for i in range(left + 1, right + 1) if allowed[i]]
            if positions:
                cuts.append(min(positions, key=lambda i: (float(crossing[i]), i)))
    return cuts


def _local_minima(
    crossing: FloatArray, done: FloatArray, allowed: NDArray[np.bool_], window: float
) -> list[int]:
    """Find positions that no other within half a window of work undercuts; of equal ones close together, the first."""
    allowed[-1] = (
        True  # nothing crosses the end: it undercuts what is just before it, as the next block would
    )
    positions = np.flatnonzero(allowed)[1:]
    kept: list[int] = []
    place, value = done[positions], crossing[positions]
    lo = np.searchsorted(place, place - window / 2, side="left")
    hi = np.searchsorted(place, place + window / 2, side="right")
    for index, position in enumerate(positions[:-1].tolist()):
        if value[lo[index] : hi[index]].min() < value[index] * (1 - 1e-9):
            continue
        if kept and done[position] - done[kept[-1]] < window * PLATEAU:
            if crossing[position] < crossing[kept[-1]]:
                kept[-1] = position
            continue
        kept.append(position)
    return kept


def clusters(ops: OpArrays, max_units: int = 32) -> tuple[int, ...]:
    """Number the unit of each op in a coarser DAG of about ``max_units`` units, in a topological order."""
    graph = _Contraction(ops)
    graph.unite(ops.together)
    share = float(ops.work.sum()) / max(1, max_units)
    graph.merge_chains(share)
    while len(graph) > max_units and share < float(ops.work.sum()):
        share *= 1.5
        graph.merge_chains(share)
    return graph.numbering()


def united(readers: tuple[tuple[int, ...], ...], together: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Number the unit of each op in a topological order: a group in ``together`` and all between its ops is one unit."""
    nothing = np.zeros(len(readers))
    graph = _Contraction(OpArrays(readers, nothing, nothing))
    graph.unite(together)
    return graph.numbering()


class _Contraction:
    """A DAG under contraction: representatives with their producers, consumers, work and pin."""

    def __init__(self, ops: OpArrays) -> None:
        n = len(ops)
        self.parent = list(range(n))
        self.work = ops.work.tolist()
        self.pin: dict[int, int] = dict(ops.pins)
        self.below: dict[int, set[int]] = {u: set(ops.readers[u]) for u in range(n)}
        self.above: dict[int, set[int]] = {u: set() for u in range(n)}
        for u, readers in self.below.items():
            for v in readers:
                self.above[v].add(u)

    def __len__(self) -> int:
        return len(self.above)

    def find(self, u: int) -> int:
        while self.parent[u] != u:
            self.parent[u] = self.parent[self.parent[u]]
            u = self.parent[u]
        return u

    def unite(self, groups: Iterable[Sequence[int]]) -> None:
        """Merge each group with everything on a path between its members.

        Edges both ways between the members of a group make such a path a cycle: the strong components are the finest
        units that keep every group whole and still form a DAG, also where one group lies on a path of another.
        """
        edges: nx.DiGraph[int] = nx.DiGraph()
        for group in groups:
            for u, v in itertools.pairwise(group):
                edges.add_edges_from(((u, v), (v, u)))
        if edges:
            edges.add_edges_from((u, v) for u, readers in self.below.items() for v in readers)
        for component in nx.strongly_connected_components(edges):
            first, *rest = sorted(component)
            for other in rest:
                self._merge(first, other)

    def merge_chains(self, share: float) -> None:
        """Merge along edges whose ends have no other way, the lightest pairs first, up to ``share`` of work each."""
        heap: list[tuple[float, int, int]] = []

        def offer(u: int) -> None:
            for a, b in [(u, v) for v in self.below[u]] + [(v, u) for v in self.above[u]]:
                if self._mergeable(a, b, share):
                    heapq.heappush(heap, (self.work[a] + self.work[b], a, b))

        for u in sorted(self.above):
            offer(u)
        while heap:
            weight, a, b = heapq.heappop(heap)
            if a not in self.above or b not in self.above or weight != self.work[a] + self.work[b]:
                continue
            if b in self.below[a] and self._mergeable(a, b, share):
                self._merge(a, b)
                offer(a)

    def _mergeable(self, a: int, b: int, share: float) -> bool:
        if self.work[a] + self.work[b] > share and min(self.work[a], self.work[b]) > 0.0:
            return False
        pins = {self.pin[u] for u in (a, b) if u in self.pin}
        return len(pins) < 2 and (len(self.above[b]) == 1 or len(self.below[a]) == 1)

    def _merge(self, a: int, b: int) -> None:
        """Let ``b`` disappear into ``a``."""
        for v in self.below[b]:
            self.above[v].discard(b)
            self.above[v].add(a)
        for v in self.above[b]:
            self.below[v].discard(b)
            self.below[v].add(a)
        self.below[a] = (self.below[a] | self.below.pop(b)) - {a, b}
        self.above[a] = (self.above[a] | self.above.pop(b)) - {a, b}
        self.work[a] += self.work[b]
        if b in self.pin:
            self.pin[a] = self.pin.pop(b)
        self.parent[b] = a

    def numbering(self) -> tuple[int, ...]:
        """Number the unit of each op; among units that are ready, the one with the earliest op comes first."""
        first: dict[int, int] = {}
        for op in range(len(self.parent)):
            first.setdefault(self.find(op), op)
        waiting = {u: len(producers) for u, producers in self.above.items()}
        ready = [(first[u], u) for u, count in waiting.items() if count == 0]
        heapq.heapify(ready)
        number: dict[int, int] = {}
        while ready:
            _, u = heapq.heappop(ready)
            number[u] = len(number)
            for v in self.below[u]:
                waiting[v] -= 1
                if waiting[v] == 0:
                    heapq.heappush(ready, (first[v], v))
        return tuple(number[self.find(op)] for op in range(len(self.parent)))


def list_downsets(units: int, edges: Iterable[tuple[int, int]], limit: int) -> tuple[int, ...] | None:
    """List every downset of the DAG as a bit mask, smallest first; None if there are more than ``limit``."""
    before = [0] * units
    after: list[list[int]] = [[] for _ in range(units)]
    for u, v in set(edges):
        before[v] |= 1 << u
        after[u].append(v)
    found = grow_downsets(before, after, limit)
    return None if found is None else tuple(sorted(found, key=lambda mask: (mask.bit_count(), mask)))


def grow_downsets(before: Sequence[int], after: Sequence[Sequence[int]], limit: int) -> list[int] | None:
    """List every downset, those with fewer units first; None if there are more than ``limit``.

    ``before`` has a bit mask of predecessors for every unit, ``after`` its successors. Each downset grows by each unit that
    may be added; which ones may is kept from the smaller downset. Time: O(downsets · width).
    """
    first = [unit for unit, needs in enumerate(before) if not needs]
    layer: dict[int, list[int]] = {0: first}
    found = [0]
    while layer:
        grown: dict[int, list[int]] = {}
        for mask, addable in layer.items():
            for unit in addable:
                larger = mask | 1 << unit
                if larger not in grown:
                    grown[larger] = [other for other in addable if other != unit] + [
                        reader for reader in after[unit] if before[reader] & larger == before[reader]
                    ]
        found += grown
        if len(found) > limit:
            return None
        layer = grown
    return found
