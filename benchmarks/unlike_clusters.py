"""Clusters of four local workers that are unlike in speed and memory, for plans that are verified on this machine.

    2 + 2        two nodes of two, the second of a third the speed and half the memory
    1 + 3        one fast worker, and a node of three slow ones
    2 + 1 + 1    a slow node, and two single workers faster than it, by unlike factors

Rates are so small that even tiny models are worth dividing, whatever the machine that verifies them computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cost_models.cluster import ClusterSpec
from partitioner import Plan

LINK = {"bandwidth": "10GB/s", "latency": "1us"}


def workers(name: str, nodes: Sequence[tuple[int, float, str]]) -> ClusterSpec:
    """Make nodes of (workers, speed, memory); every pair of workers is joined by ``LINK``."""
    data = [
        {
            "name": f"node-{number}",
            "count": count,
            "device": {
                "name": f"worker-{speed:g}M",
                "kind": "cpu",
                "memory": memory,
                "memory_bandwidth": f"{speed:g}MB/s",
                "flops": {"float64": f"{10 * speed:g}M", "float32": f"{20 * speed:g}M"},
                "launch_overhead": f"{6 / speed:g}us",
            },
            "links": {"default": LINK},
        }
        for number, (count, speed, memory) in enumerate(nodes)
    ]
    network = {**LINK, "per": "device"}
    return ClusterSpec.from_dict({"name": name, "nodes": data, "network": network}, source=name)


UNLIKE: Mapping[str, ClusterSpec] = {
    "2 + 2": workers("2 + 2", [(2, 30, "8GiB"), (2, 10, "4GiB")]),
    "1 + 3": workers("1 + 3", [(1, 30, "8GiB"), (3, 10, "4GiB")]),
}
THREE_KINDS: Mapping[str, ClusterSpec] = {
    "2 + 1 + 1": workers("2 + 1 + 1", [(2, 10, "8GiB"), (1, 30, "4GiB"), (1, 20, "4GiB")])
}


def with_less_memory(cluster: ClusterSpec, plan: Plan, share: float) -> ClusterSpec:
    """Give each node's devices ``share`` of the memory that ``plan`` takes of one of them, of any where it uses none."""
    data, peaks = cluster.to_dict(), plan.prediction.peak_memory_bytes
    for node in data["nodes"]:
        own = [peaks.get(device.rank, 0) for device in cluster.devices if device.node_name == node["name"]]
        most = max(own) or max(peaks.values())
        node["device"] |= {"memory": max(2**20, int(share * most)), "memory_reserved": 0, "memory_process": 0}
    return ClusterSpec.from_dict(data, source=cluster.name)
