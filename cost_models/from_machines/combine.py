"""One cluster of all that was read: each part from the file that says it, and a list of what none says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cost_models.cluster import ClusterSpec
from cost_models.errors import ClusterError, UsageError
from cost_models.from_machines.described_device import described_device
from cost_models.from_machines.hardware_files import HardwareFile
from cost_models.from_machines.host_lists import read_hosts
from cost_models.from_machines.jobs import JobNodes
from cost_models.from_machines.measured_links import with_inside_rates
from cost_models.from_machines.nccl_tests import MeasuredRate
from cost_models.from_machines.network import network_of
from cost_models.from_machines.node_groups import node_groups
from cost_models.from_machines.node_links import links_of
from cost_models.from_machines.seen import Gpu, GpuWiring, Missing, Sourced
from cost_models.from_machines.switches import FabricSwitch, hosts_of, network_switches
from cost_models.from_machines.written import cluster_yaml, plain, sources


@dataclass(frozen=True)
class Readings:
    """All that was read. None or empty: no file of that kind."""

    machine: GpuWiring | None = None
    gpus: Sequence[Gpu] = ()
    nccl: tuple[GpuWiring, Sequence[Gpu]] | None = None
    job: JobNodes | None = None
    switches: tuple[FabricSwitch, ...] = ()
    rates: Sequence[MeasuredRate] = ()
    hardware: HardwareFile | None = None
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
    wiring, count = _wiring(seen), _count(seen)
    gpus = seen.gpus or (seen.nccl[1] if seen.nccl is not None else ()) or _tested_gpus(seen.rates)
    hardware = seen.hardware or HardwareFile(Gpu("", ""))
    job = seen.job or (None if chosen.nodes or seen.switches else _tested_job(seen.rates))
    number = chosen.nodes or (hardware.nodes if job is None and not seen.switches else None)
    nodes, groups = node_groups(job, hosts_of(seen.switches), number, count)
    preset, device = described_device(gpus, chosen.device, seen.hardware, missing)
    entries = []
    for group in groups:
        alike = wiring.first(group.count.value) if wiring is not None else GpuWiring(group.count.value, "")
        if hardware.links and wiring is None and alike.count > 1:
            links: dict[str, Any] | None = {"default": hardware.links}
        else:
            links = None if preset is None else links_of(alike, _with_pcie(gpus, seen), preset, missing)
        links = with_inside_rates(links, alike.count, seen.rates, missing)
        entry = {
            "name": group.name,
            "host": group.host,
            "count": group.count,
            "device": device,
            "links": links,
        }
        entry["host_memory"] = seen.host_memory
        entries.append({key: value for key, value in entry.items() if value is not None})
    document: dict[str, Any] = {"version": 1, "nodes": entries}
    if nodes > 1:
        document["network"] = network_of(wiring, chosen.network, hardware.network, seen.rates, missing)
        if seen.switches:
            hosts = seen.job.hosts if seen.job is not None else hosts_of(seen.switches)
            document["network"]["switches"] = network_switches(seen.switches, hosts, missing)
    elif chosen.network is not None and job is None and not seen.switches and hardware.nodes is None:
        raise UsageError("cannot read --network", ["one machine has no network to others"], ["--nodes N"])
    found = FoundCluster(document, list(dict.fromkeys(missing)))
    _ = found.spec  # refuses what is no cluster before anything is written
    return found


def _wiring(seen: Readings) -> GpuWiring | None:
    """Return what joins the GPUs by the matrix, else by NCCL; network cards by NCCL, which knows their speed."""
    if seen.nccl is None or seen.machine is None:
        return seen.machine if seen.nccl is None else seen.nccl[0]
    return replace(seen.machine, cards=seen.nccl[0].cards or seen.machine.cards)


def _tested_gpus(rates: Sequence[MeasuredRate]) -> Sequence[Gpu]:
    """Return the GPUs of a machine by the lines of nccl-tests: those of the run with most of them."""
    return max((rate.gpus for rate in rates), key=len, default=())


def _tested_job(rates: Sequence[MeasuredRate]) -> JobNodes | None:
    """Return the hosts of the run on most of them."""
    named = [rate for rate in rates if rate.hosts]
    if not named:
        return None
    rate = max(named, key=lambda rate: len(rate.hosts))
    source = f"{rate.gpus[0].source}: hosts of the test"
    try:
        hosts = read_hosts(",".join(rate.hosts))
    except ValueError:  # names that a cluster file does not have
        hosts = ()
    return JobNodes(len(rate.hosts), hosts, rate.per_host, source, source)


def _with_pcie(gpus: Sequence[Gpu], seen: Readings) -> Sequence[Gpu]:
    """Return the GPUs of the file that says their PCIe."""
    told = any(gpu.pcie_generation for gpu in gpus)
    return gpus if told or seen.nccl is None else seen.nccl[1]


def _count(seen: Readings) -> Sourced | None:
    """Return the number of GPUs of a machine, on which all files agree; None if none says it."""
    wirings = [seen.machine, seen.nccl[0] if seen.nccl is not None else None]
    found = [Sourced(wiring.count, wiring.source) for wiring in wirings if wiring is not None]
    found += [Sourced(len(seen.gpus), seen.gpus[0].source)] if seen.gpus else []
    for other in found[1:]:
        if other.value != found[0].value:
            raise ClusterError(
                "cannot put the files together",
                [f"{found[0].source} has {found[0].value} GPUs, {other.source} {other.value}"],
                ["save both on one machine, with all of its GPUs in sight"],
            )
    if not found and (tested := _tested_gpus(seen.rates)):
        return Sourced(len(tested), tested[0].source)
    if not found and seen.hardware is not None:
        return seen.hardware.count
    return found[0] if found else None
