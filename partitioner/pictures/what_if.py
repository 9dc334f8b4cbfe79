"""The same plan under other conditions: its step simulated again with other links, other batches, beside copies of itself.

The plan is kept as it is, so these are upper bounds: a plan made for the other conditions may be faster. Memory and
copies need no simulation: a device has room for the plan or not, and copies sum their gradients by a closed form.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from cost_models.communication import ring_all_reduce_seconds, slowest_hop
from cost_models.room import chance_of_not_fitting
from cost_models.units import counted, format_bytes, format_seconds, percent
from partitioner.record.data import PlanData
from partitioner.record.other_rates import on_cluster, with_links
from partitioner.record.rebuild import at_costs_of, group_programs, simulate_plan
from partitioner.report.intervals import chance_cell
from runtime.program.members import GroupPrograms
from runtime.simulate.simulation import Simulation

LINKS = (0.5, 2.0)
BATCHES = (0.5, 2.0)
COPIES = (2, 4, 8)
MEMORY = (0.5, 0.75, 1.5, 2.0)
"""The factors that are tried beside 1, enough for a curve's direction. Those of links and batches cost a simulation."""
MOST_COMPUTES = 200_000
"""The most computes of a step that is simulated again: more would take longer than a report should."""


def what_if_data(plan: PlanData, groups: GroupPrograms) -> dict[str, Any]:
    """Return curves of the step's seconds, and the alternatives that other conditions would make the fastest.

    ``groups``: the plan's programs, which run on other links as they are.
    """
    series = [_memory(plan)]
    if sum(len(stage.devices) for stage in plan.stages) * plan.microbatches <= MOST_COMPUTES:
        series = [*_links(plan, groups), *_batches(plan), *series]
    series += _copies(plan)
    return {"series": series, "flips": list(_flips(plan))}


def _point(plan: PlanData, factor: float, step: Simulation | None, text: str) -> dict[str, Any]:
    seconds = plan.prediction.step_seconds if step is None else step.step_seconds
    return {
        "x": factor,
        "step_seconds": seconds,
        "fits": _fits(plan, _own_peaks(plan) if step is None else step.peak_bytes),
        "text": f"{format_seconds(seconds)} a step{text}",
    }


def _fits(plan: PlanData, peaks: Sequence[float]) -> bool:
    return all(peak <= room for peak, room in zip(peaks, plan.room_bytes, strict=True))


def _own_peaks(plan: PlanData) -> list[int]:
    """Return the peak of every device of the cluster as the plan predicts it."""
    return [plan.prediction.peak_memory_bytes[str(rank)] for rank in range(plan.cluster.world_size)]


def _curve(title: str, points: Sequence[dict[str, Any]], note: str) -> dict[str, Any]:
    """Return a curve as the page draws it. ``note``: how its numbers were found."""
    return {
        "title": title,
        "unit": "×",
        "points": sorted(points, key=lambda point: float(point["x"])),
        "note": note,
    }


# --------------------------------------------------------------------------------------------------
# Links


def _links(plan: PlanData, groups: GroupPrograms) -> Iterator[dict[str, Any]]:
    """Yield the curve over the bandwidth of the network, or of a single node's links."""
    nodes = {plan.cluster.devices[rank].node for rank in plan.used_devices}
    several = len(plan.cluster.ranks_per_node) > 1
    if plan.world_size < 2 or (several and len(nodes) == 1) or with_links(plan.cluster, 1.0) is None:
        return  # nothing is sent on these links
    points = [_point(plan, 1.0, None, ", as it is")]
    for factor in LINKS:
        cluster = with_links(plan.cluster, factor)
        assert cluster is not None
        other = on_cluster(plan, cluster)
        points.append(_point(plan, factor, simulate_plan(other, at_costs_of(other, groups)), ""))
    title = "Bandwidth between nodes" if several else "Bandwidth between devices"
    yield _curve(title, points, "The step simulated again with these links faster or slower; latencies stay.")


# --------------------------------------------------------------------------------------------------
# Batches, copies, memory


