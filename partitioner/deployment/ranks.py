"""Ranks and the devices of the plan that they play.

    nodes of the cluster file            where torchrun started processes          ranks
    a  host: gpu-a  devices 0 1 (2)      gpu-b.site: global ranks 0 1              0 -> 3, 1 -> 4
    b  host: gpu-b  devices 3 4          gpu-a.site: global ranks 2 3              2 -> 0, 3 -> 1

If nodes name their ``host``, the processes on that host play its devices in the order of LOCAL_RANK, whatever their
global ranks. Everywhere else rank r plays the r-th device that the plan uses. Idle devices (2 above) get no rank.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from cost_models.units import counted, listed
from partitioner.record.data import PlanData
from runtime.program.relabel import RankMap

_HERE = ("localhost", "::1")


@dataclass(frozen=True)
class HostPlace:
    """The place where a process runs. ``names``: those that its machine answers to, first the one it calls itself."""

    names: tuple[str, ...]
    local_rank: int


def own_place(plan: PlanData) -> HostPlace:
    """Find this process's place. Looking names up can take seconds, so it is done only if the plan compares them."""
    named, _ = _devices_by_host(plan)
    names = host_names() if named else (socket.gethostname(),)
    return HostPlace(names, int(os.environ.get("LOCAL_RANK", "0")))


def host_names() -> tuple[str, ...]:
    """List this machine's name, its full name, and its addresses: the one behind the name, and the one to the launch."""
    name = socket.gethostname()
    names = [name, socket.getfqdn()]
    with suppress(OSError):  # a machine that cannot look itself up has no address to compare
        names += [str(entry[4][0]) for entry in socket.getaddrinfo(name, None)]
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way_out:
        way_out.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))  # sends nothing
        names.append(str(way_out.getsockname()[0]))
    return tuple(dict.fromkeys(names))


def ranks_by_host(plan: PlanData, places: Sequence[HostPlace]) -> tuple[RankMap | None, list[str]]:
    """Return the map, or every difference between the hosts that were planned and those where the processes run."""
    named, anywhere = _devices_by_host(plan)
    playing: dict[str, list[int]] = {host: [] for host in named}
    machines: dict[str, set[str]] = {host: set() for host in named}
    strangers: list[int] = []
    for rank, place in enumerate(places):
        host = next((host for host in named if any(same_host(host, name) for name in place.names)), None)
        if host is None:
            strangers.append(rank)
        else:
            playing[host].append(rank)
            machines[host].add(place.names[0])
    problems = []
    for host, devices in named.items():
        ranks = playing[host]
        where = f"host {host}: the plan has {counted(len(devices), 'rank')} there"
        if len(machines[host]) > 1:
            problems.append(f"{where}, and {' and '.join(sorted(machines[host]))} both go by that name")
        elif len(ranks) != len(devices):
            problems.append(f"{where}, {_running(ranks)}")
    if anywhere and len(strangers) != len(anywhere):
        elsewhere = f"nodes without a host: the plan has {counted(len(anywhere), 'rank')} there"
        problems.append(f"{elsewhere}, {_running(strangers)}{_hosts(places, strangers)}")
    elif strangers and not anywhere:
        problems.append(f"no host of the plan: {_running(strangers)}{_hosts(places, strangers)}")
    if problems:
        return None, problems
    device_of = dict(zip(strangers, anywhere, strict=True))
    for host, devices in named.items():
        ranks = sorted(playing[host], key=lambda rank: (places[rank].local_rank, rank))
        device_of.update(zip(ranks, devices, strict=True))
    return RankMap(tuple(device_of[rank] for rank in range(len(places)))), []


def same_host(a: str, b: str) -> bool:
    """Tell whether two names can mean one machine: equal, or one of them short and equal to the other's first part."""
    a, b = (name.lower().rstrip(".") for name in (a, b))
    if a == b:
        return True
    if _is_address(a) or _is_address(b):
        return False
    return ("." not in a or "." not in b) and a.partition(".")[0] == b.partition(".")[0]


def _devices_by_host(plan: PlanData) -> tuple[Mapping[str, list[int]], list[int]]:
    """Return the used devices of each host that the cluster names, and those that may be anywhere."""
    named: dict[str, list[int]] = {}
    anywhere: list[int] = []
    for index in plan.used_devices:
        host = plan.cluster.devices[index].host
        if host is None or host.lower() in _HERE or host.startswith("127."):
            anywhere.append(index)
        else:
            named.setdefault(host, []).append(index)
    return named, anywhere


def _running(ranks: Sequence[int]) -> str:
    if not ranks:
        return "none is running"
    return f"{len(ranks)} {'is' if len(ranks) == 1 else 'are'} running (global rank {listed(ranks, 8)})"


def _hosts(places: Sequence[HostPlace], ranks: Sequence[int]) -> str:
    hosts = sorted({places[rank].names[0] for rank in ranks})
    return f" on {listed(hosts, 4)}" if hosts else ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
