"""Every number of the layer-wise search that is a choice: limits of what is looked at, factors, tolerances."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerTuning:
    """One number each, with where it comes from. "By hand": chosen once, not tuned since."""

    most_counts: int = 24
    """Micro-batch counts tried at most, the largest ones: those are what pipelines want. By hand."""
    most_device_states: int = 400
    """States of the dynamic program up to which unlike devices are searched as a multiset of kinds. By hand."""
    most_subsequence_devices: int = 12
    """Devices up to which, otherwise, any subsequence of the file's order is searched; beyond, a run of it. By hand."""
    most_intervals: int = 480
    """Cut positions looked at along the order: about six in each block of an 80-block transformer."""
    most_downsets: int = 512
    """Downsets listed where a graph branches; their pairs are the dynamic program's edges. By hand."""
    cluster_sizes: tuple[int, ...] = (40, 28, 20, 14)
    """Units of the branching coarsening, tried in turn until the downsets can be listed. By hand."""
    slack: float = 1.15
    """Options whose proved bound is this much above the best surrogate are not solved: the surrogate's optimum was up to
    8–16% off the simulated one on random plans (docs/05-layer-wise.md)."""
    gap: float = 1e-6
    """Relative gap to which the surrogate's minimum is proved."""
    caution: float = 4.0
    """Factor by which links are slower in a second look at the best options: transfers that share a link, or interlock with
    unlike stages, take longer than the surrogate thinks, and a split that sends less may simulate better. By hand."""
    cautious_options: int = 3
    """Options that get the second look. By hand."""
    keep: int = 4
    """Splits kept per option and space. By hand."""
    one_of_each: float = 1.25
    """Every schedule whose best surrogate is within this factor of the best of all is simulated at least once. By hand,
    above the surrogate's worst error."""
    most_scale: int = 1 << 20
    """Times a device's memory up to which the least-bad split is looked for."""
    growth: tuple[int, ...] = (2, 4, 8, 16)
    """Times as many devices that are tried as a way out."""
    memory_tolerance: float = 1e-9
    """Relative slack in memory comparisons, so that sums in another order do not change the answer."""


TUNING = LayerTuning()
"""The numbers that the search uses."""
