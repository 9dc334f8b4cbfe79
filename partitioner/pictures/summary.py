"""A plan in a few numbers and sentences: what it is, where its step goes, why it was chosen and how sure that is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cost_models.cluster import DEFAULTS
from cost_models.intervals import SHARE
from cost_models.room import FILLS
from cost_models.units import counted, format_bytes, format_seconds, percent
from partitioner.pictures.lanes import Lanes
from partitioner.record.data import PlanData
from partitioner.report.intervals import (
    allowed_text,
    chance_cell,
    chance_text,
    peak_text,
    risk_text,
    step_text,
    support_text,
)
from partitioner.report.sharding import named_devices
from partitioner.report.table import PROVED, microbatch_text, shape_text, strategy_text
from partitioner.report.text import rate_text
from passes.search.words import FIXED, STRATEGY_WORDS


def summary_data(plan: PlanData, lanes: Lanes) -> dict[str, Any]:
    """Return the page's summary."""
    return {
        "facts": list(_facts(plan)),
        "division": division(plan, lanes),
        "fullest": _fullest(plan),
        "sentences": [
            {"title": "Why this plan", "text": list(_why(plan)), "exactly": list(_exactly(plan))},
            {"title": "How sure", "text": list(_sure(plan))},
            {"title": "What was proved", "text": list(_proof(plan))},
        ],
        "alternatives": [
            {
                "name": other.strategy,
                "step_seconds": other.step_seconds,
                "peak_bytes": other.peak_memory_bytes,
                "chance": chance_cell(other.chance_of_not_fitting),
                "feasible": other.feasible,
                "reason": other.reason,
            }
            for other in plan.alternatives
        ],
        "step_seconds": plan.prediction.step_seconds,
        "notes": list(plan.notes),
    }


def _facts(plan: PlanData) -> Iterator[dict[str, str]]:
    p = plan.prediction
    yield fact("step time", step_text(plan), f"from {_rates(plan)}")
    yield fact("throughput", f"{rate_text(p.samples_per_second)} samples/s", f"batch {plan.batch_size:,}")
    if p.tokens_per_second is not None:
        yield fact("tokens", f"{rate_text(p.tokens_per_second)} tokens/s")
    if p.mfu is not None:
        yield fact("MFU", percent(p.mfu), "useful FLOP/s over the devices' peak")
    yield fact("strategy", strategy_text(plan), shape_text(plan))
    devices = f"{plan.world_size} of {counted(plan.cluster.world_size, 'device')}"
    whole = plan.world_size == plan.cluster.world_size
    yield fact("devices", counted(plan.world_size, "device") if whole else devices, plan.cluster.name)
    yield fact("schedule", plan.schedule, microbatch_text(plan.batch_size, plan.microbatches))
    model = plan.model
    yield fact(
        "model", f"{model.parameters:,} parameters", f"{model.ops:,} ops, {model.dtype or 'mixed types'}"
    )
    yield fact(
        "sent in a step",
        format_bytes(p.communication_bytes),
        f"{counted(p.messages, 'message')}, {counted(p.collectives, 'collective')}",
    )


def fact(label: str, value: str, note: str = "") -> dict[str, str]:
    """Return a number of the summary as the page shows it."""
    return {"label": label, "value": value, "note": note}


def division(plan: PlanData, lanes: Lanes) -> list[dict[str, Any]]:
    """Divide the step of the mean device: computing, collectives, sums of gradients, the update, waiting."""
    totals = {"compute": 0.0, "communication": 0.0, "gradient sums": 0.0, "optimizer": 0.0}
    inside = [_collective_seconds(plan, stage) for stage in range(len(plan.stages))]
    ranks = sum(len(lane.ranks) for lane in lanes.lanes) or 1
    for lane in lanes.lanes:
        for span in lane.spans:
            seconds = span.end_seconds - span.start_seconds
            if span.letter == "R":
                totals["gradient sums"] += seconds * len(lane.ranks)
                continue
            if span.letter == "O":  # with updated parameters put together again
                most = sum(_gather_seconds(plan, stage) for stage in lane.stages)
            else:
                forward, backward = inside[span.stage]
                most = {"F": forward, "W": 0.0}.get(span.letter, backward)
            sent = min(seconds, most)
            totals["communication"] += sent * len(lane.ranks)
            totals["optimizer" if span.letter == "O" else "compute"] += (seconds - sent) * len(lane.ranks)
    step = lanes.step_seconds
    found = {kind: seconds / ranks for kind, seconds in totals.items()}
    found["waiting (bubble)"] = max(0.0, step - sum(found.values()))
    return [
        {"kind": kind, "seconds": seconds, "share": seconds / step if step else 0.0}
        for kind, seconds in found.items()
        if seconds > 0
    ]


