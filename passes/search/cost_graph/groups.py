"""Groups and nets: nodes that have to share a device become one group, what is sent becomes nets over groups.

    nodes ─► groups: one colour, one circle of forward edges (contiguous)    ─► nothing is lost
          ─► groups that cost nothing join the group that all their nets touch ─► nothing is lost while memory suffices

A net is the set of groups that a producer and its consumers are in, with the producer's output cost as its weight. An
accelerator pays the weight of every net that it touches but does not hold whole: that is both halves of the load's
definition, so the direction of edges matters for contiguity only. Nets over the same groups are one, weights added.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import networkx as nx
import numpy as np

from cost_models.arrays import FloatArray
from passes.search.anywhere.problem import Home, Net, PlacementProblem
from passes.search.cost_graph.graph import GraphMachine, PlacementGraph


@dataclass(frozen=True, eq=False)
class GroupProblem:
    """G groups and E nets. ``accelerator_cost`` is infinite where a group may not be on an accelerator."""

    machine: GraphMachine
    members: tuple[tuple[int, ...], ...]
    """Nodes of every group."""
    accelerator_cost: FloatArray
    cpu_cost: FloatArray
    size: FloatArray
    nets: tuple[tuple[int, ...], ...]
    """Two groups or more each, ascending."""
    weight: FloatArray
    order: tuple[tuple[int, int], ...]
    """Contiguity: edges between groups that the quotient over devices must not turn into a circle."""
    costliest: tuple[int, ...]
    """A node of every group: that which costs most."""
    lossless: bool
    """True if a placement of nodes that is best within memory can be written as one of groups."""

    @property
    def count(self) -> int:
        return len(self.members)

    @cached_property
    def placement(self) -> PlacementProblem:
        """Groups as units of the general problem: accelerators pay for nets, once, and have memory."""
        machine, kinds = self.machine, (self.machine.accelerators, self.machine.cpus)
        seconds = np.repeat(np.stack([self.accelerator_cost, self.cpu_cost]), kinds, axis=0)
        nothing, links = np.zeros(len(self.nets)), np.zeros((sum(kinds), sum(kinds)))
        return PlacementProblem(
            seconds=np.where(np.isinf(seconds), 0.0, seconds),
            unit_bytes=self.size,
            nets=tuple(Net(first, tuple(others)) for first, *others in self.nets),
            messages=nothing,
            net_bytes=self.weight,
            received_bytes=nothing,
            ties=(),
            tie_bytes=np.zeros(0),
            tie_seconds=np.zeros((sum(kinds), 0)),
            sum_bytes=np.zeros(0),
            latency=links,
            seconds_per_byte=links,
            capacity_bytes=np.repeat([machine.memory_size, math.inf], kinds),
            allowed=~np.isinf(seconds),
            paid_once=np.repeat([1.0, 0.0], kinds),
        )

    @cached_property
    def nets_of(self) -> tuple[tuple[int, ...], ...]:
        """Nets that touch each group."""
        found: list[list[int]] = [[] for _ in self.members]
        for e, pins in enumerate(self.nets):
            for g in pins:
                found[g].append(e)
        return tuple(map(tuple, found))

    @cached_property
    def weights(self) -> list[float]:
        """``weight`` for loops."""
        weights: list[float] = self.weight.tolist()
        return weights

    def growth(self, g: int, held: Sequence[int], cost: float = 0.0) -> float:
        """Return ``cost`` and what a set with ``held[e]`` groups of each net then sends more if ``g`` joins it."""
        weights, nets = self.weights, self.nets
        for e in self.nets_of[g]:
            if held[e] == 0:
                cost += weights[e]
            if held[e] + 1 == len(nets[e]):
                cost -= weights[e]
        return cost

    @cached_property
    def memory_binds(self) -> bool:
        """True if everything on one accelerator would be too much for it."""
        return math.fsum(self.size) > self.machine.memory_size

    def alone(self) -> list[Home]:
        """Return the placements of everything on one accelerator, and on one CPU."""
        machine = self.machine
        devices = {0, machine.accelerators}
        return [(device,) * self.count for device in sorted(devices) if device < len(machine.devices)]

    def of_nodes(self, homes: Sequence[int]) -> tuple[int, ...]:
        """Turn a device per group into a device per node."""
        placement = [0] * sum(map(len, self.members))
        for g, nodes in enumerate(self.members):
            for v in nodes:
                placement[v] = int(homes[g])
        return tuple(placement)

    def of_groups(self, placement: Sequence[int]) -> Home:
        """Turn a device per node into that of every group's costliest node: what costs nothing follows it."""
        return tuple(placement[v] for v in self.costliest)


def colour_groups(graph: PlacementGraph) -> GroupProblem:
    """Group nodes that have to share a device, and no more."""
    return _problem(graph, _by_colour(graph), (), lossless=True)


def free_groups(graph: PlacementGraph) -> GroupProblem:
    """Group nodes for a free placement: colours, and what joins for nothing as far as loads go."""
    problem = colour_groups(graph)
    while joined := _joins(problem, contiguous=False, sized=not problem.memory_binds):
        problem = _problem(graph, _joined(problem, joined), (), lossless=True)
    return problem


