"""Refinement: among placements with as small a largest load, one that sends less; nothing lies apart without a reason.

A search for the largest load alone does not care where things go that make no difference to it. Group by group goes to
a device of one of its neighbours in the graph while the largest load does not rise and (Σ loads, edges between devices)
falls.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np

from passes.search.anywhere.placements import PlacementBatch
from passes.search.anywhere.problem import Home
from passes.search.cost_graph.graph import PlacementGraph
from passes.search.cost_graph.groups import GroupProblem

ROUNDING = 1e-9
PASSES = 8
"""Passes over all groups, at most: each ends where nothing moves any more, mostly after two."""


def refined(graph: PlacementGraph, problem: GroupProblem, homes: Home) -> Home:
    """Reduce communication without raising the largest load; return ``homes`` itself where nothing helps."""
    group_of = {v: g for g, nodes in enumerate(problem.members) for v in nodes}
    beside: dict[int, Counter[int]] = defaultdict(Counter)
    for u, v in graph.edges:
        if group_of[u] != group_of[v]:
            beside[group_of[u]][group_of[v]] += 1
            beside[group_of[v]][group_of[u]] += 1
    space = problem.placement
    every = np.arange(space.devices)
    # one placement for each device that a group may go to: all equal until one is chosen for all
    now = PlacementBatch(space, [homes] * space.devices)
    top = float(now.load[0].max())
    for _ in range(PASSES):
        moved = False
        for g in range(problem.count):
            home = int(now.home[g, 0])
            edges = np.zeros(space.devices)
            for h, count in beside[g].items():
                edges[now.home[h, 0]] += count
            trial = now.trial([g], every[None, :])
            sent, crossing = trial.load.sum(axis=1) - now.load[0].sum(), edges[home] - edges
            legal = (trial.load <= np.maximum(now.load[0], top)).all(axis=1) & space.allowed[:, g]
            legal &= (trial.memory <= np.maximum(now.memory[0], space.capacity_bytes)).all(axis=1)
            less = (sent <= -ROUNDING * top) | ((np.abs(sent) <= ROUNDING * top) & (crossing < 0))
            better = np.flatnonzero(legal & less & (edges > 0))
            if len(better):
                target = int(better[np.lexsort((crossing[better], sent[better]))[0]])
                now.accept(trial, every == target)
                now.copy(np.full(space.devices, target), every)
                moved = True
        if not moved:
            break
    return now.homes()[0]
