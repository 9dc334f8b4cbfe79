"""Maximum flow and minimum s–t cut with whole-number capacities.

Dinic's algorithm: Dinic 1970, "Algorithm for solution of a problem of maximum flow in networks with power estimation";
shortest augmenting paths by levels, O(V² E), on graphs of models near linear. Integers have no limit here, so a scaled
problem is solved exactly.
"""

from __future__ import annotations


class FlowNetwork:
    """A directed graph with capacities. Arc i and its reverse are 2i and 2i + 1."""

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
