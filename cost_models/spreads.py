"""Spreads of measured over predicted, by kind of plan and origin of the rates, and by kind of device.

Made by python -m benchmarks.intervals from benchmarks/residuals.csv, not by hand; there are the formulas.
"""

from __future__ import annotations

from collections.abc import Mapping

from cost_models.devices import DeviceKind
from cost_models.intervals import Kind, Rates, Spread

STEP_SECONDS: Mapping[tuple[Kind, Rates], Spread] = {
    ("one device", "calibrated"): Spread(center=0.0748, scale=0.1632, freedom=4, runs=0, sources=0),
    ("one device", "named stack"): Spread(center=0.0748, scale=0.1632, freedom=4, runs=0, sources=0),
    ("one device", "presets"): Spread(center=0.0710, scale=0.1203, freedom=7, runs=12, sources=3),
    ("data parallel", "calibrated"): Spread(center=0.0748, scale=0.1632, freedom=4, runs=0, sources=0),
    ("data parallel", "named stack"): Spread(center=0.0280, scale=0.0890, freedom=7, runs=93, sources=3),
    ("data parallel", "presets"): Spread(center=0.0256, scale=0.1215, freedom=5, runs=2, sources=1),
    ("pipeline", "calibrated"): Spread(center=0.0717, scale=0.0924, freedom=9, runs=15, sources=5),
    ("pipeline", "named stack"): Spread(center=0.0748, scale=0.1632, freedom=4, runs=0, sources=0),
    ("pipeline", "presets"): Spread(center=0.0748, scale=0.1632, freedom=4, runs=0, sources=0),
    ("sharded", "calibrated"): Spread(center=0.2109, scale=0.3247, freedom=8, runs=18, sources=4),
    ("sharded", "named stack"): Spread(center=0.0748, scale=0.1632, freedom=4, runs=0, sources=0),
    ("sharded", "presets"): Spread(center=0.0748, scale=0.1632, freedom=4, runs=0, sources=0),
}

PEAK_BYTES: Mapping[DeviceKind, Spread] = {
    "cuda": Spread(center=0.0730, scale=0.1151, freedom=3, runs=10, sources=2),
    "cpu": Spread(center=-0.0012, scale=0.0574, freedom=10, runs=33, sources=9),
}
