"""Intervals of predictions: how far measured steps and peaks were from predicted ones, by kind of plan.

    measured = predicted · exp(center + scale · t)          t: Student's t with ``freedom`` degrees of freedom

    STEP_SECONDS["data parallel", "named stack"].interval(0.584)            0.9 of such runs take 0.52 to 0.67 s
    PEAK_BYTES["cuda"].chance_above(71 * GIB, limit=78.5 * GIB)             0.03

The spreads themselves are data, fitted on measured runs by ``python -m benchmarks.intervals``: ``cost_models.spreads``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

PlanKind: TypeAlias = Literal["one device", "data parallel", "pipeline", "sharded"]
"""The kinds of plans that err alike. ``data parallel``: each device runs the whole model, ZeRO or not; ``pipeline``: stages
of one device each; ``sharded``: devices share ops, in one stage or in several."""
RateSource: TypeAlias = Literal["calibrated", "named stack", "presets"]
"""The sources of rates that err alike. ``named stack``: presets, and the software of the run was told; ``presets``: at
large, or numbers of a cluster file."""

KINDS: tuple[PlanKind, ...] = ("one device", "data parallel", "pipeline", "sharded")
RATES: tuple[RateSource, ...] = ("calibrated", "named stack", "presets")
SHARE = 0.9
"""The part of runs that lie in an interval."""

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(64)
"""64 nodes: the integrand is a power of a cosine, smooth; the error is below 1e-12 up to 100 degrees of freedom."""


class Interval(NamedTuple):
    """The range in which a share of runs lie."""

    low: float
    high: float


@dataclass(frozen=True)
class Spread:
    """The distribution of log(measured / predicted) of a further run. ``runs``, ``sources``: measured ones of its kind."""

    center: float
    scale: float
    freedom: float
    runs: int
    sources: int

    def interval(self, predicted: float, share: float = SHARE) -> Interval:
        """Return the range that holds ``share`` of runs, as many above it as below."""
        reach = student_quantile((1 + share) / 2, self.freedom) * self.scale
        return Interval(
            predicted * math.exp(self.center - reach),
            predicted * math.exp(self.center + reach),
        )

    def most_predicted(self, limit: float, chance: float) -> float:
        """Return the prediction of which a run measures more than ``limit`` with probability ``chance``."""
        return limit * math.exp(-(self.center + self.scale * student_quantile(1 - chance, self.freedom)))

    def chance_above(self, predicted: float, limit: float) -> float:
        """Return the probability that a run measures more than ``limit``."""
        if predicted <= 0 or limit <= 0:
            return float(predicted > limit)
        return student_cdf((self.center - math.log(limit / predicted)) / self.scale, self.freedom)


def student_cdf(t: float, freedom: float) -> float:
    """Return the probability that Student's t is at most ``t``, for one degree of freedom or more.

    With x = sqrt(ν) tan θ the density's integral is one of cos^(ν-1) θ over a finite range, at Gauss-Legendre nodes.
    """
    if not freedom >= 1:
        raise ValueError(f"Student's t has 1 degree of freedom or more here, not {freedom}")
    half = math.atan(abs(t) / math.sqrt(freedom)) / 2
    inside = half * float(_WEIGHTS @ np.cos(half * (_NODES + 1)) ** (freedom - 1))
    factor = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    part = min(0.5, factor * inside)
    return 0.5 + math.copysign(part, t)


@cache
def student_quantile(probability: float, freedom: float) -> float:
    """Return what Student's t is below with this probability, by bisection."""
    if not 0 < probability < 1:
        raise ValueError(f"a quantile is of a probability between 0 and 1, not {probability}")
    low, high = -math.pi / 2, math.pi / 2  # of θ, as above
    for _ in range(60):
        middle = (low + high) / 2
        if student_cdf(math.sqrt(freedom) * math.tan(middle), freedom) < probability:
            low = middle
        else:
            high = middle
    return math.sqrt(freedom) * math.tan((low + high) / 2)
