"""The same cluster with more nodes, or with more memory in each device: for the question what would be enough."""

from __future__ import annotations

from cost_models.cluster import ClusterSpec
from cost_models.cluster_schema import DeviceSpec, NetworkSpec, NodeSpec
from cost_models.errors import ClusterError
from cost_models.presets import MACHINE_NETWORKS


def with_more_nodes(cluster: ClusterSpec, count: int) -> ClusterSpec | None:
    """Add nodes like those that there are most of; None where it is not known how they would be joined."""
    like = max(cluster.nodes, key=lambda entry: len(entry.names()))
    network = cluster.network
    if network is None and like.preset is not None and like.preset in MACHINE_NETWORKS:
        network = NetworkSpec.model_validate(MACHINE_NETWORKS[like.preset])
    added = like.model_copy(update={"name": "further", "host": None, "replicas": count})
    try:
        # read anew: what is joined has to hold for the new nodes as well
        return ClusterSpec.from_dict(
            cluster.model_copy(
                update={
                    "name": f"{cluster.name} + {count}",
                    "nodes": (*cluster.nodes, added),
                    "network": network,
                }
            ).to_dict()
        )
    except ClusterError:
        return None


def with_memory(cluster: ClusterSpec, factor: float) -> ClusterSpec:
    """Give each device ``factor`` times its usable memory."""
    nodes = tuple(_with_memory(entry, factor) for entry in cluster.nodes)
    return ClusterSpec.from_dict(cluster.model_copy(update={"nodes": nodes}).to_dict())


def _with_memory(entry: NodeSpec, factor: float) -> NodeSpec:
    device = entry.resolved().device
    assert device is not None  # validated: every node has devices
    full = device.resolved()
    assert full.memory is not None
    usable = full.memory - (full.memory_reserved or 0)
    grown = DeviceSpec.model_copy(device, update={"memory": round(usable * factor), "memory_reserved": 0})
    return entry.model_copy(update={"device": grown})
