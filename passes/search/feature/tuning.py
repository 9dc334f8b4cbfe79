"""Every number of the feature-wise search that is a choice: limits of what is looked at, tolerances."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class FeatureTuning:
    """One number each, with where it comes from. "By hand": chosen once, not tuned since."""

    most_axes: int = 3
    """Axes of a mesh at most: a device index has no more names (outer, middle, inner)."""
    agreement: float = 1e-6
    """Relative difference allowed between the search's objective and its evaluation on the whole graph."""
    least_reserve: float = 0.01
    """Share of a device's memory by which it is lessened at least, where a simulated step overflowed. By hand."""
    sweeps: int = 30
    """Sweeps of dual ascent at one price of memory. By hand."""
    prices: int = 12
    """Prices of memory tried at most. By hand."""
    solved: float = 1e-8
    """Relative distance of bound and cost at which one mesh is solved: rounding."""
    proved: float = 1e-9
    """Gap over all meshes that is rounding: nothing is left to search."""
    near: float = 1e-4
    """Relative distance of prices, or of the bound from the best it could be, at which another price is of no use.
    By hand."""
    longest_seconds: float = 1e6
    """Seconds of an integer program where the request has no limit."""
    margins: tuple[float, ...] = (1e-3, 1e-2, 6e-2, math.inf)
    """Shares by which the choices of a program may cost more than the bound, one after the other. By hand: most close at
    the first."""
    close: float = 3.0
    """Margins by which a known choice is off to become the next limit. By hand."""
    shrinks: float = 0.9
    """Options are left out again while at least a tenth of them goes. By hand."""
    rounding: float = 1e-8
    """Relative tolerance of the program's memory row: its solver's."""
    forbidden_seconds: float = 1e7
    """Cost of a pair that is not allowed: more than any step, little enough for sums to stay exact."""
    free_seconds: float = 1e-15
    """Costs below are rounding."""
    equal: float = 1e-12
    """Relative difference of sums that is rounding."""
    alike: float = 1e-9
    """Relative difference of costs that is rounding, in an explanation."""


TUNING = FeatureTuning()
"""The numbers that the search uses."""
