"""Cost graphs: what a placement costs by the definition, and what no graph may be."""

from __future__ import annotations

import dataclasses
import math
import random
import time

import pytest

from cost_models.errors import GraphError, InfeasibleError
from passes.search.anywhere.bound import simple_bound
from passes.search.anywhere.pairs import divided
from passes.search.anywhere.problem import evaluate as loads_of_groups
from passes.search.cost_graph.contiguous import place_contiguous
from passes.search.cost_graph.downsets import Order, prefixes
from passes.search.cost_graph.graph import (
    GraphMachine,
    GraphNode,
    PlacementGraph,
    broken_rules,
    checked,
    evaluate,
    named,
)
from passes.search.cost_graph.groups import colour_groups, contiguous_groups, free_groups
from passes.search.cost_graph.set_bound import SetBound
from passes.search.cost_graph.throughput import place_for_throughput, refined
from tests.support.matrix import some
from tests.support.placement_evaluator import is_contiguous, loads_of, random_graph


def node(name: str, cost: float = 1.0, out: float = 0.0, **more: object) -> GraphNode:
    return GraphNode(name, name, cost, 10 * cost, out, **more)


def test_a_producer_is_paid_for_once_per_device_and_side() -> None:
    #  a ─► b, c on acc1 and d on the CPU: a's output leaves acc0 once and enters acc1 once; CPUs pay nothing
    nodes = (node("a", 1.0, 0.5), node("b", 2.0), node("c", 4.0), node("d", 8.0))
    graph = PlacementGraph(nodes, ((0, 1), (0, 2), (0, 3)), GraphMachine(2, 1))
    assert evaluate(graph, (0, 1, 1, 2)).loads == (1.5, 6.5, 80.0)
    assert evaluate(graph, (0, 0, 0, 0)).loads == (15.0, 0.0, 0.0)
    assert evaluate(graph, (2, 1, 1, 2)).loads == (0.0, 6.5, 90.0)


@pytest.mark.parametrize("seed", some(range(20)))
def test_loads_agree_with_the_definition(seed: int) -> None:
    graph = random_graph(seed, 30, accelerators=3, cpus=2, training=seed % 2 == 1, colours=True)
    dice = random.Random(seed)
    placement = [dice.randrange(5) for _ in graph.nodes]
    want = loads_of(graph, dict(named(graph, placement)))
    assert evaluate(graph, placement).loads == pytest.approx(tuple(want.values()), rel=1e-12)
    cost = "forward edges go in a circle over the devices"
    rules = broken_rules(
        dataclasses.replace(graph, nodes=tuple(map(_uncoloured, graph.nodes))), placement, True
    )
    assert (cost in rules) != is_contiguous(graph, dict(named(graph, placement)))


def _uncoloured(found: GraphNode) -> GraphNode:
    return dataclasses.replace(found, colour=None, on_accelerator=True)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"nodes": (), "edges": ()}, "it has no nodes"),
        ({"nodes": (node("a"), node("a"))}, "node a is there twice"),
        ({"nodes": (node("a", -1.0), node("b"))}, "node a: its accelerator cost is -1"),
        ({"nodes": (node("a", out=math.nan), node("b"))}, "node a: its output cost is nan"),
        ({"nodes": (node("a", size=math.inf), node("b"))}, "node a: its size is inf"),
        ({"edges": ((0, 1), (1, 0))}, "its edges go in a circle: a -> b -> a"),
        ({"edges": ((0, 0),)}, "a node cannot be its own input"),
        ({"nodes": (node("a", backward=True), node("b"))}, "from a backward to a forward node"),
        ({"machine": GraphMachine(0, 0)}, "neither an accelerator nor a CPU"),
        ({"machine": GraphMachine(-1, 0)}, "-1 accelerators"),
        ({"machine": GraphMachine(1, 0, math.nan)}, "memory of an accelerator is nan"),
    ],
)
def test_what_no_graph_may_be(change: dict[str, object], says: str) -> None:
    graph = PlacementGraph((node("a"), node("b")), ((0, 1),), GraphMachine(2))
    assert checked(graph, "file") is graph
    with pytest.raises(GraphError, match="file is no graph that can be placed") as caught:
        checked(dataclasses.replace(graph, **change), "file")
    assert says in str(caught.value)


def test_what_costs_nothing_joins_the_only_reader() -> None:
    nodes = (node("w", 0.0, 0.3, size=5.0), node("a"), node("b", colour="x"), node("c", colour="x"))
    graph = PlacementGraph(nodes, ((0, 1), (1, 2), (1, 3)), GraphMachine(2, 0, 100.0))
    assert free_groups(graph).members == ((0, 1), (2, 3))
    tight = dataclasses.replace(graph, machine=GraphMachine(2, 0, 4.0))
    assert free_groups(tight).members == ((0,), (1,), (2, 3))


