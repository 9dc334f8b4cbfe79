"""Two devices: the busiest one's least load, bounded and nearly found by minimum s–t cuts.

Both ends pay for a message, so with W the work of a device and C what crosses, loads are W0 + C and W1 + C, and for any
weight λ in [0, 1]

    S = max(W0 + C, W1 + C)  ≥  λ·W0 + (1 - λ)·W1 + C

whose right side is a minimum cut: a unit on device 0 pays λ·seconds[0, u] (arc to the sink), on device 1
(1 - λ)·seconds[1, u] (arc from the source), a net pays once if not all of its units are on one side (two nodes with an
arc of the net's weight between them). Stone 1977, "Multiprocessor scheduling with the aid of network flow algorithms".
The best λ is looked for with cutting planes: every cut's loads are a line above the concave function of λ
(Lagrangian dual; Fisher 1981). The bound is proved, the cuts on the way are placements. Memory is left out.

Capacities are rounded down to whole numbers, so a rounded cut is never above the real one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from passes.search.free.problem import FreeProblem, evaluate
from passes.search.free.tuning import DEFAULT

SCALE = 1 << 44
"""Whole numbers per largest capacity: rounding costs 1e-13 of it per arc."""
FIRST_WEIGHTS = (0.5, 0.02, 0.98)
CLOSE = 1e-7
"""Relative distance between the cutting planes and the best cut at which λ is known."""


@dataclass
class Cuts:
    """Result of minimum cuts between two devices. ``homes``: placements of all units, later ones closer to balance."""

    bound_seconds: float = 0.0
    homes: list[tuple[int, ...]] = field(default_factory=list)


def minimum_cuts(
    problem: FreeProblem,
    deadline: float,
    *,
    pair: tuple[int, int] = (0, 1),
    home: Sequence[int] | None = None,
    most: int = DEFAULT.most_cuts,
) -> Cuts:
    """Divide the units of a pair of devices anew; all others stay where they are.

    With two devices in all, ``bound_seconds`` holds for every placement; otherwise it is 0: what crosses to further
    devices is charged as if each net had that one reader.
    """
    first, second = pair
    network = _Pair(problem, first, second, home)
    cuts = Cuts()
    lines: list[tuple[float, float]] = []
    whole = problem.devices == 2
    for number in range(most):
        if number < len(FIRST_WEIGHTS):
            weight = FIRST_WEIGHTS[number]
        else:
            weight, ceiling = _highest(lines)
            if whole and ceiling <= cuts.bound_seconds * (1 + CLOSE):
                break
        side, bound = network.cut(weight)
        found = network.placement(side)
        loads = evaluate(problem, found).seconds
        line = float(loads[first]), float(loads[second])
        if whole:
            cuts.bound_seconds = max(cuts.bound_seconds, bound)
        known = line in lines
        if not known:
            cuts.homes.append(found)
            lines.append(line)
        if (known and number >= len(FIRST_WEIGHTS)) or time.perf_counter() > deadline:
            break
    return cuts


def _highest(lines: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return (λ, value) where the least of the lines λ·a + (1 - λ)·b is highest: at an end or where two lines meet."""
    candidates = [0.0, 1.0]
    for i, (a, b) in enumerate(lines):
        for c, d in lines[:i]:
            slope = (a - b) - (c - d)
            if slope:
                candidates.append((d - b) / slope)
    best = max((min(x * a + (1 - x) * b for a, b in lines), x) for x in candidates if 0.0 <= x <= 1.0)
    return best[1], best[0]


