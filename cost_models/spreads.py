"""Spreads of measured over predicted, by kind of plan and origin of the rates, and by kind of device.

Made by python -m benchmarks.intervals from benchmarks/residuals.csv, not by hand; there are the formulas.
"""

from __future__ import annotations

from collections.abc import Mapping

from cost_models.devices import CountedKind
from cost_models.intervals import PlanKind, RateSource, Spread

STEP_SECONDS: Mapping[tuple[PlanKind, RateSource], Spread] = {
    ("one device", "calibrated"): Spread(center=0.0650, scale=0.1492, freedom=7, runs=0, sources=0),
    ("one device", "named stack"): Spread(center=0.0650, scale=0.1492, freedom=7, runs=0, sources=0),
    ("one device", "presets"): Spread(center=0.0614, scale=0.1114, freedom=10, runs=12, sources=3),
    ("data parallel", "calibrated"): Spread(center=0.0375, scale=0.0795, freedom=11, runs=6, sources=4),
    ("data parallel", "named stack"): Spread(center=0.0057, scale=0.0822, freedom=13, runs=177, sources=6),
    ("data parallel", "presets"): Spread(center=0.0715, scale=0.2317, freedom=9, runs=8, sources=2),
    ("pipeline", "calibrated"): Spread(center=0.0443, scale=0.0873, freedom=12, runs=21, sources=5),
    ("pipeline", "named stack"): Spread(center=0.0650, scale=0.1492, freedom=7, runs=0, sources=0),
    ("pipeline", "presets"): Spread(center=0.0650, scale=0.1492, freedom=7, runs=0, sources=0),
    ("sharded", "calibrated"): Spread(center=0.1190, scale=0.2828, freedom=14, runs=21, sources=7),
    ("sharded", "named stack"): Spread(center=0.0753, scale=0.1219, freedom=9, runs=102, sources=2),
    ("sharded", "presets"): Spread(center=0.0960, scale=0.1533, freedom=9, runs=138, sources=2),
}

PEAK_BYTES: Mapping[CountedKind, Spread] = {
    "cuda": Spread(center=0.0451, scale=0.0873, freedom=7, runs=310, sources=6),
    "cpu": Spread(center=-0.0170, scale=0.0481, freedom=10, runs=48, sources=9),
}
