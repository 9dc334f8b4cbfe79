"""Spreads of measured over predicted, by kind of plan and origin of the rates, and by kind of device.

Made by python -m benchmarks.intervals from benchmarks/residuals.csv, not by hand; there are the formulas.
"""

from __future__ import annotations

from collections.abc import Mapping

from cost_models.devices import CountedKind
from cost_models.intervals import PlanKind, RateSource, Spread

STEP_SECONDS: Mapping[tuple[PlanKind, RateSource], Spread] = {
    ("one device", "calibrated"): Spread(center=0.0445, scale=0.1116, freedom=5, runs=0, sources=0),
    ("one device", "named stack"): Spread(center=0.0445, scale=0.1116, freedom=5, runs=0, sources=0),
    ("one device", "presets"): Spread(center=0.0562, scale=0.1006, freedom=8, runs=12, sources=3),
    ("data parallel", "calibrated"): Spread(center=0.0334, scale=0.0662, freedom=9, runs=6, sources=4),
    ("data parallel", "named stack"): Spread(center=0.0195, scale=0.0668, freedom=8, runs=93, sources=3),
    ("data parallel", "presets"): Spread(center=0.0214, scale=0.0844, freedom=6, runs=2, sources=1),
    ("pipeline", "calibrated"): Spread(center=0.0409, scale=0.0778, freedom=10, runs=21, sources=5),
    ("pipeline", "named stack"): Spread(center=0.0445, scale=0.1116, freedom=5, runs=0, sources=0),
    ("pipeline", "presets"): Spread(center=0.0445, scale=0.1116, freedom=5, runs=0, sources=0),
    ("sharded", "calibrated"): Spread(center=0.1165, scale=0.2821, freedom=12, runs=21, sources=7),
    ("sharded", "named stack"): Spread(center=0.0445, scale=0.1116, freedom=5, runs=0, sources=0),
    ("sharded", "presets"): Spread(center=0.0445, scale=0.1116, freedom=5, runs=0, sources=0),
}

PEAK_BYTES: Mapping[CountedKind, Spread] = {
    "cuda": Spread(center=0.0578, scale=0.1095, freedom=7, runs=283, sources=6),
    "cpu": Spread(center=-0.0164, scale=0.0499, freedom=10, runs=48, sources=9),
}
