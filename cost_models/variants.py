"""Other clusters made of one: with measured rates, with more nodes, with more memory in each device, or a part of it.

ranks 4 5 6 of   old 0 1 2 3 · new 4 5 6        ─►        new 0 1 2, whose path 0 to 1 is that from 4 to 5
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from cost_models.cluster import ClusterSpec
from cost_models.errors import ClusterError
from cost_models.links import Link, Path
from cost_models.measure.calibration import Calibration
from cost_models.measure.fit import fit
from cost_models.spec.presets import MACHINE_NETWORKS
from cost_models.spec.sections import DeviceSpec, NodeSpec
from cost_models.spec.wiring import NetworkSpec


def calibrated(
    cluster: ClusterSpec, calibration: Calibration, names: Collection[str] | None = None
) -> ClusterSpec:
    """Return the cluster with the GPUs that were measured at their measured rates. ``names``: as of ``fit``."""
    model, machine = calibrated_model(cluster, calibration), calibration.machine
    like = next(device for device in cluster.devices if device.model == model)
    provenance = f"calibration of {calibration.date} on {machine.card}, torch {machine.torch}"
    return cluster.with_device_rates(fit(calibration, like, names).rates, provenance, model)


def calibrated_model(cluster: ClusterSpec, calibration: Calibration) -> str:
    """Return the model of the cluster's GPUs that were measured: the only one, or the one called like the card.

    "H100-80GB" is the card that calls itself "NVIDIA H100 80GB HBM3".
    """
    card = calibration.machine.card
    models = sorted({device.model for device in cluster.devices if device.kind == "cuda"})
    measured = [model for model in models if all(word in card for word in model.split("-"))]
    if len(models) == 1:
        measured = models
    if len(measured) != 1:
        raise ClusterError(
            f"cannot give {cluster.name} the rates of {card}",
            [f"it has {', '.join(models) or 'no GPU'}"],
            ["give a cluster of this card, such as H100-80GB:1"],
        )
    return measured[0]


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
    counts = Counter(device.node for device in used)
    numbers = {node: number for number, node in enumerate(counts)}
    firsts = {device.node: device for device in reversed(used)}
    entries = [entry for entry in cluster.nodes for _ in entry.names()]
    nodes = tuple(
        entries[node].model_copy(
            update={
                "name": firsts[node].node_name,
                "host": firsts[node].host,
                "count": count,
                "replicas": 1,
            }
        )
        for node, count in counts.items()
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
