"""The same plan at other rates: faster or slower links and devices, its placement and its programs as they are.

other = on_cluster(plan, with_links(plan.cluster, 2.0))
simulate_plan(other, at_costs_of(other, proved_programs(plan))).step_seconds
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cost_models.cluster import ClusterSpec
from cost_models.conversion import group_links
from cost_models.spec.rates import MeasuredRates
from cost_models.spec.wiring import LinkSpec
from partitioner.record.data import PlanData
from partitioner.record.records import Stage
from runtime.mesh.ranks_along import JOINT, all_ranks_along


def with_links(cluster: ClusterSpec, factor: float) -> ClusterSpec | None:
    """Return the cluster with a faster network, or links of its only node; None where these are a graph of many links."""
    several = len(cluster.ranks_per_node) > 1
    return with_network(cluster, factor) if several else with_node_links(cluster, factor)


def with_network(cluster: ClusterSpec, factor: float, latency: float = 1.0) -> ClusterSpec | None:
    """Return the cluster with bandwidth and latency of its network scaled; None where it is a graph, or there is none."""
    network = cluster.network
    if network is None or network.links or network.switches:
        return None
    return _changed(cluster, {"network": network.model_copy(update=_faster(network, factor, latency))})


def with_node_links(cluster: ClusterSpec, factor: float, latency: float = 1.0) -> ClusterSpec | None:
    """Return the cluster with the links inside its nodes scaled; None where pairs of devices have their own."""
    nodes = []
    for node in cluster.nodes:
        links = node.resolved().links
        if links is None or links.default is None or links.pairs:
            return None
        default = links.default.model_copy(update=_faster(links.default, factor, latency))
        nodes.append(node.model_copy(update={"links": links.model_copy(update={"default": default})}))
    return _changed(cluster, {"nodes": tuple(nodes)})


def with_device_seconds(
    cluster: ClusterSpec, factors: Mapping[str, float], host: float, provenance: str
) -> ClusterSpec:
    """Return the cluster with all that devices of a model compute taking ``factors[model]`` times as long.

    ``host``: the factor of what the hosts take beside it. A GPU's peak stays and it reaches less of it, unless it would
    have to reach more than all; a CPU worker's peak is a measurement.
    """
    costs = cluster.host_costs
    scaled = costs.model_copy(
        update={
            name: getattr(costs, name) * host
            for name in ("compute_overhead", "send_overhead", "receive_overhead")
        }
    )
    for model, factor in factors.items():
        device = next(d for d in cluster.devices if d.model == model)
        # "unaligned" is a part of "matmul", which is slower by the factor already.
        parts = {name: part / factor for name, part in device.efficiency.items() if name != "unaligned"}
        reached = device.counted_as == "cuda" and max(parts.values()) <= 1.0
        rates = MeasuredRates(
            efficiency=parts if reached else None,
            flops_per_second=None
            if reached
            else {name: rate / factor for name, rate in device.flops_per_second.items()},
            memory_bandwidth_bytes_per_second=None
            if reached
            else device.memory_bandwidth_bytes_per_second / factor,
            launch_overhead_seconds=device.launch_overhead_seconds * factor,
            kernel_overhead_seconds=device.kernel_overhead_seconds * factor,
            op_times=None if device.op_times is None else device.op_times.slower(factor),
            host_costs=scaled,
        )
        cluster = cluster.with_device_rates(rates, provenance, model)
    return cluster


def _changed(cluster: ClusterSpec, update: Mapping[str, object]) -> ClusterSpec:
    """Return a copy that knows nothing of the paths and links that the cluster has already worked out."""
    return type(cluster).from_dict(cluster.model_copy(update=update).to_dict())


def _faster(link: LinkSpec, factor: float, latency_factor: float) -> dict[str, object]:
    bandwidth, latency, duplex = link.resolved()
    full = link.filled()
    return {
        "preset": None,
        "bandwidth": bandwidth * factor,
        "latency": latency * latency_factor,
        "duplex": duplex,
        "in_network": full.in_network and full.in_network * factor,
        "mesh": full.mesh,
        "rings": full.rings and {devices: rate * factor for devices, rate in full.rings.items()},
    }


def on_cluster(plan: PlanData, cluster: ClusterSpec) -> PlanData:
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
        collectives.append(replace(item, seconds=seconds))
    for summed in sharding.sums:
        kind = "reduce_scatter" if summed.scattered else "all_reduce"
        seconds = summed.seconds * ratio(summed.axes, kind, sum(summed.size_bytes))
        sums.append(replace(summed, seconds=seconds))
    gathers = sum(
        item.seconds * (ratio((item.axis,), "all_gather", item.size_bytes) - 1) for item in sharding.gathers
    )
    changed = sharding.model_copy(update={"collectives": tuple(collectives), "sums": tuple(sums)})
    return (
        stage.model_copy(
            update={
                "sharding": changed,
                "forward_seconds": max(0.0, stage.forward_seconds + added[False]),
                "backward_seconds": max(0.0, stage.backward_seconds + added[True]),
                "backward_input_seconds": max(0.0, stage.backward_input_seconds + added[True]),
            }
        ),
        gathers,
    )


def at_seconds(
    plan: PlanData,
    cluster: ClusterSpec,
    computing: Mapping[int, float],
    updating: Mapping[int, float],
    summing: float,
) -> PlanData:
    """Return the plan on ``cluster``, with what it takes scaled: ``computing`` and ``updating`` (the optimizer) by device.

    A stage takes as long as its slowest device, its collectives included. ``summing``: the factor of sums of gradients.
    """
    stages = []
    for stage in plan.stages:
        factor = max(computing.get(device, 1.0) for device in stage.devices)
        seconds = {name: getattr(stage, name) * factor for name in _SECONDS}
        sharding = stage.sharding
        if sharding is not None:
            sums = tuple(replace(s, seconds=s.seconds * summing) for s in sharding.sums)
            sharding = sharding.model_copy(update={"sums": sums})
        stages.append(stage.model_copy(update={**seconds, "sharding": sharding}))
    optimizer = {rank: s * updating.get(int(rank), 1.0) for rank, s in plan.optimizer_seconds.items()}
    return plan.model_copy(
        update={"cluster": cluster, "stages": tuple(stages), "optimizer_seconds": optimizer}
    )


_SECONDS = ("forward_seconds", "backward_seconds", "backward_input_seconds", "backward_weight_seconds")
