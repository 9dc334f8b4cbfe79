"""Checks of a whole cluster file, across its sections: names used twice, unknown members, nodes that nothing joins.

Each check gets what could be read. ``None`` stands for an entry that could not: its names are not known, so nothing
is called unknown then.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from cost_models.spec.fields import Problem, did_you_mean
from cost_models.spec.sections import NodeSpec
from cost_models.spec.wiring import NetworkSpec
from cost_models.units import listed

MAX_DEVICES = 65536


def cluster_problems(nodes: list[NodeSpec | None], network: NetworkSpec | None) -> list[Problem]:
    """Find problems between sections: names used twice, unknown members, nodes that nothing joins."""
    entry_of: dict[str, int] = {}
    found: list[Problem] = []
    total = 0
    for i, node in enumerate(nodes):
        if node is None:
            continue
        names = node.names()
        total += len(names) * (node.resolved().count or 1)
        twice = [name for name in names if name in entry_of]
        if twice:
            found.append(
                (f"nodes[{i}].name", f'expected a new name, got "{twice[0]}" of nodes[{entry_of[twice[0]]}]')
            )
        entry_of.update({name: i for name in names if name not in entry_of})
    if total > MAX_DEVICES:
        found.append(("nodes", f"expected at most {MAX_DEVICES} devices, got {total}"))
        return found
    complete = all(node is not None for node in nodes)
    counts = {name: nodes[i].resolved().count or 1 for name, i in entry_of.items()}  # type: ignore[union-attr]
    if network is None:
        if len(entry_of) > 1:
            found.append(("network", f"expected a network that joins the {len(entry_of)} nodes, got nothing"))
    elif network.links:
        found += _graph_problems(network, counts, complete)
    else:
        found += _switch_problems(network, tuple(entry_of), complete)
    found += _inner_link_problems(nodes, network)
    return found


def _inner_link_problems(nodes: list[NodeSpec | None], network: NetworkSpec | None) -> Iterable[Problem]:
    wired = {end for link in network.links for end in (link.a, link.b)} if network else set()
    for i, node in enumerate(nodes):
        full = node.resolved() if node is not None else None
        if full is None or full.links is not None or (full.count or 1) == 1:
            continue
        ends = [f"{name}:{index}" for name in full.names() for index in range(full.count or 1)]
        if not all(end in wired for end in ends):
            yield (
                f"nodes[{i}].links",
                f"expected what joins its {full.count} devices, such as NVLink4, got nothing",
            )


def _switch_problems(network: NetworkSpec, nodes: tuple[str, ...], complete: bool) -> Iterable[Problem]:
    switches = {switch.name: i for i, switch in enumerate(network.switches)}
    parent: dict[str, str] = {}
    for i, switch in enumerate(network.switches):
        if switch.name in nodes or switches[switch.name] != i:
            yield f"network.switches[{i}].name", f'expected a name of its own, got "{switch.name}" twice'
        for member in switch.member_names():
            place = f"network.switches[{i}].members"
            if member not in nodes and member not in switches:
                if complete:
                    hint = did_you_mean(member, (*nodes, *switches))
                    yield place, f'expected names of nodes or switches, got "{member}"{hint}'
            elif member in parent:
                yield place, f'expected each member in one switch, got "{member}" also in "{parent[member]}"'
            else:
                parent[member] = switch.name
    for name in switches:
        if _climbs_forever(name, parent):
            yield (
                f"network.switches[{switches[name]}].members",
                f'expected no circle, got "{name}" inside itself',
            )
    outside = [name for name in nodes if name not in parent]
    if network.switches and outside and complete:
        yield "network.switches", f"expected every node in a switch, got none for {listed(outside, 4)}"


def _climbs_forever(name: str, parent: dict[str, str]) -> bool:
    at, steps = parent.get(name), 0
    while at is not None and at != name and steps <= len(parent):
        at, steps = parent.get(at), steps + 1
    return at == name


def _graph_problems(network: NetworkSpec, counts: dict[str, int], complete: bool) -> Iterable[Problem]:
    neighbours: dict[str, set[str]] = {}
    seen: dict[frozenset[str], int] = {}
    first_use: dict[str, str] = {}
    for i, link in enumerate(network.links):
        place = f"network.links[{i}]"
        ends = frozenset((link.a, link.b))
        if link.a == link.b:
            yield place, f'expected two ends, got "{link.a}" twice'
        elif ends in seen:
            yield (
                place,
                f'expected each pair once, got "{link.a}" and "{link.b}" also in network.links[{seen[ends]}]',
            )
        seen.setdefault(ends, i)
        for key, end in (("a", link.a), ("b", link.b)):
            first_use.setdefault(end, f"{place}.{key}")
            node, colon, index = end.partition(":")
            if (
                colon
                and complete
                and not (node in counts and index.isdecimal() and int(index) < counts[node])
            ):
                yield (
                    f"{place}.{key}",
                    f'expected a device such as "{next(iter(counts), "node")}:0", got "{end}"',
                )
        neighbours.setdefault(link.a, set()).add(link.b)
        neighbours.setdefault(link.b, set()).add(link.a)
    if not complete:
        return
    for end, others in neighbours.items():
        if ":" not in end and end not in counts and len(others) == 1:
            hint = did_you_mean(end, counts)
            yield first_use[end], f'expected a node, or a switch with two links or more, got "{end}"{hint}'
    yield from _unreached(neighbours, counts)


def _unreached(neighbours: dict[str, set[str]], counts: dict[str, int]) -> Iterable[Problem]:
    """Find the devices that have no link, or no way to the first one."""
    ends = {end: None for name, count in counts.items() for end in graph_ends(name, count, neighbours)}
    start = next(iter(ends), None)
    if start is None:
        return
    reached = {start}
    frontier = [start]
    while frontier:
        near = neighbours.get(frontier.pop(), set()) - reached
        frontier += near
        reached |= near
    missing = [end for end in ends if end not in reached]
    if missing or (start not in neighbours and len(ends) > 1):
        yield (
            "network.links",
            f'expected a way from "{start}" to every node, got none to {listed(missing, 4)}',
        )


def graph_ends(name: str, count: int, vertices: Container[str]) -> list[str]:
    """Name the vertex of a link graph at which each device of a node is: ``node:index`` if that is there, else ``node``."""
    return [f"{name}:{i}" if f"{name}:{i}" in vertices else name for i in range(count)]
