"""The plot of free planning: seconds of planning, and gap, against ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.free_scaling import Figures
from benchmarks.log_plot import COLORS, Panel, Series, write_panels


def write_plot(found: Sequence[Figures], path: Path) -> None:
    """Draw both panels, side by side."""
    seconds: dict[str, Callable[[Figures], float]] = {
        "trace and costs": lambda f: f.trace_seconds + f.costs_seconds,
        "layer-wise plan": lambda f: f.layer_seconds,
        "free plan": lambda f: f.free_seconds,
    }
    shares: dict[str, Callable[[Figures], float]] = {
        "gap of the certificate": lambda f: 100 * f.gap,
        "step above its lower bound": lambda f: 100 * f.to_bound,
    }
    panels = [
        Panel("planning: seconds against ops", "ops", tuple(_series(found, seconds)), (0.1, 1000.0)),
        Panel("quality: percent against ops", "ops", tuple(_series(found, shares)), (1.0, 100.0)),
    ]
    write_panels(panels, path)


def _series(found: Sequence[Figures], curves: dict[str, Callable[[Figures], float]]) -> list[Series]:
    kinds = list(dict.fromkeys(each.kind for each in found))
    return [
        Series(
            f"{label}, {kind}",
            tuple((each.ops, value(each)) for each in found if each.kind == kind),
            color,
            dashed=number > 0,
        )
        for (label, value), color in zip(curves.items(), COLORS, strict=False)
        for number, kind in enumerate(kinds)
    ]
