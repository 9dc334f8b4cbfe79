"""SLURM's topology.conf: which nodes are behind which switch.

SwitchName=leaf0 Nodes=node[01-16]
SwitchName=spine Switches=leaf[0-1]     # upper levels have switches as members
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cost_models.errors import ClusterError
from cost_models.from_machines.host_lists import read_hosts, write_hosts
from cost_models.from_machines.seen import Missing, Sourced, ToolText

MAKE = "`scontrol show topology` and /etc/slurm/topology.conf say SwitchName=… Nodes=… or Switches=…"
_PAIR = re.compile(r"(\w+)=(\S+)")


@dataclass(frozen=True)
class FabricSwitch:
    """A switch with the names of its members: nodes, or other switches."""

    name: str
    members: tuple[str, ...]
    of_nodes: bool
    line: int
    source: str


def read_switches(text: ToolText) -> tuple[FabricSwitch, ...]:
    """Read the switches in the order of the file; ``ClusterError`` names the line of what is none."""
    found: dict[str, FabricSwitch] = {}
    number = 0
    while number < len(text.lines):
        first = number + 1
        line = ""
        while number < len(text.lines):
            part = text.lines[number].partition("#")[0].rstrip()
            number += 1
            line += part.removesuffix("\\")
            if not part.endswith("\\"):
                break
        if line.strip():
            switch = _switch(text, first, line)
            if switch.name in found:
                raise text.wrong(first, f"the switch {switch.name} is there twice", MAKE)
            found[switch.name] = switch
    if not found:
        raise text.wrong(None, "it names no switch", MAKE)
    _check_tree(text, found)
    return tuple(found.values())


def _check_tree(text: ToolText, switches: Mapping[str, FabricSwitch]) -> None:
    """Refuse switches that are no tree: members behind two, unknown ones, circles."""
    parent: dict[str, FabricSwitch] = {}
    for switch in switches.values():
        for member in switch.members:
            if (member in switches) == switch.of_nodes:
                cause = (
                    f"{member} is a switch, not a node" if switch.of_nodes else f"there is no switch {member}"
                )
                raise text.wrong(switch.line, cause, MAKE)
            if member in parent:
                cause = f"{member} is behind {switch.name}, and behind {parent[member].name} (line {parent[member].line})"
                raise text.wrong(switch.line, cause, "a cluster file has trees; leave one of the two out")
            parent[member] = switch
    for switch in switches.values():
        at, steps = switch, 0
        while at.name in parent and steps <= len(switches):
            at, steps = parent[at.name], steps + 1
        if steps > len(switches):
            raise text.wrong(switch.line, f"{switch.name} is behind itself", MAKE)


def _switch(text: ToolText, number: int, line: str) -> FabricSwitch:
    keys = {key.lower(): value for key, value in _PAIR.findall(line)}
    if "blockname" in keys or "blocksizes" in keys:
        raise text.wrong(
            number,
            "it is of blocks (topology/block), which say no levels of switches",
            "blocks are machines that NVLink joins: plan with a preset such as gb200-tray",
        )
    members = keys.get("switches") or keys.get("nodes")  # `scontrol` lists the nodes of upper levels as well
    if "switchname" not in keys or members is None:
        raise text.wrong(
            number, f"expected SwitchName=… with Nodes=… or Switches=…, got {line.strip()[:80]!r}", MAKE
        )
    try:
        names = read_hosts(members)
    except ValueError as error:
        raise text.wrong(number, f"expected {error}, got {members[:80]!r}", MAKE) from error
    return FabricSwitch(keys["switchname"], names, "switches" not in keys, number, text.at(number))


def hosts_of(switches: tuple[FabricSwitch, ...]) -> tuple[str, ...]:
    """List the nodes behind all switches, in the order of the file."""
    return tuple(dict.fromkeys(name for switch in switches if switch.of_nodes for name in switch.members))


def network_switches(
    switches: tuple[FabricSwitch, ...], hosts: tuple[str, ...], missing: list[Missing]
) -> list[dict[str, Any]]:
    """Return ``network.switches`` of the hosts of a job; ``ClusterError`` if one of them is behind no switch."""
    if not hosts:
        raise ClusterError(
            "cannot tell which nodes are behind which switch",
            ["torchrun's variables name no nodes"],
            ["write SLURM_JOB_NODELIST=… into the file of --job", "leave out --switches"],
        )
    known = set(hosts_of(switches))
    outside = [host for host in hosts if host not in known]
    if outside:
        raise ClusterError(
            "cannot put the files together",
            [f"{outside[0]} of the job is behind no switch of {switches[0].source.partition(', line')[0]}"],
            ["leave out --switches", "take the topology.conf of the cluster that the job runs on"],
        )
    missing.append(
        Missing(
            "oversubscription of the switches: 1, so none",
            "network.switches of the file takes it (LinkSpeed of topology.conf has no unit)",
        )
    )
    kept = _reaching({switch.name: switch for switch in switches}, set(hosts))
    return [
        {
            "name": switch.name,
            "members": Sourced(write_hosts([name for name in switch.members if name in kept]), switch.source),
        }
        for switch in switches
        if switch.name in kept
    ]


def _reaching(switches: Mapping[str, FabricSwitch], hosts: set[str]) -> set[str]:
    """Return the hosts, and the switches that they are behind."""
    kept, grew = set(hosts), True
    while grew:
        more = {name for name, switch in switches.items() if kept.intersection(switch.members)}
        grew = not more <= kept
        kept |= more
    return kept