def _collective_seconds(plan: PlanData, stage: int) -> tuple[float, float]:
    """Return the seconds of a stage's collectives in a forward and in a backward."""
    sharding = plan.stages[stage].sharding
    items = () if sharding is None else sharding.collectives
    return (
        sum(item.seconds for item in items if not item.backward),
        sum(item.seconds for item in items if item.backward),
    )


def _gather_seconds(plan: PlanData, stage: int) -> float:
    """Return the seconds in which a stage's devices put together what each has updated a part of."""
    sharding = plan.stages[stage].sharding
    return sum(item.seconds for item in (() if sharding is None else sharding.gathers))


def _fullest(plan: PlanData) -> dict[str, Any]:
    peaks, devices = plan.prediction.peak_memory_bytes, plan.cluster.devices
    rank = plan.fullest_device
    return {
        "device": named_devices(plan, (rank,)),
        "used_bytes": peaks[str(rank)],
        "capacity_bytes": devices[rank].memory_bytes,
    }


def _why(plan: PlanData) -> Iterator[str]:
    words = STRATEGY_WORDS.get(plan.strategy)
    kind = plan.strategy if words is None else words.adverb
    if said := risk_text(plan):
        yield f"It is not safe: {said}."
        yield from (f"To try: {way}." for way in (plan.risk.ways if plan.risk is not None else ()))
    if FIXED in plan.certificate.space:
        yield "Its groups of devices were fixed by hand; the search filled in what was left open."
    else:
        yield f"It is the fastest {kind} plan found that fits the devices' memory{_safely(plan)}."
        if words is not None:
            yield f"The search looked at {words.chosen_among}."
    fitting = [other for other in plan.alternatives if other.feasible and other.step_seconds]
    if fitting:
        nearest = min(fitting, key=lambda other: other.step_seconds or 0.0)
        ratio = (nearest.step_seconds or 0.0) / plan.prediction.step_seconds
        text = f"The best of what it is compared with, {nearest.strategy}, takes {ratio:.2f}x its step"
        yield f"{text}{'.' if ratio >= 1 else ': it is faster, but not the kind of plan that was asked for.'}"
    for other in plan.alternatives:
        if not other.feasible and other.strategy in ("one device",):
            yield f"One device alone {other.reason}."


def _safely(plan: PlanData) -> str:
    """Say within which risk."""
    if plan.risk is None or plan.risk.allowed >= FILLS or plan.is_too_risky:
        return ""
    return f" with a chance of not fitting of at most {allowed_text(plan.risk.allowed)}"


def _exactly(plan: PlanData) -> Iterator[str]:
    """Say what the search covered and how, in the words of the certificate."""
    certificate = plan.certificate
    yield f"Searched: {certificate.space}."
    yield f"Method: {certificate.method}. It took {format_seconds(certificate.search_seconds)}."
    yield f"Counted as the step: {certificate.objective}, {format_seconds(certificate.objective_seconds)}."


def _sure(plan: PlanData) -> Iterator[str]:
    c, step = plan.certificate, plan.prediction.step_seconds
    if c.gap < PROVED:
        yield "Within what was searched nothing is faster, by the search's own count of seconds; that is proved."
    elif c.gap < 1:
        most = percent(c.gap)
        yield f"Nothing that was searched can be more than {most} faster, by the search's own count; that is proved."
    if c.simulated_lower_bound_seconds > 0:
        bound = c.simulated_lower_bound_seconds
        yield (
            f"No plan of any kind simulates below {format_seconds(bound)} on these devices; this one takes "
            f"{step / bound:.2f}x that."
        )
    yield f"All seconds are predictions; they rest on {_rates(plan)}: {support_text(plan)}."
    yield from _intervals(plan)
    if plan.not_considered:
        yield f"Not looked at: {', '.join(plan.not_considered)}."


def _intervals(plan: PlanData) -> Iterator[str]:
    """Say in which range a step and the fullest device's peak lie."""
    if plan.intervals.step_seconds is not None:
        yield f"A step: {step_text(plan)}; {SHARE:.0%} of runs lie in the brackets."
    chance = chance_text(plan)
    more = f"; {chance}" if chance else ""
    yield f"The fullest device's peak: {peak_text(plan)}{more}."


def _rates(plan: PlanData) -> str:
    """Say what the seconds rest on."""
    given = plan.prediction.confidence
    return "default rates of the devices, nothing was measured" if given == DEFAULTS else given


def _proof(plan: PlanData) -> Iterator[str]:
    proof = plan.proof
    yield (
        f"The programs of all devices, {counted(proof.instructions, 'instruction')} and "
        f"{counted(proof.messages, 'message')}, cannot deadlock: everything sent is received, in order, and every gradient "
        "is summed exactly once."
    )
    yield "partitioner verify runs the same programs on local processes and compares every gradient with the whole model."
