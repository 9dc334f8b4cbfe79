"""The entries of ``nodes``: how many nodes there are, what they are called, and how many GPUs of each take part."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from cost_models.errors import ClusterError
from cost_models.from_machines.host_lists import write_hosts
from cost_models.from_machines.jobs import JobNodes
from cost_models.from_machines.seen import Sourced


@dataclass(frozen=True)
class NodeGroup:
    """Nodes that follow each other, have one pattern of names and the same number of GPUs."""

    name: Sourced | str
    host: Sourced | str | None
    count: Sourced


def node_groups(
    job: JobNodes | None, hosts: tuple[str, ...], chosen: int | None, of_machine: Sourced | None
) -> tuple[int, list[NodeGroup]]:
    """Return the number of nodes and their entries, in the order of the job.

    ``hosts``: the names where there is no job, such as those of its switches; ``chosen``: the number by hand;
    ``of_machine``: the GPUs of one machine.
    """
    hosts = job.hosts if job is not None else hosts
    known = len(hosts) or (job.nodes if job is not None else None)
    if chosen is not None and known is not None and chosen != known:
        where = job.source if job is not None else "the file of --switches"
        raise ClusterError(
            "cannot read --nodes", [f"{where} says {known}, --nodes {chosen}"], ["leave out --nodes"]
        )
    nodes = known or chosen or 1
    counts = _counts(job, nodes, of_machine)
    if not hosts:
        source = Sourced(_numbered(nodes), job.source) if job is not None else _numbered(nodes)
        return nodes, [NodeGroup(source, None, counts[0])]
    groups = []
    for _, members in itertools.groupby(zip(hosts, counts, strict=True), key=lambda pair: pair[1].value):
        together = list(members)
        for pattern in write_hosts([host for host, _ in together]):
            name = Sourced(pattern, job.source) if job is not None else pattern
            groups.append(NodeGroup(name, name, together[0][1]))
    return nodes, groups


def _numbered(nodes: int) -> str:
    return "node" if nodes == 1 else f"node[0-{nodes - 1}]"


def _counts(job: JobNodes | None, nodes: int, of_machine: Sourced | None) -> list[Sourced]:
    """Return the GPUs of each node: those of the job, else those of the machine."""
    if job is not None and job.counts is not None:
        most = max(job.counts)
        if of_machine is not None and most > of_machine.value:
            raise ClusterError(
                "cannot put the files together",
                [f"{of_machine.source} has {of_machine.value} GPUs, {job.counts_source} {most}"],
                ["save both on the nodes of one job"],
            )
        return [Sourced(count, job.counts_source) for count in job.counts]
    if of_machine is None:
        where = job.source if job is not None else "the file of --switches"
        raise ClusterError(
            "cannot count the GPUs",
            [f"{where} names nodes, and no file says how many each has"],
            ["--topo FILE, --gpus FILE or --nccl-xml FILE", "SLURM_GPUS_PER_NODE=8 in the file of --job"],
        )
    return [of_machine] * nodes
