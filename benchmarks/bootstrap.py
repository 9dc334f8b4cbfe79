"""Medians of paired ratios with bootstrap intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Ratio:
    """A median ratio and its 95 % interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def median_ratio(numerators: Sequence[float], denominators: Sequence[float], resamples: int = 5000) -> Ratio:
    """Median of the paired ratios. Interval: percentile bootstrap (Efron 1979) over pairs, seeded."""
    ratios = np.asarray(numerators, dtype=float) / np.asarray(denominators, dtype=float)
    draws = np.random.default_rng(0).integers(0, len(ratios), (resamples, len(ratios)))
    medians = np.median(ratios[draws], axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return Ratio(float(np.median(ratios)), float(low), float(high))
