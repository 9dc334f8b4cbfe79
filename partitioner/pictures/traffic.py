"""The cluster, and what a step sends over it: nodes and devices, links with their load, bytes from device to device."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from partitioner.record.data import PlanData
from runtime.simulate.simulation import Simulation

MOST_RANKS = 64
"""The most devices of a traffic matrix; larger clusters have a row per node."""
MOST_NODES = 64
"""The most nodes that are drawn: as many as the page shows."""
MOST_LINKS = 40
"""The most links that are listed, the busiest ones."""


def device_data(plan: PlanData, simulation: Simulation) -> dict[str, Any]:
    """Return nodes with their devices, and the load of each node's links, inside and to the network."""
    cluster = plan.cluster
    stages: defaultdict[int, list[int]] = defaultdict(list)
    for index, stage in enumerate(plan.stages):
        for rank in stage.devices:
            stages[rank].append(index)
    nodes, links = [], []
    for ranks in cluster.ranks_per_node[:MOST_NODES]:
        devices = [cluster.devices[rank] for rank in ranks]
        nodes.append(
            {
                "name": devices[0].node_name,
                "devices": [
                    {
                        "rank": device.rank,
                        "model": device.model,
                        "memory_bytes": device.memory_bytes,
                        "peak_bytes": plan.prediction.peak_memory_bytes[str(device.rank)],
                        "stages": stages[device.rank],
                    }
                    for device in devices
                ],
            }
        )
        links += _links_of(plan, simulation, ranks)
    return {"nodes": nodes, "links": links, "hidden_nodes": max(0, len(cluster.ranks_per_node) - MOST_NODES)}


def _links_of(plan: PlanData, simulation: Simulation, ranks: tuple[int, ...]) -> list[dict[str, Any]]:
    """Sum up a node's links: those between its devices, and those to a device of another node."""
    cluster = plan.cluster
    name = cluster.devices[ranks[0]].node_name
    outside = next((rank for rank in (0, cluster.world_size - 1) if rank not in ranks), None)
    inner = {link for a in ranks for b in ranks if a != b for link in cluster.path(a, b).links}
    outer: set[str] = set()
    if outside is not None:
        for rank in ranks:
            both = (*cluster.path(rank, outside).links, *cluster.path(outside, rank).links)
            outer.update(link for link in both if link.startswith(f"{name}/"))
    found = []
    for title, other, ids in (("inside", name, inner), ("to the network", "network", outer - inner)):
        if not ids:
            continue
        one = cluster.links[sorted(ids)[0]]
        loads = [simulation.link_bytes.get(link, 0.0) for link in ids]
        busiest = max(
            simulation.link_bytes.get(link, 0.0) / cluster.links[link].bandwidth_bytes_per_second
            for link in ids
        )
        found.append(
            {
                "name": f"{name}, {title}",
                "a": name,
                "b": other,
                "bandwidth": one.bandwidth_bytes_per_second,
                "latency_seconds": one.latency_seconds,
                "sent_bytes": int(sum(loads)),
                "busy": min(1.0, busiest / plan.prediction.step_seconds),
            }
        )
    return found


def traffic_data(plan: PlanData, simulation: Simulation) -> dict[str, Any]:
    """Return bytes from device to device, or from node to node, and the busiest links."""
    cluster = plan.cluster
    if cluster.world_size <= MOST_RANKS:
        row_of = list(range(cluster.world_size))
        labels = [f"rank {rank}" for rank in row_of]
    else:
        row_of = [device.node for device in cluster.devices]
        labels = [cluster.devices[ranks[0]].node_name for ranks in cluster.ranks_per_node]
    pairs: defaultdict[tuple[int, int], float] = defaultdict(float)
    for (source, target), size in simulation.pair_bytes.items():
        if size and row_of[source] != row_of[target]:
            pairs[row_of[source], row_of[target]] += size
    loads = sorted(simulation.link_bytes.items(), key=lambda item: -item[1])[:MOST_LINKS]
    return {
        "ranks": len(labels),
        "labels": labels,
        "pairs": [[source, target, int(size)] for (source, target), size in sorted(pairs.items())],
        "links": [
            [
                link,
                int(size),
                min(
                    1.0, size / cluster.links[link].bandwidth_bytes_per_second / plan.prediction.step_seconds
                ),
            ]
            for link, size in loads
            if size
        ],
    }
