"""One way from a placement to a simulated step: what a compile gives is what its best candidate becomes, whoever asks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from cost_models.cluster import ClusterSpec
from passes.compile import Compiled, compile_graph
from passes.costs.costs import costs_of
from passes.graph.graph import OpGraph
from passes.graph.part import part_of
from passes.graph.recomputed import recomputed_ops
from passes.lower.candidate import Candidate, anywhere
from passes.lower.job import Job
from passes.lower.realize import Realized, realize
from passes.search.feature.place import FeatureRequest
from passes.search.feature.provider import sharded_candidate
from passes.search.free.request import FreeRequest
from passes.search.layer.request import LayerRequest
from passes.search.request import Request
from passes.trace.trace import trace
from runtime.check.check import check
from runtime.program.program import Forward
from runtime.simulate.simulation import Simulation
from tests.support.towers import Towers, tower_of, traced

TWO, JOB = ClusterSpec.local(2), Job(8)


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.Tanh())))
    return trace(model, (torch.randn(2, 16),), loss_fn=lambda y, x: y.square().mean())


def both(graph: OpGraph, request: Request) -> tuple[Compiled, Realized]:
    """Compile, and realize the best candidate once more, with the segments of the compile where it merged some."""
    compiled = compile_graph(graph, TWO, request)
    candidate = compiled.outcome.carried.candidate
    segmentation = None if candidate.contiguous else compiled.realized.segmentation
    costs = costs_of(graph, TWO)
    return compiled, realize(graph, costs, TWO, JOB, candidate, segmentation)


def is_the_same(compiled: Compiled, again: Realized) -> None:
    """Compare programs, costs and the simulated step."""
    realized = compiled.realized
    assert again.programs == realized.programs
    assert again.segments == realized.segments
    assert (again.state, again.tied, again.step) == (realized.state, realized.tied, realized.step)
    assert facts(again.simulation) == facts(realized.simulation)
    assert again.simulation.step_seconds == compiled.outcome.best.step_seconds


def facts(simulation: Simulation) -> dict[str, object]:
    """Return all that a simulation says, in a form that compares."""
    curves = [(curve.seconds.tolist(), curve.bytes_held.tolist()) for curve in simulation.memory]
    timeline, transfers = tuple(simulation.timeline), tuple(simulation.transfers)
    return {**vars(simulation), "memory": curves, "timeline": timeline, "transfers": transfers}


def test_a_layer_wise_candidate(graph: OpGraph) -> None:
    request = LayerRequest(JOB, microbatches=4, schedule="zb-h1", min_stages=2, pins={"0": 0, "4": 1})
    compiled, again = both(graph, request)
    is_the_same(compiled, again)
    assert again.groups == ((0,), (1,))
    assert not again.meshes
    assert again.stage_of == compiled.outcome.best.candidate.stage_of


def test_a_sharded_candidate(graph: OpGraph) -> None:
    compiled, again = both(graph, FeatureRequest(JOB, microbatches=2, pins={"*": "column_row"}))
    is_the_same(compiled, again)
    placement = compiled.outcome.best.candidate.shardings[0]
    assert again.groups == (placement.mesh.ranks,) == ((0, 1),)
    assert again.meshes[0].collectives
    assert compiled.bridges == (), "what the devices share crosses between no two stages"
    one = realize(graph, costs_of(graph, TWO), TWO, JOB, sharded_candidate(graph, placement))
    is_the_same(compiled, one)


def test_a_candidate_of_several_meshes() -> None:
    """Two towers, each on a mesh of its own: both cost what each costs alone, and the ranks of a mesh run its own."""
    graph = traced(Towers().double())
    towers, groups, job = tower_of(graph), ((3, 1), (0, 2)), Job(8)
    request = FeatureRequest(job, microbatches=2, mesh=(2,), pins={"*": "zero3"})
    (whole,) = compile_graph(graph, TWO, request).outcome.best.candidate.shardings.values()
    shardings = {}
    for stage, ranks in enumerate(groups):
        choices = {op: choice for op, choice in whole.choices.items() if towers[op] == stage}
        shardings[stage] = replace(whole, mesh=replace(whole.mesh, ranks=ranks), choices=choices)
    four = ClusterSpec.local(4)
    both = realize(
        graph, costs_of(graph, four), four, job, Candidate(towers, groups, 2, "1f1b", shardings=shardings)
    )
    assert both.groups == groups
    assert [len(own.parameters) for own in both.meshes.values()] == [4, 4]
    for stage, ranks in enumerate(groups):
        part = part_of(graph, [op for op, tower in towers.items() if tower == stage])
        alone = realize(
            part,
            costs_of(part, four),
            four,
            job,
            Candidate(
                dict.fromkeys(shardings[stage].choices, 0),
                (ranks,),
                2,
                "1f1b",
                shardings={0: shardings[stage]},
            ),
        )
        assert both.segments.segments[stage].cost == alone.segments.segments[0].cost
        for rank in ranks:
            assert both.state[rank] == alone.state[rank]
            assert both.step.optimizer_seconds[rank] == alone.step.optimizer_seconds[rank]
            ran = {i.segment for i in both.programs[rank].instructions if isinstance(i, Forward)}
            assert ran == {stage}
    assert {group.ranks for group in both.tied} <= {(1, 3), (0, 2), (3, 1)}
    check(both.programs, both.segments, 2, tied=both.tied)


def test_a_free_candidate(graph: OpGraph) -> None:
    """Back and forth between devices: several segments of one device."""
    pins = {"0": 0, "2": 1, "4": 0}
    compiled, again = both(
        graph, FreeRequest(JOB, microbatches=2, pins=pins, split=False, time_limit_seconds=0.5)
    )
    is_the_same(compiled, again)
    assert not compiled.outcome.best.candidate.contiguous
    assert len(again.groups) > 2
    assert {bridge.source for bridge in compiled.bridges} == {0, 1}


def test_segments_of_a_free_candidate_follow_from_what_crosses(graph: OpGraph) -> None:
    """All on one device is one segment, whatever the other has."""
    placed = [node.name for node in graph.ops if node.name not in recomputed_ops(graph)]
    costs = costs_of(graph, TWO)
    alone = realize(graph, costs, TWO, JOB, anywhere(dict.fromkeys(placed, 1), 2, 2))
    assert alone.groups == ((1,),)
    assert alone.simulation.message_count == 0
    middle = {name: int(len(placed) // 3 < i < 2 * len(placed) // 3) for i, name in enumerate(placed)}
    apart = realize(graph, costs, TWO, JOB, anywhere(middle, 2, 2))
    assert set(apart.groups) == {(0,), (1,)}
    assert len(apart.groups) >= 3
    assert apart.simulation.message_count > 0
