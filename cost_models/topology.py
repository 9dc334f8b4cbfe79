"""Topology: the links of a cluster, from the sections of its file, and the path between any two ranks.

Names of links (what transfers compete for):

    dgx00/port3/out dgx00/port3/in    the port of device 3 into its node's switch (``links.default``)
    dgx00/wire0-3/out …/in            a wire of its own between two devices (``links.pairs``, a mesh); out is low → high
    dgx00/host3/out …/in              from device 3 to the network cards (``links.host``)
    dgx00/nic3/out  dgx00/nic3/in     a network card
    leaf0/up  leaf0/down              what passes a switch upwards and back
    spine/across                      what passes the oversubscribed top switch
    a>b  b>a                          an edge of an explicit link graph

Half-duplex links have one name for both directions, without the last part (``a-b`` in a graph).

The latency of a port or card is from one to another, so half of it is at each; that of a switch is added by going
up through it, down through it, or across it at the top.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import networkx as nx

from cost_models.links import SAME_DEVICE, Link, Path, RingRates
from cost_models.spec.checks import graph_ends
from cost_models.spec.wiring import Duplex, LinkSpec, NetworkSpec, NodeLinks

Ways: TypeAlias = tuple[Link, Link]
"""The two directions of a wire; the same link twice if it is half-duplex."""


@dataclass(frozen=True)
class NodeWiring:
    """The part of the topology that one node brings. ``first_rank`` is its device 0."""

    name: str
    first_rank: int
    count: int
    links: NodeLinks | None


class Topology:
    """Links and paths of a cluster. Paths are made when first asked for, and kept."""

    def __init__(self, nodes: Sequence[NodeWiring], network: NetworkSpec | None) -> None:
        self._nodes = tuple(nodes)
        self._node_of_rank = tuple(node for node in self._nodes for _ in range(node.count))
        self.links: dict[str, Link] = {}
        self._ports = {node.name: self._ports_of(node) for node in nodes}
        self._wires = {node.name: self._wires_of(node) for node in nodes}
        self._host = {node.name: self._host_links_of(node) for node in nodes}
        self._between = self._network(network)
        self._paths: dict[tuple[int, int], Path] = {}

    def path(self, a: int, b: int) -> Path:
        """Return the path from rank ``a`` to rank ``b``."""
        found = self._paths.get((a, b))
        if found is None:
            found = self._paths[a, b] = SAME_DEVICE if a == b else Path.over(self._hops(a, b))
        return found

    def _hops(self, a: int, b: int) -> Iterator[Link]:
        node_a, node_b = self._node_of_rank[a], self._node_of_rank[b]
        i, j = a - node_a.first_rank, b - node_b.first_rank
        if node_a is not node_b:
            host_a, host_b = self._host[node_a.name], self._host[node_b.name]
            yield from host_a[i][:1] if host_a else ()
            yield from self._between.hops(node_a, i, node_b, j)
            yield from host_b[j][1:] if host_b else ()
        elif (wire := self._wires[node_a.name].get((min(i, j), max(i, j)))) is not None:
            yield wire[0] if i < j else wire[1]
        elif ports := self._ports[node_a.name]:
            yield ports[i][0]
            yield ports[j][1]
        else:  # no links of its own: an explicit graph wires its devices
            yield from self._between.hops(node_a, i, node_b, j)

    # ----------------------------------------------------------------------------------------------
    # Inside a node

    def _ports_of(self, node: NodeWiring) -> tuple[Ways, ...]:
        default = _default(node)
        if default is None or default.mesh or node.count == 1:
            return ()
        bandwidth, latency, duplex = default.resolved()
        like = Link("", bandwidth, latency / 2, default.in_network or 0.0, _rings(default))
        return tuple(self.add(f"{node.name}/port{i}", like, duplex) for i in range(node.count))

    def _wires_of(self, node: NodeWiring) -> dict[tuple[int, int], Ways]:
        wires: dict[tuple[int, int], Ways] = {}
        default = _default(node)
        rings = None if default is None else _rings(default)
        for pair in node.links.pairs if node.links is not None else ():
            low, high = sorted(pair.between)
            wires[low, high] = self._wire(f"{node.name}/wire{low}-{high}", pair, rings)
        if default is not None and default.mesh:
            for low, high in itertools.combinations(range(node.count), 2):
                if (low, high) not in wires:
                    wires[low, high] = self._wire(f"{node.name}/wire{low}-{high}", default, rings)
        return wires

    def _wire(self, name: str, spec: LinkSpec, rings: RingRates | None = None) -> Ways:
        bandwidth, latency, duplex = spec.resolved()
        return self.add(name, Link("", bandwidth, latency, rings=rings), duplex)

    def _host_links_of(self, node: NodeWiring) -> tuple[Ways, ...]:
        host: LinkSpec | None = node.links.host if node.links is not None else None
        if host is None:
            return ()
        return tuple(self._wire(f"{node.name}/host{i}", host) for i in range(node.count))

    # ----------------------------------------------------------------------------------------------
    # Between nodes

    def _network(self, network: NetworkSpec | None) -> _SwitchedNetwork | _GraphNetwork:
        if network is not None and network.links:
            return _GraphNetwork(self, self._nodes, network)
        return _SwitchedNetwork(self, self._nodes, network)

    def add(self, name: str, like: Link, duplex: Duplex, ways: tuple[str, str] = ("out", "in")) -> Ways:
        """Register a wire whose directions are ``like`` this link but for the name; returns them."""
        ids = [f"{name}/{way}" for way in ways] if duplex == "full" else [name, name]
        there, back = (self.links.setdefault(i, replace(like, id=i)) for i in ids)
        return there, back


def _default(node: NodeWiring) -> LinkSpec | None:
    return None if node.links is None or node.links.default is None else node.links.default.filled()


def _rings(link: LinkSpec) -> RingRates | None:
    return RingRates(tuple(sorted(link.rings.items())), shared=not link.mesh) if link.rings else None


class _SwitchedNetwork:
    """Cards of one kind, behind a tree of switches (none: one ideal switch)."""

    def __init__(self, topology: Topology, nodes: Sequence[NodeWiring], network: NetworkSpec | None) -> None:
        self._cards: dict[str, tuple[Ways, ...]] = {}
        self._parent: dict[str, str] = {}
        self._uplinks: dict[str, Ways] = {}
        self._across: dict[str, Link] = {}
        if network is None or len(nodes) < 2:
            return
        bandwidth, latency, duplex = network.resolved()
        for node in nodes:
            self._cards[node.name] = tuple(
                topology.add(f"{node.name}/nic{c}", Link("", bandwidth, latency / 2), duplex)
                for c in range(network.cards_of(node.count))
            )
        self._add_switches(topology, network, bandwidth, duplex)

    def _add_switches(self, topology: Topology, network: NetworkSpec, card: float, duplex: Duplex) -> None:
        switches = {switch.name: switch for switch in network.switches}
        self._parent = {member: s.name for s in network.switches for member in s.member_names()}
        tops = [name for name in switches if name not in self._parent]
        upward: dict[str, float] = {}

        def capacity(name: str) -> float:
            """Return the bytes per second that ``name`` can send towards its parent."""
            if name not in switches:
                return card * len(self._cards[name])
            if name not in upward:
                members = sum(capacity(member) for member in switches[name].member_names())
                upward[name] = members / switches[name].oversubscription
            return upward[name]

        for name, switch in switches.items():
            if name in self._parent or len(tops) > 1:  # several tops meet in an ideal core
                wire = topology.add(name, Link("", capacity(name), switch.latency), duplex, ("up", "down"))
                self._uplinks[name] = wire
            elif switch.oversubscription > 1 or switch.latency > 0:
                # The top switch has nothing above it: its ratio limits what passes across it.
                link = Link(f"{name}/across", capacity(name), switch.latency)
                self._across[name] = topology.links.setdefault(link.id, link)

    def hops(self, node_a: NodeWiring, i: int, node_b: NodeWiring, j: int) -> Iterator[Link]:
        """Yield the links from device ``i`` of one node to device ``j`` of another."""
        yield self._card(node_a, i)[0]
        above_a, above_b = self._above(node_a.name), self._above(node_b.name)
        shared = next((name for name in above_a if name in above_b), None)
        climb = above_a if shared is None else above_a[: above_a.index(shared)]
        descend = above_b if shared is None else above_b[: above_b.index(shared)]
        yield from (self._uplinks[name][0] for name in climb)
        if shared in self._across:
            yield self._across[shared]
        yield from (self._uplinks[name][1] for name in reversed(descend))
        yield self._card(node_b, j)[1]

    def _card(self, node: NodeWiring, index: int) -> Ways:
        cards = self._cards[node.name]
        return cards[index * len(cards) // node.count]

    def _above(self, name: str) -> list[str]:
        chain: list[str] = []
        while (above := self._parent.get(chain[-1] if chain else name)) is not None:
            chain.append(above)
        return chain


class _GraphNetwork:
    """An explicit link graph: the way with the fewest hops, among those the lowest latency."""

    def __init__(self, topology: Topology, nodes: Sequence[NodeWiring], network: NetworkSpec) -> None:
        self._graph: nx.Graph[str] = nx.Graph()
        self._ways: dict[tuple[str, str], Link] = {}
        for edge in network.links:
            bandwidth, latency, duplex = edge.resolved()
            names = (
                (f"{edge.a}>{edge.b}", f"{edge.b}>{edge.a}")
                if duplex == "full"
                else (f"{edge.a}-{edge.b}",) * 2
            )
            for ends, name in zip(((edge.a, edge.b), (edge.b, edge.a)), names, strict=True):
                self._ways[ends] = topology.links.setdefault(name, Link(name, bandwidth, latency))
            self._graph.add_edge(edge.a, edge.b, latency=latency)
        # One hop weighs 1 and all latencies together less than 1, so that hops always decide first.
        total = 1.0 + sum(float(data["latency"]) for _, _, data in self._graph.edges(data=True))
        for _, _, data in self._graph.edges(data=True):
            data["weight"] = 1.0 + data["latency"] / total
        self._ends = {node.name: graph_ends(node.name, node.count, self._graph) for node in nodes}
        self._routes: dict[str, dict[str, list[str]]] = {}

    def hops(self, node_a: NodeWiring, i: int, node_b: NodeWiring, j: int) -> Iterator[Link]:
        """Yield the links from device ``i`` of one node to device ``j`` of another (or the same)."""
        start, end = self._ends[node_a.name][i], self._ends[node_b.name][j]
        # Searched from one side only, so that the way back is the way there even among equals.
        low, high = sorted((start, end))
        if low not in self._routes:
            self._routes[low] = nx.single_source_dijkstra_path(self._graph, low)
        route = self._routes[low][high]
        stops = route if start == low else route[::-1]
        for here, there in itertools.pairwise(stops):
            yield self._ways[here, there]
