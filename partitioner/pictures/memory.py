"""The memory of each lane over a step, stacked by what holds it.

    parameters, gradients, optimizer, batch    all through the step, as the plan counts them; gradients from the first
                                               backward on, which makes them
    activations                                of each micro-batch from its forward to its backward
    of backward alone                          what it computes again, and its largest collective's result, while it runs
    of the optimizer's step                    what it makes for the time of its step
    values between stages                      the rest: what stages make for each other, and gradients of it

These are the rules of ``runtime.simulate.memory``, read off the step's spans; the sum is the simulated curve.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cost_models.arrays import FloatArray
from partitioner.pictures.lanes import Lane, Lanes
from partitioner.record.data import PlanData
from partitioner.record.records import Stage
from runtime.program.program import OptimizerStep
from runtime.segment.microbatch import microbatch_sizes
from runtime.simulate.simulate import Simulation

MOST_POINTS = 600
"""The most moments of a curve: as many as a picture has columns. Between two of them the fullest moment is kept."""
STATE = ("parameters", "gradients", "optimizer", "batch")
MOVING = ("activations", "of backward alone", "of the optimizer's step", "values between stages")


def memory_data(plan: PlanData, simulation: Simulation, lanes: Lanes) -> dict[str, Any]:
    """Return the memory of each lane's first rank as the page draws it."""
    return {"lanes": [_lane(plan, simulation, lane) for lane in lanes.lanes] if simulation.memory else []}


def _lane(plan: PlanData, simulation: Simulation, lane: Lane) -> dict[str, Any]:
    rank = lane.ranks[0]
    curve = simulation.memory[rank]
    drawn = _drawn(curve.seconds, curve.bytes_held)
    seconds, total = curve.seconds[drawn], curve.bytes_held[drawn]
    saved, again = _activations(plan, lane, seconds), _transients(plan, lane, seconds)
    missing = _missing_gradients(plan, lane, seconds)
    state = float(plan.state_bytes[str(rank)]) - missing
    parts = {name: float(plan.state_parts[name][str(rank)]) for name in STATE if name in plan.state_parts}
    kinds: dict[str, FloatArray] = (
        {name: size - missing * (name == "gradients") for name, size in parts.items()}
        if parts
        else {"state": state}
    )
    saved = np.minimum(saved, np.maximum(total - state, 0.0))
    again = np.minimum(again, np.maximum(total - state - saved, 0.0))
    updating = _updating(plan, simulation, rank, seconds)
    rest = np.maximum(total - state - saved - again - updating, 0.0)
    kinds |= dict(zip(MOVING, (saved, again, updating, rest), strict=True))
    peak = int(np.argmax(total))
    kept = _thinned(total)
    return {
        "label": lane.label,
        "capacity_bytes": plan.cluster.devices[rank].memory_bytes,
        "kinds": list(kinds),
        "seconds": [float(f"{moment:.6g}") for moment in seconds[kept].tolist()],
        "stacks": [[int(size) for size in own[kept].tolist()] for own in kinds.values()],
        "peak_bytes": int(total[peak]),
        "peak_at": float(seconds[peak]),
        "peak_text": _peak_text({name: float(own[peak]) for name, own in kinds.items()}),
    }


def _drawn(seconds: FloatArray, total: FloatArray) -> NDArray[np.bool_]:
    """Choose among several changes at one moment: the last one is what holds from then on, a peak within counts too."""
    last = np.append(seconds[1:] != seconds[:-1], True)
    first = np.append(True, last[:-1])
    moment = np.cumsum(first) - 1
    before = np.append(0.0, total[last])[moment]
    after = total[last][moment]
    most = np.maximum.reduceat(total, np.flatnonzero(first))[moment]
    peak = (total == most) & (total > np.maximum(before, after))
    found: NDArray[np.bool_] = last | peak
    return found


