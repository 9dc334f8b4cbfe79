"""What no placement of whole units can beat: bounds on the surrogate, messages left out (they only add).

work     a device is at least as busy as any weighted mean of all: S ≥ Σ_u min_d λ_d·seconds[d, u] for λ ≥ 0, Σ λ = 1.
         The best λ (the dual of the linear relaxation) is looked for by multiplicative weights; any λ is valid
unit     every unit is somewhere: S ≥ min_d seconds[d, u]
cut      two devices: minimum s–t cuts, messages included (``passes.search.free.cut``)
"""

from __future__ import annotations

import math

import numpy as np

from passes.search.bound import Bound, BoundMethod
from passes.search.free.cut import Cuts
from passes.search.free.problem import FloatArray, FreeProblem

STEPS = 300
"""Of multiplicative weights: the best of them is within about 1% of the relaxation's optimum."""


def simple_bound(problem: FreeProblem, cuts: Cuts | None = None) -> Bound:
    """The tightest of the bounds that are cheap: O(K · n) each."""
    open_seconds = np.where(problem.allowed, problem.seconds, math.inf)
    found = [
        Bound(float(open_seconds.min(axis=0).max(initial=0.0)), BoundMethod.LARGEST_UNIT),
        Bound(work_bound(problem), BoundMethod.SHARED_WORK),
    ]
    if cuts is not None and cuts.bound_seconds > 0:
        found.append(Bound(cuts.bound_seconds, BoundMethod.MINIMUM_CUTS))
    return max(found, key=lambda bound: bound.seconds)


def work_bound(problem: FreeProblem, steps: int = STEPS) -> float:
    """The largest of Σ_u min_d λ_d·seconds[d, u] over the λ looked at."""
    seconds = np.where(problem.allowed, problem.seconds, np.inf)
    if len(problem.ties):
        seconds = np.concatenate([seconds, problem.tie_seconds], axis=1)
    fastest = np.where(np.isinf(seconds), 0.0, seconds).sum(axis=1)
    if not (fastest > 0).all() or seconds.shape[1] == 0:
        return float(seconds.min(axis=0).sum()) / problem.devices if seconds.shape[1] else 0.0
    weights = 1.0 / fastest
    best, best_weights = 0.0, weights
    rate = 0.5
    for step in range(steps):
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
    """Weighted work, and the loads where every unit goes to its cheapest devices, ties shared by near equality.

    ``passes.search.bound.weighted_work`` is the same sum, without the choices that it comes from.
    """
    weighted = weights[:, None] * seconds
    least = weighted.min(axis=0)
    chosen = weighted <= least * (1 + 1e-9)
    share = chosen / chosen.sum(axis=0)
    loads = np.where(chosen, seconds, 0.0) * share
    return float(least.sum()), np.asarray(loads.sum(axis=1))
