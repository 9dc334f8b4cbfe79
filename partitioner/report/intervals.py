"""Predictions with their intervals, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from cost_models.intervals import SHARE, PlanKind
from cost_models.room import FILLS
from cost_models.units import bytes_between, counted, format_seconds, listed, seconds_between

if TYPE_CHECKING:
    from partitioner.record.data import PlanData

WORDS: Mapping[PlanKind, str] = {
    "one device": "plans on one device",
    "data parallel": "data-parallel plans",
    "pipeline": "pipelines",
    "sharded": "sharded plans",
}
LEAST_CHANCE = 0.005
"""Chances below it would be written as 0%."""


def step_text(plan: PlanData) -> str:
    """Write the predicted step with its interval: "584 ms (520–670)"."""
    seconds, interval = plan.prediction.step_seconds, plan.intervals.step_seconds
    return format_seconds(seconds) if interval is None else seconds_between(seconds, *interval)


def peak_text(plan: PlanData) -> str:
    """Write the predicted peak of the fullest device with its interval: "71.0 GiB (68–74)"."""
    peak = plan.prediction.peak_memory_bytes[str(plan.fullest_device)]
    return bytes_between(peak, *plan.intervals.peak_memory_bytes)


def chance_text(plan: PlanData) -> str:
    """Write "3% chance of not fitting (5% allowed)"; "" where that rounds to nothing."""
    chance = plan.intervals.chance_of_not_fitting
    if chance < LEAST_CHANCE:
        return ""
    told = plan.risk is not None and plan.risk.allowed < FILLS
    allowed = f" ({allowed_text(plan.risk.allowed)} allowed)" if plan.risk is not None and told else ""
    return f"{_percent(chance)} chance of not fitting{allowed}"


def chance_cell(chance: float | None) -> str:
    """Write "3%", "<1%", or "-" for what is not known."""
    if chance is None:
        return "-"
    return _percent(chance) if chance >= LEAST_CHANCE else "<1%"


def allowed_text(risk: float) -> str:
    """Write a risk as it is given: "5%", "0.5%"."""
    return f"{100 * risk:.3g}%"


def risk_text(plan: PlanData) -> str:
    """Say of a plan that is not safe that nothing else is; "" of others."""
    if not plan.is_too_risky or plan.risk is None:
        return ""
    chance, allowed = _percent(plan.intervals.chance_of_not_fitting), allowed_text(plan.risk.allowed)
    return f"{chance} chance of not fitting, {allowed} allowed; nothing safer was found"


def _percent(chance: float) -> str:
    return f"{min(chance, 0.99):.0%}"


def rates_text(plan: PlanData) -> str:
    """Say where the rates come from, and what the intervals rest on."""
    return f"{plan.prediction.confidence}; {support_text(plan)}"


def support_text(plan: PlanData) -> str:
    """Say how many measured runs the step's interval rests on."""
    intervals = plan.intervals
    if unrun := plan.unrun_kinds:
        return f"no interval of the step: no plan was run on {listed(unrun)} devices; the peak's is that of CUDA devices"
    if intervals.step_seconds is None:
        return "no interval of the step without a calibration"
    kind = WORDS[intervals.kind]
    if not intervals.measured_runs:
        return f"{SHARE:.0%} intervals, wide: no {kind} were measured beside such rates"
    return f"{SHARE:.0%} intervals, from {counted(intervals.measured_runs, 'measured run')} of {kind}"