class _Pair:
    """Flow networks of the units of two devices."""

    def __init__(self, problem: FreeProblem, first: int, second: int, home: Sequence[int] | None) -> None:
        self.problem, self.first, self.second = problem, first, second
        self.home = list(home) if home is not None else [first] * problem.units
        pair = (first, second)
        units = [u for u in range(problem.units) if self.home[u] in pair]
        if home is None:
            units = list(range(problem.units))
        self.node = {u: i for i, u in enumerate(units)}
        self.units = units
        self.outside = {d: np.zeros(len(units)) for d in pair}
        """Seconds of messages with further devices, per unit, were it on either of the pair."""
        self.nets = self._nets()
        self.constant = np.zeros((2, len(problem.ties)))
        for row, d in enumerate(pair):
            self.constant[row] = problem.tie_seconds[d] if len(problem.ties) else 0.0
        work = problem.seconds[list(pair)][:, units]
        biggest = max([float(work.max(initial=0.0)), *(w for w, _ in self.nets)], default=0.0)
        outside = max(float(x.max(initial=0.0)) for x in self.outside.values())
        self.scale = SCALE / max(biggest, outside, 1e-300)
        self.forbidden = SCALE * (4 * len(units) + 4 * len(self.nets) + 4)

    def _nets(self) -> list[tuple[float, tuple[int, ...]]]:
        """Return (seconds, nodes) of every net and tie that may cross between the two devices."""
        problem, node, found = self.problem, self.node, []
        for e, net in enumerate(problem.nets):
            inside = [node[u] for u in (net.producer, *net.readers) if u in node]
            far = {self.home[u] for u in (net.producer, *net.readers) if u not in node}
            if net.producer in node:
                for device in far:
                    self._outside(e, node[net.producer], device)
            elif inside:
                (device,) = {self.home[net.producer]}
                for reader in inside:
                    self._outside(e, reader, device, share=1.0 / len(inside))
            if len(inside) > 1 and net.producer in node:
                found.append((problem.pair_seconds(e, self.first, self.second), tuple(inside)))
        for tie, members in enumerate(problem.ties):
            inside = [node[u] for u in members if u in node]
            if len(inside) > 1:
                found.append((problem.sum_seconds(tie, [self.first, self.second]), tuple(inside)))
        return [(seconds, nodes) for seconds, nodes in found if seconds > 0]

    def _outside(self, net: int, node: int, device: int, share: float = 1.0) -> None:
        """Charge a message between ``node`` and a further device to ``node``, on either of the pair."""
        for mine in (self.first, self.second):
            self.outside[mine][node] += share * self.problem.pair_seconds(net, mine, device)

    def cut(self, weight: float) -> tuple[list[bool], float]:
        """Return (True for each unit on the first device, the cut's value rounded down) for λ = ``weight``."""
        problem, count = self.problem, len(self.units)
        source, sink = count, count + 1
        network = FlowNetwork(count + 2 + 2 * len(self.nets))
        for node, u in enumerate(self.units):
            for device, share, on_first in ((self.first, weight, True), (self.second, 1 - weight, False)):
                seconds = float(problem.seconds[device, u] + self.outside[device][node])
                capacity = int(share * seconds * self.scale)
                if not problem.allowed[device, u]:
                    capacity = self.forbidden
                if on_first:
                    network.add(node, sink, capacity)
                else:
                    network.add(source, node, capacity)
        for index, (seconds, nodes) in enumerate(self.nets):
            capacity = int(seconds * self.scale)
            if len(nodes) == 2:
                network.add(nodes[0], nodes[1], capacity, back=capacity)
                continue
            into, out = count + 2 + 2 * index, count + 3 + 2 * index
            network.add(into, out, capacity)
            for node in nodes:
                network.add(node, into, self.forbidden)
                network.add(out, node, self.forbidden)
        flow = network.maximum_flow(source, sink)
        shares = np.array([weight, 1 - weight])
        held = float((shares[:, None] * self.constant).min(axis=0).sum())
        return network.source_side(source)[:count], flow / self.scale * (1 - 1e-12) + held

    def placement(self, side: Sequence[bool]) -> tuple[int, ...]:
        """Return the whole placement with the pair's units as the cut has them."""
        home = self.home.copy()
        for u, on_first in zip(self.units, side, strict=True):
            home[u] = self.first if on_first else self.second
        return tuple(home)


class FlowNetwork:
    """A directed graph with whole-number capacities: its maximum flow, its minimum s–t cut.

    Arc i and its reverse are 2i and 2i + 1.

    Dinic's algorithm: Dinic 1970, "Algorithm for solution of a problem of maximum flow in networks with power estimation";
    shortest augmenting paths by levels, O(V² E), on graphs of models near linear. Integers have no limit here, so a scaled
    problem is solved exactly. Why not a library: on 1,500 nodes with 40-bit capacities this takes 0.09 s; networkx takes
    0.49 s by preflow-push, 4.6 s by Boykov–Kolmogorov and 57 s by its own Dinic, and scipy's flow is limited to 32 bits.
    """

    def __init__(self, nodes: int) -> None:
        self.arcs_of: list[list[int]] = [[] for _ in range(nodes)]
        self.head: list[int] = []
        self.left: list[int] = []

    def add(self, source: int, target: int, capacity: int, back: int = 0) -> None:
        """An arc, with ``back`` as the capacity against its direction."""
        self.arcs_of[source].append(len(self.head))
        self.arcs_of[target].append(len(self.head) + 1)
        self.head += [target, source]
        self.left += [capacity, back]

    def maximum_flow(self, source: int, sink: int) -> int:
        """Push as much as possible; :meth:`source_side` then is a minimum cut."""
        total = 0
        while True:
            level = self._levels(source, sink)
            if level[sink] < 0:
                return total
            total += self._blocking_flow(source, sink, level)

    def source_side(self, source: int) -> list[bool]:
        """Nodes that the source still reaches: the smallest minimum cut."""
        return [depth >= 0 for depth in self._levels(source, -1)]

    def _levels(self, source: int, sink: int) -> list[int]:
        level = [-1] * len(self.arcs_of)
        level[source] = 0
        layer = [source]
        head, left, arcs_of = self.head, self.left, self.arcs_of
        while layer:
            following = []
            for node in layer:
                depth = level[node] + 1
                for arc in arcs_of[node]:
                    if left[arc] > 0 and level[head[arc]] < 0:
                        level[head[arc]] = depth
                        following.append(head[arc])
            if sink >= 0 and level[sink] >= 0:
                break
            layer = following
        return level

    def _blocking_flow(self, source: int, sink: int, level: list[int]) -> int:
        """Augment along the level graph until no path is left; depth first, without recursion."""
        head, left, arcs_of = self.head, self.left, self.arcs_of
        place = [0] * len(arcs_of)
        path: list[int] = []
        total, node = 0, source
        while True:
            if node == sink:
                pushed = min(left[arc] for arc in path)
                total += pushed
                first_full = len(path)
                for index, arc in enumerate(path):
                    left[arc] -= pushed
                    left[arc ^ 1] += pushed
                    if left[arc] == 0 and index < first_full:
                        first_full = index
                node = head[path[first_full] ^ 1]
                del path[first_full:]
                continue
            arcs, depth = arcs_of[node], level[node] + 1
            while place[node] < len(arcs):
                arc = arcs[place[node]]
                if left[arc] > 0 and level[head[arc]] == depth:
                    break
                place[node] += 1
            if place[node] < len(arcs):
                path.append(arcs[place[node]])
                node = head[path[-1]]
            elif node == source:
                return total
            else:
                level[node] = -1
                node = head[path.pop() ^ 1]
                place[node] += 1
