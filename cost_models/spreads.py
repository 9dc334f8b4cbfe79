"""Spreads of measured over predicted, by kind of plan and origin of the rates, and by kind of device.

Made by python -m benchmarks.intervals from benchmarks/residuals.csv, not by hand; there are the formulas.
"""

from __future__ import annotations

from collections.abc import Mapping

from cost_models.devices import CountedKind
from cost_models.intervals import PlanKind, RateSource, Spread

STEP_SECONDS: Mapping[tuple[PlanKind, RateSource], Spread] = {
    ("one device", "calibrated"): Spread(center=0.0628, scale=0.1282, freedom=7, runs=0, sources=0),
    ("one device", "named stack"): Spread(center=0.0628, scale=0.1282, freedom=7, runs=0, sources=0),
    ("one device", "presets"): Spread(center=0.0608, scale=0.1049, freedom=10, runs=12, sources=3),
    ("data parallel", "calibrated"): Spread(center=0.0370, scale=0.0721, freedom=11, runs=6, sources=4),
    ("data parallel", "named stack"): Spread(center=0.0054, scale=0.0772, freedom=13, runs=177, sources=6),
    ("data parallel", "presets"): Spread(center=0.0305, scale=0.0969, freedom=8, runs=2, sources=1),
    ("pipeline", "calibrated"): Spread(center=0.0439, scale=0.0819, freedom=12, runs=21, sources=5),
    ("pipeline", "named stack"): Spread(center=0.0628, scale=0.1282, freedom=7, runs=0, sources=0),
    ("pipeline", "presets"): Spread(center=0.0628, scale=0.1282, freedom=7, runs=0, sources=0),
    ("sharded", "calibrated"): Spread(center=0.1188, scale=0.2816, freedom=14, runs=21, sources=7),
    ("sharded", "named stack"): Spread(center=0.0746, scale=0.1139, freedom=9, runs=102, sources=2),
    ("sharded", "presets"): Spread(center=0.1165, scale=0.1389, freedom=8, runs=6, sources=1),
}

PEAK_BYTES: Mapping[CountedKind, Spread] = {
    "cuda": Spread(center=0.0451, scale=0.0873, freedom=7, runs=310, sources=6),
    "cpu": Spread(center=-0.0170, scale=0.0481, freedom=10, runs=48, sources=9),
}
