"""A cost graph that is no traced model: nodes with costs, what crosses between devices, and the machine.

The model of the device-placement benchmark ("Efficient Algorithms for Device Placement of DNN Graph Operators",
NeurIPS 2020), which every format of graphs is read into:

    load(accelerator d) = Σ accelerator_cost(v), v on d
                        + Σ output_cost(u), u not on d, some consumer on d      each producer once
                        + Σ output_cost(u), u on d, some consumer not on d      each producer once
    load(CPU d)         = Σ cpu_cost(v), v on d                                 no transfers, no memory limit
    memory(accelerator) = Σ size(v) ≤ memory_size

Nodes of one colour share a device. The objective is the largest load, forward and backward together. Costs are in the
unit of the file, whatever that is.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import networkx as nx

from cost_models.errors import GraphError

MOST_DEVICES = 4096


@dataclass(frozen=True)
class GraphNode:
    """An op. ``accelerator_cost`` counts only where ``on_accelerator``; ``colour``: None for one of its own."""

    id: str
    name: str
    accelerator_cost: float
    cpu_cost: float
    output_cost: float = 0.0
    """Cost of sending the node's output from or to an accelerator, once per producer and device."""
    size: float = 0.0
    colour: str | None = None
    backward: bool = False
    on_accelerator: bool = True


