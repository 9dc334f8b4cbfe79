"""Refinement: among placements with as small a largest load, one that sends less; nothing lies apart without a reason.

A search for the largest load alone does not care where things go that make no difference to it. Group by group goes to
a device of one of its neighbours in the graph while the largest load does not rise and (Σ loads, edges between devices)
falls.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from passes.search.cost_graph.graph import PlacementGraph
from passes.search.cost_graph.groups import GroupProblem, group_loads
from passes.search.cost_graph.tuning import TUNING

ROUNDING = 1e-9


class _Refinement:
    def __init__(self, graph: PlacementGraph, problem: GroupProblem, homes: Sequence[int]) -> None:
        self.problem, self.homes = problem, list(homes)
        self.accelerators = problem.machine.accelerators
        self.load = group_loads(problem, homes)
        self.top = max(self.load)
        self.memory = np.bincount(homes, weights=problem.size, minlength=len(self.load)).tolist()
        self.held: list[dict[int, int]] = [{} for _ in problem.nets]
        for e, pins in enumerate(problem.nets):
            for g in pins:
                self.held[e][self.homes[g]] = self.held[e].get(self.homes[g], 0) + 1
        group_of = {v: g for g, nodes in enumerate(problem.members) for v in nodes}
        self.beside: list[dict[int, int]] = [{} for _ in problem.members]
        for u, v in graph.edges:
            g, h = group_of[u], group_of[v]
            if g != h:
                self.beside[g][h] = self.beside[g].get(h, 0) + 1
                self.beside[h][g] = self.beside[h].get(g, 0) + 1

    def cost(self, g: int, device: int) -> float:
        kind = self.problem.accelerator_cost if device < self.accelerators else self.problem.cpu_cost
        return float(kind[g])

    def changes(self, g: int, target: int) -> dict[int, float]:
        """Return the loads that change, and by how much, if ``g`` goes to ``target``."""
        home = self.homes[g]
        found = {home: -self.cost(g, home), target: self.cost(g, target)}
        for e in self.problem.nets_of[g]:
            held, weight = self.held[e], float(self.problem.weight[e])
            leaves, arrives = held[home] == 1, target not in held
            before, after = len(held), len(held) - leaves + arrives
            for device in {*held, target}:
                if device >= self.accelerators:
                    continue
                paid = before > 1 and device in held
                pays = after > 1 and (
                    device == target or (device in held and not (device == home and leaves))
                )
                if paid != pays:
                    found[device] = found.get(device, 0.0) + (weight if pays else -weight)
        return found

    def try_moving(self, g: int, target: int) -> bool:
        """Move ``g`` if that sends less."""
        home, size = self.homes[g], float(self.problem.size[g])
        if target < self.accelerators and self.memory[target] + size > self.problem.machine.memory_size:
            return False
        changes = self.changes(g, target)
        if any(self.load[d] + change > max(self.load[d], self.top) for d, change in changes.items()):
            return False
        total = sum(changes.values())
        crossing = sum(
            count * ((self.homes[h] != target) - (self.homes[h] != home))
            for h, count in self.beside[g].items()
        )
        if total > -ROUNDING * self.top and not (abs(total) <= ROUNDING * self.top and crossing < 0):
            return False
        for device, change in changes.items():
            self.load[device] += change
        for e in self.problem.nets_of[g]:
            held = self.held[e]
            held[home] -= 1
            if not held[home]:
                del held[home]
            held[target] = held.get(target, 0) + 1
        self.memory[home] -= size
        self.memory[target] += size
        self.homes[g] = target
        return True


def refined(graph: PlacementGraph, problem: GroupProblem, homes: Sequence[int]) -> tuple[int, ...]:
    """Find a placement of groups with no larger a largest load that sends less, or return ``homes`` itself."""
    tidy = _Refinement(graph, problem, homes)
    for _ in range(TUNING.refinements):
        moved = False
        for g in range(problem.count):
            for target in sorted({tidy.homes[h] for h in tidy.beside[g]} - {tidy.homes[g]}):
                moved |= target != tidy.homes[g] and tidy.try_moving(g, target)
        if not moved:
            break
    return tuple(tidy.homes)