def _batches(plan: PlanData) -> Iterator[dict[str, Any]]:
    """Yield the curve over the batch: more or fewer micro-batches of the same size."""
    points = [_point(plan, 1.0, None, f" of {counted(plan.batch_size, 'sample')}")]
    for factor in BATCHES:
        microbatches, batch = plan.microbatches * factor, plan.batch_size * factor
        if microbatches != int(microbatches) or batch != int(batch) or int(microbatches) < 1:
            continue
        other = plan.model_copy(
            update={"microbatches": int(microbatches), "batch_size": int(batch), **_state_with(plan, factor)}
        )
        step = simulate_plan(other, group_programs(other))
        text = f" of {counted(int(batch), 'sample')}, {batch / step.step_seconds:,.4g} samples/s"
        points.append(_point(plan, factor, step, text))
    if len(points) > 1:
        note = "The step simulated again with more or fewer micro-batches."
        if "batch" not in plan.state_parts:
            note += " This plan does not say what its samples take, so devices hold those of the plan's own batch."
        yield _curve("Batch, in micro-batches of the same size", points, note)


def _state_with(plan: PlanData, factor: float) -> dict[str, dict[str, int]]:
    """Return what devices hold from first to last under a larger or smaller batch: of it, only the samples change."""
    batch = plan.state_parts.get("batch", {})
    state = dict(plan.state_bytes)
    for rank, size in batch.items():
        state[rank] += math.ceil(size * factor) - size
    return {"state_bytes": state}


def _copies(plan: PlanData) -> Iterator[dict[str, Any]]:
    """Yield the curve over devices: copies of the plan side by side, each with its batch, gradients summed over a ring.

    One ring and one link stand for all: the device with the most gradients, and the way from the cluster's first device to
    its last.
    """
    gradients = plan.state_parts.get("gradients")
    if gradients is None or plan.world_size < 2:
        return
    last = plan.cluster.world_size - 1
    hop = slowest_hop([[0, last]], plan.cluster)
    fits = _fits(plan, _own_peaks(plan))
    step, size = plan.prediction.step_seconds, max(gradients.values(), default=0)
    points = []
    for copies in (1, *COPIES):
        seconds = step + (ring_all_reduce_seconds(size, copies, hop) if copies > 1 else 0.0)
        rate = copies * plan.batch_size / seconds
        text = f"{counted(copies * plan.world_size, 'device')}: {format_seconds(seconds)} a step, {rate:,.4g} samples/s"
        points.append({"x": copies, "step_seconds": seconds, "fits": fits, "text": text})
    yield _curve(
        "Devices: copies of this plan, each with its own batch",
        points,
        "An estimate, not a simulation: after the plan's own step, each device sums all its gradients with its copies, in "
        f"a ring of links like the slowest from device 0 to device {last} of this cluster, and nothing hides it. "
        "A device of a copy holds as much as now, so copies neither need nor save memory; ZeRO, which would share the "
        "optimizer's state among them, is not counted.",
    )


def _memory(plan: PlanData) -> dict[str, Any]:
    peaks, devices = _own_peaks(plan), plan.cluster.devices
    fullest = plan.fullest_device
    share = peaks[fullest] / devices[fullest].memory_bytes
    least = max(peak / room for peak, room in zip(peaks, plan.room_bytes, strict=True))
    step = plan.prediction.step_seconds

    def text(factor: float) -> str:
        if least <= factor:
            return f"the fullest device, rank {fullest}, is {percent(share / factor)} full"
        if share > factor:
            return f"does not fit: rank {fullest} needs {format_bytes(peaks[fullest])}"
        chance = chance_of_not_fitting(
            (peak / factor, device) for peak, device in zip(peaks, devices, strict=True)
        )
        return f"not safe: {chance_cell(chance)} chance of not fitting"

    points = [
        {
            "x": factor,
            "step_seconds": step if least <= factor else None,
            "fits": least <= factor,
            "text": text(factor),
        }
        for factor in sorted((1.0, *MEMORY))
    ]
    return _curve(
        "Memory of the devices", points, "The plan as it is: with less memory it fits or not, no faster."
    )


def _flips(plan: PlanData) -> Iterator[str]:
    """Name the alternatives that would be faster if they fitted, and the memory from which on they do."""
    rooms = zip(plan.room_bytes, plan.cluster.devices, strict=True)
    share = min(room / device.memory_bytes for room, device in rooms)
    for other in plan.alternatives:
        faster = other.step_seconds is not None and other.step_seconds < plan.prediction.step_seconds
        if not faster or other.feasible or other.peak_memory_bytes is None:
            continue
        assert other.step_seconds is not None
        ratio = other.step_seconds / plan.prediction.step_seconds
        yield (
            f"With {format_bytes(round(other.peak_memory_bytes / share))} on each device, {other.strategy} would win: "
            f"{format_seconds(other.step_seconds)} a step, {ratio:.2f}x this plan's."
        )
