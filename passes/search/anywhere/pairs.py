"""Pairs of devices: the busiest shares what it has with one other anew, at best, by an integer program; all else stays."""

from __future__ import annotations

import time

import numpy as np

from passes.search.anywhere.problem import Home, PlacementProblem, evaluate
from passes.search.anywhere.program import PROGRAM_SECONDS, program_terms, solve_program

LEAST_GAIN = 1e-9
"""Relative gain below which rounding made it."""
MOST_FREED = 160
"""Units of two devices that a program places anew."""
MOST_TERMS = 60_000
"""Nonzeros beyond which building and presolving a program takes longer than it may."""


def divided(problem: PlacementProblem, home: Home, deadline: float) -> Home:
    """Improve ``home``: the busiest device shares with each other one, as long as that helps."""
    best, loads = home, evaluate(problem, home)
    improved = problem.devices > 1
    while improved:
        improved = False
        over = loads.memory_bytes - problem.capacity_bytes
        busiest = int(np.argmax(over if loads.overflow_bytes else loads.seconds))
        for other in np.argsort(loads.seconds, kind="stable").tolist():
            left = deadline - time.perf_counter()
            if left <= 0:
                return best
            if other == busiest:
                continue
            free = _freed(problem, best, (busiest, other))
            if len(free) < 2 or program_terms(problem, free) > MOST_TERMS:
                continue
            value = loads.objective_seconds * (10.0 if loads.overflow_bytes else 1.0)
            answer = solve_program(
                problem,
                best,
                value,
                free=free,
                devices=(busiest, other),
                limit_seconds=min(left, PROGRAM_SECONDS),
            )
            if answer.home is None:
                continue
            changed = evaluate(problem, answer.home)
            if (changed.overflow_bytes, changed.objective_seconds) < (
                loads.overflow_bytes,
                loads.objective_seconds * (1 - LEAST_GAIN),
            ):
                best, loads, improved = answer.home, changed, True
                break
    return best


def _freed(problem: PlacementProblem, home: Home, pair: tuple[int, int]) -> list[int]:
    """Choose units of the pair: those at borders, then their neighbours, up to ``MOST_FREED``."""
    there = [u for u in range(problem.units) if home[u] in pair]
    if len(there) <= MOST_FREED:
        return there
    edge = [u for u in problem.borders(home) if home[u] in pair] or there
    free = dict.fromkeys(edge[:MOST_FREED])
    queue = list(free)
    for u in queue:
        for v in problem.neighbours[u]:
            if len(free) >= MOST_FREED:
                return list(free)
            if v not in free and home[v] in pair:
                free[v] = None
                queue.append(v)
    return list(free)