@dataclass(frozen=True)
class GraphMachine:
    """Accelerators ``acc0`` … and CPUs ``cpu0`` …; ``memory_size`` is each accelerator's, in the unit of sizes."""

    accelerators: int
    cpus: int = 0
    memory_size: float = math.inf

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the devices, accelerators first."""
        return tuple(f"acc{i}" for i in range(self.accelerators)) + tuple(f"cpu{i}" for i in range(self.cpus))


@dataclass(frozen=True)
class PlacementGraph:
    """``edges``: (producer, consumer), positions in ``nodes``; without circles, from forward to backward only."""

    nodes: tuple[GraphNode, ...]
    edges: tuple[tuple[int, int], ...]
    machine: GraphMachine
    unit: str = "cost units of the file"
    notes: tuple[str, ...] = ()

    @cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """Consumers of every node, each once."""
        return readers(len(self.nodes), self.edges)

    @cached_property
    def directed(self) -> nx.DiGraph[int]:
        """Nodes by position, and edges, for networkx."""
        found: nx.DiGraph[int] = nx.DiGraph()
        found.add_nodes_from(range(len(self.nodes)))
        found.add_edges_from(self.edges)
        return found

    @cached_property
    def fingerprint(self) -> str:
        """A hash of nodes, costs and edges, not of the machine."""
        data = [
            [
                n.id,
                n.accelerator_cost,
                n.cpu_cost,
                n.output_cost,
                n.size,
                n.colour,
                n.backward,
                n.on_accelerator,
            ]
            for n in self.nodes
        ]
        text = json.dumps([data, sorted(set(self.edges))])
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def readers(count: int, edges: Iterable[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    """Return the targets of each of ``count`` sources, each once, in the order of the edges."""
    found: list[dict[int, None]] = [{} for _ in range(count)]
    for source, target in edges:
        found[source][target] = None
    return tuple(map(tuple, found))


def checked(graph: PlacementGraph, source: str) -> PlacementGraph:
    """Return ``graph`` itself, or raise a GraphError that names ``source`` and everything that no file may say."""
    problems = [*_number_problems(graph), *_structure_problems(graph)]
    if problems:
        more = len(problems) - 20
        shown = [*problems[:20], *([f"and {more} more problems"] if more > 0 else [])]
        raise GraphError(f"{source} is no graph that can be placed", shown, ["correct the file"])
    return graph


def _number_problems(graph: PlacementGraph) -> list[str]:
    machine, problems = graph.machine, []
    if not graph.nodes:
        problems.append("it has no nodes")
    for what, count in (("accelerators", machine.accelerators), ("CPUs", machine.cpus)):
        if not 0 <= count <= MOST_DEVICES:
            problems.append(f"{count} {what}: expected 0 to {MOST_DEVICES}")
    if machine.accelerators + machine.cpus < 1:
        problems.append("there is neither an accelerator nor a CPU")
    if math.isnan(machine.memory_size) or machine.memory_size < 0:
        problems.append(f"the memory of an accelerator is {machine.memory_size}")
    for node in graph.nodes:
        for what, value in (
            ("accelerator cost", node.accelerator_cost),
            ("CPU cost", node.cpu_cost),
            ("output cost", node.output_cost),
            ("size", node.size),
        ):
            if not 0 <= value < math.inf:
                problems.append(f"node {node.id}: its {what} is {value}, expected 0 or more")
    return problems


def _structure_problems(graph: PlacementGraph) -> list[str]:
    problems = []
    seen: set[str] = set()
    for node in graph.nodes:
        if node.id in seen:
            problems.append(f"node {node.id} is there twice")
        seen.add(node.id)
    nodes = graph.nodes
    for source, target in graph.edges:
        if source == target:
            problems.append(f"edge {nodes[source].id} -> {nodes[source].id}: a node cannot be its own input")
        elif nodes[source].backward and not nodes[target].backward:
            problems.append(
                f"edge {nodes[source].id} -> {nodes[target].id}: from a backward to a forward node"
            )
    if not problems and not nx.is_directed_acyclic_graph(graph.directed):
        circle = [nodes[source].id for source, _ in nx.find_cycle(graph.directed)]
        problems.append(f"its edges go in a circle: {' -> '.join([*circle[:12], circle[0]])}")
    return problems


@dataclass(frozen=True)
class DeviceLoads:
    """Load and memory of every device under a placement, in the order of the machine."""

    loads: tuple[float, ...]
    memory: tuple[float, ...]
    transfers: float
    """The part of all loads that is output costs."""

    @property
    def max_load(self) -> float:
        return max(self.loads)


def evaluate(graph: PlacementGraph, placement: Sequence[int]) -> DeviceLoads:
    """Return the loads of a placement, a position in ``machine.devices`` per node. Sums are exact (fsum)."""
    accelerators = graph.machine.accelerators
    count = len(graph.machine.devices)
    terms: list[list[float]] = [[] for _ in range(count)]
    sizes: list[list[float]] = [[] for _ in range(count)]
    sent: list[float] = []
    for v, node in enumerate(graph.nodes):
        home = placement[v]
        terms[home].append(node.accelerator_cost if home < accelerators else node.cpu_cost)
        sizes[home].append(node.size)
        touched = {placement[w] for w in graph.consumers[v]} | {home}
        if len(touched) > 1:
            for device in touched:
                if device < accelerators:
                    terms[device].append(node.output_cost)
                    sent.append(node.output_cost)
    return DeviceLoads(tuple(map(math.fsum, terms)), tuple(map(math.fsum, sizes)), math.fsum(sent))


def broken_rules(graph: PlacementGraph, placement: Sequence[int], contiguous: bool) -> list[str]:
    """List the rules that a placement breaks; none for a valid one."""
    problems = []
    nodes, machine = graph.nodes, graph.machine
    homes: dict[str, int] = {}
    for v, node in enumerate(nodes):
        if not 0 <= placement[v] < len(machine.devices):
            problems.append(f"node {node.id} is on no device")
        elif placement[v] < machine.accelerators and not node.on_accelerator:
            problems.append(f"node {node.id} cannot run on an accelerator")
        if node.colour is not None and homes.setdefault(node.colour, placement[v]) != placement[v]:
            problems.append(f"node {node.id} is apart from its colour {node.colour}")
    if problems:
        return problems
    memory = evaluate(graph, placement).memory
    for d in range(machine.accelerators):
        if memory[d] > machine.memory_size:
            problems.append(f"acc{d} holds {memory[d]:g} of {machine.memory_size:g}")
    if contiguous:
        quotient = nx.DiGraph(
            (placement[u], placement[v])
            for u, v in graph.edges
            if not nodes[v].backward and placement[u] != placement[v]
        )
        if not nx.is_directed_acyclic_graph(quotient):
            problems.append("forward edges go in a circle over the devices")
    return problems


def named(graph: PlacementGraph, placement: Sequence[int]) -> Mapping[str, str]:
    """Return a placement by names: node id -> device name."""
    devices = graph.machine.devices
    return {node.id: devices[placement[v]] for v, node in enumerate(graph.nodes)}
