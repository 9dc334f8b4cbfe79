"""One cluster of all that was read: each part from the file that says it, and a list of what none says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cost_models.cluster import ClusterSpec
from cost_models.errors import ClusterError
from cost_models.from_machines.device_names import device_of
from cost_models.from_machines.network import network_of
from cost_models.from_machines.node_links import links_of
from cost_models.from_machines.seen import Gpu, GpuWiring, Missing, Sourced
from cost_models.from_machines.written import cluster_yaml, plain, sources


@dataclass(frozen=True)
class Readings:
    """All that was read. None or empty: no file of that kind."""

    machine: GpuWiring | None = None
    gpus: Sequence[Gpu] = ()
    nccl: tuple[GpuWiring, Sequence[Gpu]] | None = None
    host_memory: Sourced | None = None


@dataclass(frozen=True)
class Chosen:
    """Names that the user gives in the place of files."""

    device: str | None = None
    network: str | None = None
    nodes: int | None = None


@dataclass(frozen=True)
class FoundCluster:
    """A cluster with the source of each value, and what no file says."""

    document: dict[str, Any]
    missing: Sequence[Missing] = field(default_factory=list)

    @property
    def spec(self) -> ClusterSpec:
        """Return the cluster; ``ClusterError`` where the parts do not make one."""
        return ClusterSpec.from_dict(plain(self.document), "the cluster of these files")

    def __str__(self) -> str:
        return cluster_yaml(self.document, self.missing)

    def to_dict(self) -> dict[str, Any]:
        """Return the cluster, the sources by key path and what is missing, as data."""
        return {
            "cluster": plain(self.document),
            "sources": sources(self.document),
            "missing": [str(each) for each in self.missing],
        }


def found_cluster(seen: Readings, chosen: Chosen) -> FoundCluster:
    """Combine all that was read; ``ClusterError`` says which two files differ, or what is needed and not said."""
    missing: list[Missing] = []
    count = _count(seen)
    wiring = _wiring(seen)
    gpus = seen.gpus or (seen.nccl[1] if seen.nccl is not None else ())
    device = device_of(gpus, chosen.device)
    links = links_of(
        wiring or GpuWiring(count.value, count.source), _with_pcie(gpus, seen), device.value, missing
    )
    nodes = chosen.nodes or 1
    node: dict[str, Any] = {
        "name": "node" if nodes == 1 else f"node[0-{nodes - 1}]",
        "count": count,
        "device": device,
    }
    if links is not None:
        node["links"] = links
    if seen.host_memory is not None:
        node["host_memory"] = seen.host_memory
    document: dict[str, Any] = {"version": 1, "nodes": [node]}
    if nodes > 1:
        document["network"] = network_of(wiring, chosen.network, missing)
    found = FoundCluster(document, missing)
    _ = found.spec  # refuses what is no cluster before anything is written
    return found


def _wiring(seen: Readings) -> GpuWiring | None:
    """Return what joins the GPUs by the matrix, else by NCCL; network cards by NCCL, which knows their speed."""
    if seen.nccl is None or seen.machine is None:
        return seen.machine if seen.nccl is None else seen.nccl[0]
    return replace(seen.machine, cards=seen.nccl[0].cards or seen.machine.cards)


def _with_pcie(gpus: Sequence[Gpu], seen: Readings) -> Sequence[Gpu]:
    """Return the GPUs of the file that says their PCIe."""
    told = any(gpu.pcie_generation for gpu in gpus)
    return gpus if told or seen.nccl is None else seen.nccl[1]


def _count(seen: Readings) -> Sourced:
    """Return the number of GPUs of a machine, on which all files agree."""
    wirings = [seen.machine, seen.nccl[0] if seen.nccl is not None else None]
    found = [Sourced(wiring.count, wiring.source) for wiring in wirings if wiring is not None]
    found += [Sourced(len(seen.gpus), seen.gpus[0].source)] if seen.gpus else []
    if not found:
        raise ClusterError(
            "cannot count the GPUs", ["no file names them"], ["--topo FILE, --gpus FILE or --nccl-xml FILE"]
        )
    for other in found[1:]:
        if other.value != found[0].value:
            raise ClusterError(
                "cannot put the files together",
                [f"{found[0].source} has {found[0].value} GPUs, {other.source} {other.value}"],
                ["save both on one machine, with all of its GPUs in sight"],
            )
    return found[0]
