"""Makespans by hand, against every placement of small graphs, and bounds that hold."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from passes.search.cost_graph.graph import GraphMachine, GraphNode, PlacementGraph, broken_rules
from passes.search.cost_graph.latency import Scheduler, latency_bound, place_for_latency
from passes.search.cost_graph.throughput import place_for_throughput
from tests.support.matrix import some
from tests.support.placement_evaluator import random_graph


def node(name: str, cost: float, out: float = 0.0) -> GraphNode:
    return GraphNode(name, name, cost, 10 * cost, out)


FORK = PlacementGraph(
    (node("a", 1.0, 0.5), node("b", 4.0, 0.25), node("c", 3.0, 0.25), node("d", 1.0)),
    ((0, 1), (0, 2), (1, 3), (2, 3)),
    GraphMachine(2, 1),
)


def test_a_fork_by_hand() -> None:
    #            0    1    2    3    4    5    6          acc0 to acc1: out and in, twice the output cost
    #  acc0      a    b---------------    d
    #  acc1           (sent) c-----------      (sent)
    schedule = Scheduler(FORK)
    assert schedule.starts((0, 0, 1, 0)) == ([0.0, 1.0, 2.0, 5.5], 6.5)
    assert schedule.starts((0, 0, 0, 0)) == ([0.0, 1.0, 5.0, 8.0], 9.0)
    # to the CPU a takes one output cost, and c 30 there
    assert schedule.starts((0, 0, 2, 0)) == ([0.0, 1.0, 1.5, 31.75], 32.75)
    assert latency_bound(FORK) == 6.0


def test_the_longest_way_goes_first() -> None:
    nodes = (node("short", 1.0), node("long", 1.0), node("end", 5.0))
    graph = PlacementGraph(nodes, ((1, 2),), GraphMachine(2))
    assert Scheduler(graph).starts((0, 0, 1)) == ([1.0, 0.0, 1.0], 6.0)


@pytest.mark.parametrize("seed", some(range(10)))
def test_the_search_finds_the_best_of_all_placements(seed: int) -> None:
    graph = random_graph(seed, 7, accelerators=2, cpus=seed % 2, colours=seed % 3 == 0, tight=seed % 4 == 1)
    schedule = Scheduler(graph)
    choices = itertools.product(range(len(graph.machine.devices)), repeat=len(graph.nodes))
    allowed = [choice for choice in choices if not broken_rules(graph, choice, contiguous=False)]
    best = min(map(schedule.makespan, allowed))
    found = place_for_latency(graph, 3.0)
    assert not broken_rules(graph, found.placement, contiguous=False)
    assert found.value == pytest.approx(schedule.makespan(found.placement))
    assert found.bound <= best * (1 + 1e-9)
    assert found.value == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_a_schedule_respects_inputs_and_devices(seed: int) -> None:
    graph = random_graph(seed, 40, accelerators=3, training=seed % 2 == 0)
    placement = place_for_throughput(graph, 0.5).placement
    schedule = Scheduler(graph)
    starts, end = schedule.starts(placement)
    ends = [start + graph.nodes[v].accelerator_cost for v, start in enumerate(starts)]
    assert max(ends) == pytest.approx(end)
    for u, v in graph.edges:
        assert starts[v] >= ends[u] + schedule.delay(u, placement[u], placement[v]) - 1e-9
    for device in range(3):
        own = sorted((starts[v], ends[v]) for v in range(len(starts)) if placement[v] == device)
        assert all(first[1] <= second[0] + 1e-9 for first, second in itertools.pairwise(own))


def test_one_device_needs_all_work() -> None:
    alone = dataclasses.replace(FORK, machine=GraphMachine(1))
    found = place_for_latency(alone, 1.0)
    assert (found.value, found.certificate.solver_status) == (9.0, "optimal")