def _thinned(total: FloatArray) -> list[int]:
    """Choose the moments to draw: of each equal piece of the curve the fullest one, and the ends."""
    if len(total) <= MOST_POINTS:
        return list(range(len(total)))
    pieces = np.array_split(np.arange(len(total)), MOST_POINTS - 2)
    chosen = {int(piece[np.argmax(total[piece])]) for piece in pieces}
    return sorted({0, len(total) - 1, *chosen})


def _activations(plan: PlanData, lane: Lane, seconds: FloatArray) -> FloatArray:
    """Add up what forwards of the lane's stages have saved at each moment and backwards have not yet freed."""
    events = []
    split = {(span.stage, span.microbatch) for span in lane.spans if span.letter == "W"}
    for scale, stage, span in _computes(plan, lane):
        deferred = stage.weight_saved_bytes * scale
        if span.letter == "F":
            events.append((span.start_seconds, stage.saved_bytes * scale))
            if not stage.has_backward:
                events.append((span.end_seconds, -stage.saved_bytes * scale))
        elif span.letter in "BI":
            events.append((span.end_seconds, -stage.saved_bytes * scale))
            if (span.stage, span.microbatch) in split:
                events.append((span.end_seconds, deferred))
        elif span.letter == "W":
            events.append((span.end_seconds, -deferred))
    return _held(events, seconds)


def _transients(plan: PlanData, lane: Lane, seconds: FloatArray) -> FloatArray:
    events: list[tuple[float, float]] = []
    begun: set[int] = set()
    for scale, stage, span in _computes(plan, lane):
        if span.letter in "BI" and stage.transient_bytes:
            first = span.stage not in begun
            begun.add(span.stage)
            held = (first and stage.first_transient_bytes) or stage.transient_bytes
            events += [(span.start_seconds, held * scale), (span.end_seconds, -held * scale)]
    return _held(events, seconds)


def _updating(plan: PlanData, simulation: Simulation, rank: int, seconds: FloatArray) -> FloatArray:
    """Return what the rank's optimizer holds on top of its state at each moment."""
    held = float(plan.update_bytes.get(str(rank), 0))
    steps = (span for span in simulation.timeline[rank] if isinstance(span.instruction, OptimizerStep))
    changes = (
        (at, sign * held) for span in steps for at, sign in ((span.start_seconds, 1), (span.end_seconds, -1))
    )
    return _held(list(changes), seconds)


def _missing_gradients(plan: PlanData, lane: Lane, seconds: FloatArray) -> FloatArray:
    """Add up the gradients of parameters that the lane's stages have not made yet."""
    until: dict[int, float] = {}
    weights = {span.stage for _, _, span in _computes(plan, lane) if span.letter == "W"}
    for _, _, span in _computes(plan, lane):
        if span.letter == ("W" if span.stage in weights else "B"):
            until.setdefault(span.stage, span.end_seconds)
    events = [(0.0, float(plan.stages[stage].gradient_bytes)) for stage in until]
    events += [(end, -float(plan.stages[stage].gradient_bytes)) for stage, end in until.items()]
    return _held(events, seconds)


def _computes(plan: PlanData, lane: Lane) -> Iterator[tuple[float, Stage, Any]]:
    """Yield each compute of a lane with its stage, and its micro-batch's share of a full one."""
    sizes = microbatch_sizes(plan.batch_size, plan.microbatches)
    for span in lane.spans:
        if span.stage >= 0:
            yield sizes[span.microbatch] / sizes[0], plan.stages[span.stage], span


def _held(events: Sequence[tuple[float, float]], seconds: FloatArray) -> FloatArray:
    """Add up changes until each moment."""
    if not events:
        return np.zeros(len(seconds))
    ordered = sorted(events)
    moments = np.array([moment for moment, _ in ordered])
    sums = np.concatenate([[0.0], np.cumsum([change for _, change in ordered])])
    found: FloatArray = np.maximum(sums[np.searchsorted(moments, seconds, side="right")], 0.0)
    return found


def _peak_text(held: dict[str, float]) -> str:
    """Say what holds the peak: the kinds that make most of it."""
    whole = sum(held.values()) or 1.0
    ordered = sorted(held.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {size / whole:.0%}" for name, size in ordered if size >= 0.05 * whole)
