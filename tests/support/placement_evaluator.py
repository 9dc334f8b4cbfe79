"""Loads of a placement from their definition, node by node and edge by edge: shares no code with the planner."""

from __future__ import annotations

import itertools
import math
import random

from passes.search.cost_graph.graph import GraphMachine, GraphNode, PlacementGraph


def loads_of(graph: PlacementGraph, placement: dict[str, str]) -> dict[str, float]:
    """Load per device name."""
    nodes = {node.id: node for node in graph.nodes}
    edges = [(graph.nodes[u].id, graph.nodes[v].id) for u, v in graph.edges]
    devices = [f"acc{i}" for i in range(graph.machine.accelerators)]
    devices += [f"cpu{i}" for i in range(graph.machine.cpus)]
    loads = {}
    for device in devices:
        here = [node for node in nodes if placement[node] == device]
        if device.startswith("cpu"):
            loads[device] = sum(nodes[node].cpu_cost for node in here)
            continue
        received = {u for u, v in edges if placement[u] != device and placement[v] == device}
        sent = {u for u, v in edges if placement[u] == device and placement[v] != device}
        loads[device] = sum(nodes[node].accelerator_cost for node in here)
        loads[device] += sum(nodes[u].output_cost for u in received) + sum(nodes[u].output_cost for u in sent)
    return loads


def is_allowed(graph: PlacementGraph, placement: dict[str, str]) -> bool:
    """Memory, colours, and what cannot run on an accelerator."""
    held: dict[str, float] = {}
    colours: dict[str, set[str]] = {}
    for node in graph.nodes:
        device = placement[node.id]
        held[device] = held.get(device, 0.0) + node.size
        if node.colour is not None:
            colours.setdefault(node.colour, set()).add(device)
        if device.startswith("acc") and not node.on_accelerator:
            return False
    if any(len(devices) > 1 for devices in colours.values()):
        return False
    limit = graph.machine.memory_size
    return all(size <= limit for device, size in held.items() if device.startswith("acc"))


def is_contiguous(graph: PlacementGraph, placement: dict[str, str]) -> bool:
    """No device can be reached from itself over forward edges between devices."""
    after: dict[str, set[str]] = {}
    for u, v in graph.edges:
        source, target = graph.nodes[u], graph.nodes[v]
        first, second = placement[source.id], placement[target.id]
        if not source.backward and not target.backward and first != second:
            after.setdefault(first, set()).add(second)
    for device in after:
        reached, waiting = set(), [device]
        while waiting:
            for other in after.get(waiting.pop(), ()):
                if other == device:
                    return False
                if other not in reached:
                    reached.add(other)
                    waiting.append(other)
    return True


def best_by_trying_all(graph: PlacementGraph, contiguous: bool) -> float:
    """The least largest load over every assignment of nodes to devices; infinite if none is allowed."""
    best = math.inf
    devices = graph.machine.devices
    ids = [node.id for node in graph.nodes]
    for choice in itertools.product(devices, repeat=len(ids)):
        placement = dict(zip(ids, choice, strict=True))
        if is_allowed(graph, placement) and (not contiguous or is_contiguous(graph, placement)):
            best = min(best, max(loads_of(graph, placement).values()))
    return best


def random_graph(
    seed: int,
    count: int,
    *,
    accelerators: int = 2,
    cpus: int = 0,
    training: bool = False,
    tight: bool = False,
    colours: bool = False,
) -> PlacementGraph:
    """A layered graph with weights, skips and branches; ``tight``: memory binds; ``training``: mirrored backward."""
    dice = random.Random(seed)
    nodes, edges = [], []
    width = dice.choice([1, 2, 3, max(1, count // 6)])
    for v in range(count):
        weightlike = dice.random() < 0.2
        cost = 0.0 if weightlike else dice.choice([dice.random(), 3 * dice.random()])
        nodes.append(
            GraphNode(
                id=f"n{v}",
                name=f"n{v}",
                accelerator_cost=cost,
                cpu_cost=0.0 if weightlike else dice.uniform(1, 10) * cost,
                output_cost=dice.choice([0.0, 0.05, 0.5]) * dice.random(),
                size=float(dice.randint(0, 10)),
                colour=f"c{v % max(2, count - 2)}" if colours and dice.random() < 0.5 else None,
                on_accelerator=not (cpus and dice.random() < 0.1),
            )
        )
        if not weightlike:
            for u in {dice.randrange(max(0, v - 2 * width), v) for _ in range(dice.randint(1, 2)) if v}:
                edges.append((u, v))
    if training:
        forward = list(edges)
        for v in range(count):
            node = nodes[v]
            nodes.append(
                GraphNode(
                    id=f"g{v}",
                    name=f"g{v}",
                    accelerator_cost=2 * node.accelerator_cost,
                    cpu_cost=2 * node.cpu_cost,
                    output_cost=node.output_cost,
                    size=node.size,
                    colour=node.colour or f"own{v}",
                    backward=True,
                    on_accelerator=node.on_accelerator,
                )
            )
            nodes[v] = GraphNode(**{**vars(node), "colour": node.colour or f"own{v}"})
        edges += [(count + v, count + u) for u, v in forward]
    total = sum(node.size for node in nodes)
    memory = total * dice.uniform(0.55, 0.9) if tight else math.inf
    return PlacementGraph(tuple(nodes), tuple(edges), GraphMachine(accelerators, cpus, memory))
