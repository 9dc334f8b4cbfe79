"""Intervals of a plan's prediction: the kind of plan it is, and how far off measured runs of that kind were predicted.

    plan.intervals.step_seconds             Interval(low=0.52, high=0.67), None where such rates were never compared
    plan.intervals.chance_of_not_fitting    0.03

Nothing of it stands in the file: it follows from the plan's facts and from ``cost_models.spreads``, so that earlier plans
have it too, and all of them what is known today.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cost_models.intervals import Interval, PlanKind
from cost_models.layout import Shard
from cost_models.spec.provenance import RateOrigin
from cost_models.spreads import PEAK_BYTES, STEP_SECONDS
from partitioner.record.records import PlanFields
from passes.shard.words import read_placements


@dataclass(frozen=True)
class PlanIntervals:
    """The ranges in which nine of ten runs lie (``cost_models.intervals.SHARE``)."""

    step_seconds: Interval | None
    """None where the rates are guesses: CPU workers without a calibration."""
    peak_memory_bytes: Interval
    """Peak of the device that takes the largest share of its memory."""
    chance_of_not_fitting: float
    """Probability that this device's peak exceeds its memory."""
    kind: PlanKind
    """The kind of plan, which decides how far off its step is taken to be."""
    origin: RateOrigin
    """The origin of the rates, as they are known today."""
    measured_runs: int
    """Measured steps of this kind, with rates of this origin, that the interval of the step rests on."""


def plan_intervals(plan: PlanFields, used: Sequence[int], fullest: int) -> PlanIntervals:
    """Return how far off the prediction may be. ``used``: devices that run something; ``fullest`` of them."""
    kind, origin = kind_of(plan, used), plan.cluster.origin(used)
    step = None if origin.rates is None else STEP_SECONDS[kind, origin.rates]
    device = plan.cluster.devices[fullest]
    memory, peak = PEAK_BYTES[device.kind], plan.prediction.peak_memory_bytes[str(fullest)]
    return PlanIntervals(
        None if step is None else step.interval(plan.prediction.step_seconds),
        memory.interval(peak),
        memory.chance_above(peak, device.memory_bytes),
        kind,
        origin,
        0 if step is None else step.runs,
    )


def kind_of(plan: PlanFields, used: Sequence[int]) -> PlanKind:
    """Tell which plans this one errs like."""
    if len(used) == 1:
        return "one device"
    if all(len(stage.devices) == 1 for stage in plan.stages):
        return "pipeline"
    return "data parallel" if len(plan.stages) == 1 and _whole_parameters(plan) else "sharded"


def _whole_parameters(plan: PlanFields) -> bool:
    """Tell whether the only stage's ops read every parameter whole, as replicas do, with ZeRO or without.

    Lookups do not count: a table of positions has no samples to split, and may be read by columns. Plans without
    ``layouts``, which say how ops read parameters, count as sharded.
    """
    sharding = plan.stages[0].sharding
    rows = sharding.layouts if sharding is not None else ()
    taken = [row.taken for row in rows if row.taken and row.op != "embedding"]
    return bool(taken) and not any(
        isinstance(layout, Shard) for text in taken for layout in read_placements(text)
    )