def test_circles_of_forward_edges_through_colours_are_one_group() -> None:
    nodes = (node("a", colour="x"), node("b"), node("c", colour="x"))
    graph = PlacementGraph(nodes, ((0, 1), (1, 2)), GraphMachine(2))
    assert contiguous_groups(graph).members == ((0, 2, 1),)
    assert free_groups(graph).count == 2


def test_a_backward_node_without_a_forward_one_is_tied_in_reverse() -> None:
    nodes = (node("f"), node("g", colour="f", backward=True), node("loss", backward=True))
    nodes = (dataclasses.replace(nodes[0], colour="f"), *nodes[1:])
    graph = PlacementGraph(nodes, ((2, 1),), GraphMachine(2))
    problem = contiguous_groups(graph)
    assert [[graph.nodes[v].id for v in problem.members[g]] for pair in problem.order for g in pair] == [
        ["f", "g"],
        ["loss"],
    ]


def test_downsets_of_a_chain_and_of_an_antichain() -> None:
    chain = PlacementGraph(tuple(map(node, "abcd")), ((0, 1), (1, 2), (2, 3)), GraphMachine(2))
    assert Order(contiguous_groups(chain)).all_downsets(100) == prefixes([0, 1, 2, 3])
    apart = PlacementGraph(tuple(map(node, "abcd")), (), GraphMachine(2))
    found = Order(contiguous_groups(apart)).all_downsets(100)
    assert found is not None
    assert sorted(found) == list(range(16))
    assert Order(contiguous_groups(apart)).all_downsets(15) is None


@pytest.mark.parametrize("seed", some(range(8)))
def test_dividing_and_tidying_never_raise_the_largest_load(seed: int) -> None:
    graph = random_graph(seed, 24, accelerators=3, cpus=seed % 2, tight=seed % 3 == 0)
    problem = free_groups(graph)
    start = place_for_throughput(graph, 0.3).placement if seed % 3 == 0 else (0,) * len(graph.nodes)
    if broken_rules(graph, start, False):
        start = (len(graph.machine.devices) - 1,) * len(graph.nodes)
    homes = problem.of_groups(start)
    before = loads_of_groups(problem.placement, homes).objective_seconds
    shared = divided(problem.placement, homes, math.inf)
    neat = refined(graph, problem, shared)
    loads = [evaluate(graph, problem.of_nodes(found)) for found in (shared, neat)]
    assert loads[0].max_load <= before * (1 + 1e-12)
    assert loads[1].max_load <= loads[0].max_load * (1 + 1e-12)
    assert sum(loads[1].loads) <= sum(loads[0].loads) * (1 + 1e-12)
    assert [
        rule for rule in broken_rules(graph, problem.of_nodes(neat), False) if "cannot run" not in rule
    ] == []


@pytest.mark.parametrize("search", [place_contiguous, place_for_throughput])
def test_what_cannot_fit_is_said_before_any_search(search: object) -> None:
    nodes = (
        node("a", size=6.0, colour="x"),
        node("b", size=6.0, colour="x"),
        node("c", on_accelerator=False),
    )
    graph = PlacementGraph(nodes, ((0, 1), (1, 2)), GraphMachine(1, 0, 10.0))
    with pytest.raises(InfeasibleError) as caught:
        search(graph, 1.0)
    assert "nodes a, b share a device and need 12, an accelerator has 10" in str(caught.value)
    assert "nodes c cannot run on an accelerator, and there is no CPU" in str(caught.value)
    assert "all nodes need 12, 1 accelerators have 10" in str(caught.value)


def test_one_device_and_no_edges_and_no_costs() -> None:
    for count, machine in (
        (1, GraphMachine(1)),
        (3, GraphMachine(1)),
        (3, GraphMachine(2, 1)),
        (3, GraphMachine(0, 2)),
    ):
        graph = PlacementGraph(tuple(node(f"n{i}", 0.0) for i in range(count)), (), machine)
        for found in (place_contiguous(graph, 1.0), place_for_throughput(graph, 1.0)):
            assert (found.value, found.bound, found.certificate.gap) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("seed", some(range(8)))
def test_a_placement_of_nodes_loses_nothing_as_one_of_groups(seed: int) -> None:
    graph = random_graph(seed, 40, accelerators=3, training=seed % 2 == 0)
    found = place_contiguous(graph, 5.0, prove=False)
    problem = free_groups(graph)
    again = problem.of_nodes(problem.of_groups(found.placement))
    assert evaluate(graph, again).max_load <= found.value * (1 + 1e-12)


def test_no_bound_where_the_cpus_hold_everything_but_for_rounding() -> None:
    graph = random_graph(0, count=12, accelerators=2, cpus=2, tight=True, colours=True)
    problem = colour_groups(graph)
    homes = (3,) * problem.count
    value = loads_of_groups(problem.placement, homes).objective_seconds
    search = SetBound(problem, value)
    search.know(homes)
    found = search.improve(simple_bound(problem.placement), time.monotonic() + 20)
    assert found.seconds <= min(value, place_for_throughput(graph, 5.0).value) * (1 + 1e-9)