def contiguous_groups(graph: PlacementGraph, *, join_sized: bool = False) -> GroupProblem:
    """Group nodes for a contiguous placement: colours, circles among them, and what joins for nothing.

    Order edges are the forward edges. A backward node whose colour no forward node has would be free of them; it is
    tied as if it had a forward node: backward edges at such a node count in reverse, as in the published method.
    ``join_sized``: weights join their readers even where memory might want them elsewhere, or they alone could make
    more downsets than can be listed.
    """
    groups = _by_colour(graph)
    order = _order_edges(graph)
    problem = _problem(graph, groups, order, lossless=True)
    directed = nx.DiGraph(problem.order)
    circles = [part for part in nx.strongly_connected_components(directed) if len(part) > 1]
    if circles:
        problem = _problem(graph, _joined(problem, circles), order, lossless=True)
    sized = join_sized or not problem.memory_binds
    while joined := _joins(problem, contiguous=True, sized=sized):
        problem = _problem(
            graph, _joined(problem, joined), order, lossless=not problem.memory_binds or not join_sized
        )
    return problem


def _by_colour(graph: PlacementGraph) -> list[list[int]]:
    groups: dict[object, list[int]] = {}
    for v, node in enumerate(graph.nodes):
        groups.setdefault(("node", v) if node.colour is None else node.colour, []).append(v)
    return list(groups.values())


def _order_edges(graph: PlacementGraph) -> tuple[tuple[int, int], ...]:
    """List the order edges as pairs of nodes."""
    nodes = graph.nodes
    with_forward = {node.colour for node in nodes if not node.backward} - {None}
    orphaned = [node.backward and node.colour not in with_forward for node in nodes]
    edges = []
    for u, v in graph.edges:
        if not nodes[v].backward:
            edges.append((u, v))
        elif nodes[u].backward and (orphaned[u] or orphaned[v]):
            edges.append((v, u))
    return tuple(edges)


def _problem(
    graph: PlacementGraph, groups: Sequence[Sequence[int]], order: Iterable[tuple[int, int]], lossless: bool
) -> GroupProblem:
    group_of = {v: g for g, nodes in enumerate(groups) for v in nodes}
    nets: dict[tuple[int, ...], list[float]] = {}
    for u, consumers in enumerate(graph.consumers):
        pins = tuple(sorted({group_of[u], *(group_of[v] for v in consumers)}))
        if len(pins) > 1 and graph.nodes[u].output_cost > 0:
            nets.setdefault(pins, []).append(graph.nodes[u].output_cost)
    nodes = graph.nodes
    return GroupProblem(
        machine=graph.machine,
        members=tuple(tuple(group) for group in groups),
        accelerator_cost=np.array(
            [
                math.fsum(nodes[v].accelerator_cost if nodes[v].on_accelerator else math.inf for v in group)
                for group in groups
            ]
        ),
        cpu_cost=np.array([math.fsum(nodes[v].cpu_cost for v in group) for group in groups]),
        size=np.array([math.fsum(nodes[v].size for v in group) for group in groups]),
        nets=tuple(nets),
        weight=np.array([math.fsum(costs) for costs in nets.values()]),
        order=tuple(
            sorted({(group_of[u], group_of[v]) for u, v in order if group_of[u] != group_of[v]}),
        ),
        costliest=tuple(
            max(group, key=lambda v: nodes[v].accelerator_cost + nodes[v].cpu_cost) for group in groups
        ),
        lossless=lossless,
    )


def _joined(problem: GroupProblem, parts: Iterable[Iterable[int]]) -> list[list[int]]:
    """Merge the groups of each part into one."""
    target = list(range(problem.count))
    for part in parts:
        together = sorted(part)
        for g in together:
            target[g] = together[0]
    groups: dict[int, list[int]] = {}
    for g, nodes in enumerate(problem.members):
        groups.setdefault(target[g], []).extend(nodes)
    return list(groups.values())


def _joins(problem: GroupProblem, *, contiguous: bool, sized: bool) -> list[tuple[int, int]]:
    """List pairs (group that costs nothing, group that it joins), no group in two pairs; ``sized``: also if it has a size.

    Moved to a group that all its nets touch, it makes no net touch more devices. Contiguity is kept if that group is
    its only neighbour in the order.
    """
    neighbours: list[set[int]] = [set() for _ in problem.members]
    for g, h in problem.order:
        neighbours[g].add(h)
        neighbours[h].add(g)
    taken: set[int] = set()
    pairs = []
    for g in range(problem.count):
        costs = problem.accelerator_cost[g] + problem.cpu_cost[g]
        if g in taken or costs > 0 or (problem.size[g] > 0 and not sized):
            continue
        if problem.nets_of[g]:
            hosts = set.intersection(*(set(problem.nets[e]) for e in problem.nets_of[g]))
        else:
            hosts = set(range(problem.count)) if not neighbours[g] else neighbours[g]
        if contiguous and neighbours[g]:
            hosts = hosts & neighbours[g] if len(neighbours[g]) == 1 else set()
        hosts = hosts - {g} - taken
        if hosts:
            host = min(hosts)
            pairs.append((g, host))
            taken |= {g, host}
    return pairs
