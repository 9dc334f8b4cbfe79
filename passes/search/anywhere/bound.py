"""Lower bounds on the largest load of every placement of whole units; messages are left out, they only add.

work     a device is at least as busy as any weighted mean of all: S ≥ Σ_u min_d λ_d·seconds[d, u] for λ ≥ 0, Σ λ = 1.
         The best λ (the dual of the linear relaxation) is looked for by multiplicative weights; any λ is valid
unit     every unit is somewhere: S ≥ min_d seconds[d, u]
"""

from __future__ import annotations

import math

import numpy as np

from cost_models.arrays import FloatArray
from passes.search.anywhere.problem import PlacementProblem
from passes.search.bound import Bound, BoundMethod

STEPS = 300
"""Steps towards the weights of the work bound; the best is then within about 1% of the relaxation's optimum."""


def simple_bound(problem: PlacementProblem) -> Bound:
    """Return the tightest of the cheap bounds, O(K · n) each."""
    open_seconds = np.where(problem.allowed, problem.seconds, math.inf)
    return max(
        Bound(float(open_seconds.min(axis=0).max(initial=0.0)), BoundMethod.LARGEST_UNIT),
        Bound(work_bound(problem), BoundMethod.SHARED_WORK),
        key=lambda bound: bound.seconds,
    )


def work_bound(problem: PlacementProblem) -> float:
    """Return the largest Σ_u min_d λ_d·seconds[d, u] of all λ tried, in seconds."""
    seconds = np.where(problem.allowed, problem.seconds, np.inf)
    if len(problem.ties):
        seconds = np.concatenate([seconds, problem.tie_seconds], axis=1)
    fastest = np.where(np.isinf(seconds), 0.0, seconds).sum(axis=1)
    if not (fastest > 0).all() or seconds.shape[1] == 0:
        return float(seconds.min(axis=0).sum()) / problem.devices if seconds.shape[1] else 0.0
    weights = 1.0 / fastest
    best, best_weights = 0.0, weights
    rate = 0.5
    for step in range(STEPS):
        weights = weights / weights.sum()
        value, loads = _relaxed(seconds, weights)
        if value > best:
            best, best_weights = value, weights
        elif step % 10 == 9:
            weights, rate = best_weights, rate / 1.5
        top = float(loads.max()) or 1.0
        weights = weights * np.exp(rate * (loads - loads.mean()) / top)
    return best * (1 - 1e-12)


def _relaxed(seconds: FloatArray, weights: FloatArray) -> tuple[float, FloatArray]:
    """Return Σ_u min_d λ_d·seconds[d, u], and the loads [K] with every unit on its cheapest device.

    A unit that is equally cheap on several devices is shared among them.

    ``passes.search.bound.weighted_work`` is the same sum, without the choices that it comes from.
    """
    weighted = weights[:, None] * seconds
    least = weighted.min(axis=0)
    chosen = weighted <= least * (1 + 1e-9)
    share = chosen / chosen.sum(axis=0)
    loads = np.where(chosen, seconds, 0.0) * share
    return float(least.sum()), np.asarray(loads.sum(axis=1))
