"""The same plan under other conditions: its step simulated again with other links, other batches, beside copies of itself.

The plan is kept as it is, so these are upper bounds: a plan made for the other conditions may be faster. Memory and
copies need no simulation: a device has room for the plan or not, and copies sum their gradients by a closed form.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cost_models.cluster import ClusterSpec
from cost_models.cluster_schema import LinkSpec
from cost_models.communication import ring_all_reduce_seconds, slowest_hop
from cost_models.conversion import group_links
from cost_models.units import counted, format_bytes, format_seconds, percent
from partitioner.record.data import PlanData
from partitioner.record.rebuild import at_costs_of, group_programs, simulate_plan
from partitioner.record.records import Stage
from runtime.mesh.ranks_along import JOINT, all_ranks_along
from runtime.program.members import GroupPrograms
from runtime.simulate.simulate import Simulation

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
    pairs = zip(peaks, plan.cluster.devices, strict=True)
    return all(peak <= device.memory_bytes for peak, device in pairs)


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
    if plan.world_size < 2 or (several and len(nodes) == 1) or _with_links(plan.cluster, 1.0) is None:
        return  # nothing is sent on these links
    points = [_point(plan, 1.0, None, ", as it is")]
    for factor in LINKS:
        cluster = _with_links(plan.cluster, factor)
        assert cluster is not None
        other = _on(plan, cluster)
        points.append(_point(plan, factor, simulate_plan(other, at_costs_of(other, groups)), ""))
    title = "Bandwidth between nodes" if several else "Bandwidth between devices"
    yield _curve(title, points, "The step simulated again with these links faster or slower; latencies stay.")


def _with_links(cluster: ClusterSpec, factor: float) -> ClusterSpec | None:
    """Return the cluster with a faster network, or links of its only node; None where these are a graph of many links."""
    if len(cluster.ranks_per_node) > 1:
        network = cluster.network
        if network is None or network.links or network.switches:
            return None
        return _changed(cluster, {"network": network.model_copy(update=_faster(network, factor))})
    (node,) = cluster.nodes
    links = node.resolved().links
    if links is None or links.default is None or links.pairs:
        return None
    faster = links.model_copy(
        update={"default": links.default.model_copy(update=_faster(links.default, factor))}
    )
    return _changed(cluster, {"nodes": (node.model_copy(update={"links": faster}),)})


def _changed(cluster: ClusterSpec, update: Mapping[str, object]) -> ClusterSpec:
    """Return a copy that knows nothing of the paths and links that the cluster has already worked out."""
    return type(cluster).from_dict(cluster.model_copy(update=update).to_dict())


def _faster(link: LinkSpec, factor: float) -> dict[str, object]:
    bandwidth, latency, duplex = link.resolved()
    summing = link.summing() * factor or None
    return {
        "preset": None,
        "bandwidth": bandwidth * factor,
        "latency": latency,
        "duplex": duplex,
        "in_network": summing,
    }


def _on(plan: PlanData, cluster: ClusterSpec) -> PlanData:
    """Return the plan on other links: what its stages' collectives take is computed anew, computing stays."""
    gained = dict.fromkeys(range(cluster.world_size), 0.0)
    stages = []
    for stage in plan.stages:
        moved, gathers = _stage_on(plan, stage, cluster)
        stages.append(moved)
        for rank in stage.devices:
            gained[rank] += gathers
    optimizer = {rank: max(0.0, s + gained[int(rank)]) for rank, s in plan.optimizer_seconds.items()}
    return plan.model_copy(
        update={"cluster": cluster, "stages": tuple(stages), "optimizer_seconds": optimizer}
    )


def _stage_on(plan: PlanData, stage: Stage, cluster: ClusterSpec) -> tuple[Stage, float]:
    """Return a stage on other links, and the seconds that its gathers after the update take more."""
    sharding = stage.sharding
    if sharding is None:
        return stage, 0.0
    mesh = sharding.mesh(stage.devices)

    def ratio(axes: tuple[str, ...], kind: Any, size_bytes: float) -> float:
        groups = all_ranks_along(mesh, axes)
        before = group_links(groups, plan.cluster).seconds(kind, size_bytes)
        return group_links(groups, cluster).seconds(kind, size_bytes) / before if before else 1.0

    added = {False: 0.0, True: 0.0}
    collectives, sums = [], []
    for item in sharding.collectives:
        seconds = item.seconds * ratio(tuple(item.axis.split(JOINT)), item.kind, item.size_bytes)
        added[item.backward] += seconds - item.seconds
        collectives.append(item.model_copy(update={"seconds": seconds}))
    for summed in sharding.sums:
        kind = "reduce_scatter" if summed.scattered else "all_reduce"
        seconds = summed.seconds * ratio(summed.axes, kind, sum(summed.size_bytes))
        sums.append(summed.model_copy(update={"seconds": seconds}))
    gathers = sum(
        item.seconds * (ratio((item.axis,), "all_gather", item.size_bytes) - 1) for item in sharding.gathers
    )
    own = sharding.model_copy(update={"collectives": tuple(collectives), "sums": tuple(sums)})
    return (
        stage.model_copy(
            update={
                "sharding": own,
                "forward_seconds": max(0.0, stage.forward_seconds + added[False]),
                "backward_seconds": max(0.0, stage.backward_seconds + added[True]),
                "backward_input_seconds": max(0.0, stage.backward_input_seconds + added[True]),
            }
        ),
        gathers,
    )


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
    peaks = plan.prediction.peak_memory_bytes
    devices = plan.cluster.devices
    fullest = plan.fullest_device
    share = peaks[str(fullest)] / devices[fullest].memory_bytes
    step = plan.prediction.step_seconds
    points = [
        {
            "x": factor,
            "step_seconds": step if share <= factor else None,
            "fits": share <= factor,
            "text": f"the fullest device, rank {fullest}, is {percent(share / factor)} full"
            if share <= factor
            else f"does not fit: rank {fullest} needs {format_bytes(peaks[str(fullest)])}",
        }
        for factor in sorted((1.0, *MEMORY))
    ]
    return _curve(
        "Memory of the devices", points, "The plan as it is: with less memory it fits or not, no faster."
    )


def _flips(plan: PlanData) -> Iterator[str]:
    """Name the alternatives that would be faster if they fitted, and the memory from which on they do."""
    for other in plan.alternatives:
        faster = other.step_seconds is not None and other.step_seconds < plan.prediction.step_seconds
        if not faster or other.feasible or other.peak_memory_bytes is None:
            continue
        assert other.step_seconds is not None
        ratio = other.step_seconds / plan.prediction.step_seconds
        yield (
            f"With {format_bytes(other.peak_memory_bytes)} on each device, {other.strategy} would win: "
            f"{format_seconds(other.step_seconds)} a step, {ratio:.2f}x this plan's."
        )
