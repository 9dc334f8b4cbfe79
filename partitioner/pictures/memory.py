"""The memory of each lane over a step, stacked by what holds it.

    parameters, gradients, optimizer, batch    all through the step, as the plan counts them; gradients from the first
                                               backward on, which makes them
    activations                                of each micro-batch from its forward to its backward
    of backward alone                          what it computes again, and its largest collective's result, while it runs
    of the optimizer's step                    what it makes for the time of its step
    values between stages                      what stages make for each other, and gradients of it
    context, communicators, allocator          all through the step, on GPUs: what a process holds beside tensors

What is held when is the simulation's (``runtime.simulate.memory``); the sum is its curve.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cost_models.arrays import FloatArray
from partitioner.pictures.lanes import Lane, Lanes
from partitioner.record.data import PlanData
from runtime.simulate.memory import MemoryKind
from runtime.simulate.simulation import Simulation

MOST_POINTS = 600
"""The most moments of a curve: as many as a picture has columns. Between two of them the fullest moment is kept."""
STATE = ("parameters", "gradients", "optimizer", "batch")
MOVING = {
    "activations": MemoryKind.SAVED,
    "of backward alone": MemoryKind.WITHIN_BACKWARD,
    "of the optimizer's step": MemoryKind.UPDATE,
    "values between stages": MemoryKind.VALUES,
}


def memory_data(plan: PlanData, simulation: Simulation, lanes: Lanes) -> dict[str, Any]:
    """Return the memory of each lane's first rank as the page draws it."""
    return {"lanes": [_lane(plan, simulation, lane) for lane in lanes.lanes] if simulation.memory else []}


def _lane(plan: PlanData, simulation: Simulation, lane: Lane) -> dict[str, Any]:
    rank = str(lane.ranks[0])
    curve = simulation.memory[lane.ranks[0]]
    gradients = curve.bytes_of(MemoryKind.GRADIENTS)
    missing = gradients[-1] - gradients
    parts = {name: plan.state_parts[name][rank] for name in STATE if name in plan.state_parts}
    kinds = (
        {name: size - missing * (name == "gradients") for name, size in parts.items()}
        if parts
        else {"state": plan.state_bytes[rank] - missing}
    )
    kinds |= {name: curve.bytes_of(kind) for name, kind in MOVING.items()}
    process = simulation.process[lane.ranks[0]]._asdict() if simulation.process else {}
    kinds |= {name: np.full(len(curve.seconds), float(size)) for name, size in process.items() if size}
    drawn = _drawn(curve.seconds, curve.bytes_held)
    seconds, total = curve.seconds[drawn], curve.bytes_held[drawn]
    # Sums of fractions of bytes: none may end below zero.
    stacks = {name: np.maximum(np.round(held[drawn]), 0.0) for name, held in kinds.items()}
    peak = int(np.argmax(total))
    kept = _thinned(total)
    return {
        "label": lane.label,
        "capacity_bytes": plan.cluster.devices[lane.ranks[0]].memory_bytes,
        "kinds": list(stacks),
        "seconds": [float(f"{moment:.6g}") for moment in seconds[kept].tolist()],
        "stacks": [[int(size) for size in held[kept].tolist()] for held in stacks.values()],
        "peak_bytes": int(total[peak]),
        "peak_at": float(seconds[peak]),
        "peak_text": _peak_text({name: float(held[peak]) for name, held in stacks.items()}),
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
    return np.asarray(last | peak)


def _thinned(total: FloatArray) -> list[int]:
    """Choose the moments to draw: of each equal piece of the curve the fullest one, and the ends."""
    if len(total) <= MOST_POINTS:
        return list(range(len(total)))
    pieces = np.array_split(np.arange(len(total)), MOST_POINTS - 2)
    chosen = {int(piece[np.argmax(total[piece])]) for piece in pieces}
    return sorted({0, len(total) - 1, *chosen})


def _peak_text(held: dict[str, float]) -> str:
    """Say what holds the peak: the kinds that make most of it."""
    whole = sum(held.values()) or 1.0
    ordered = sorted(held.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {size / whole:.0%}" for name, size in ordered if size >= 0.05 * whole)
