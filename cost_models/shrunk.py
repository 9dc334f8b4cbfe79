"""A part of a cluster as a cluster of its own: some of its devices, wired as they are in the whole.

ranks 4 5 6 of   old 0 1 2 3 · new 4 5 6        ─►        new 0 1 2, whose path 0 to 1 is that from 4 to 5
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from cost_models.cluster import ClusterSpec
from cost_models.links import Link, Path


class _Wiring:
    """Links and paths between some ranks of a cluster. See ``cost_models.topology.Topology``."""

    def __init__(self, whole: ClusterSpec, ranks: Sequence[int]) -> None:
        self._whole, self._ranks = whole, ranks
        self.links: Mapping[str, Link] = whole.links

    def path(self, a: int, b: int) -> Path:
        """Return the path from a rank of the part to another."""
        return self._whole.path(self._ranks[a], self._ranks[b])


def part_of(cluster: ClusterSpec, ranks: Sequence[int]) -> ClusterSpec:
    """Return the cluster of ``ranks``, which rise. Costs of anything on it are those on the whole."""
    used = [cluster.devices[rank] for rank in ranks]
    numbers = {node: number for number, node in enumerate(dict.fromkeys(device.node for device in used))}
    entries = [entry for entry in cluster.nodes for _ in entry.names()]
    nodes = tuple(
        entries[node].model_copy(
            update={
                "name": first.node_name,
                "host": first.host,
                "count": sum(device.node == node for device in used),
                "replicas": 1,
            }
        )
        for node in numbers
        for first in [next(device for device in used if device.node == node)]
    )
    part = cluster.model_construct(
        cluster.model_fields_set,
        name=cluster.name,
        nodes=nodes,
        network=cluster.network,
        provenance=cluster.provenance,
        host_costs=cluster.host_costs,
    )
    part.__dict__["devices"] = tuple(
        replace(device, rank=rank, node=numbers[device.node]) for rank, device in enumerate(used)
    )
    part.__dict__["_topology"] = _Wiring(
        cluster, tuple(ranks)
    )  # a node's cards depend on how many devices it has
    return part
