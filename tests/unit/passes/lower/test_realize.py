"""One way from a placement to a simulated step: what a compile gives is what its best candidate becomes, whoever asks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cost_models.cluster import ClusterSpec
from passes.compile import Compiled, compile_graph
from passes.costs.costs import costs_of
from passes.graph.graph import OpGraph
from passes.graph.recomputed import recomputed_ops
from passes.lower.candidate import anywhere
from passes.lower.job import Job
from passes.lower.realize import Realized, realize
from passes.search.feature.outcome import sharded_candidate
from passes.search.feature.place import FeatureRequest
from passes.search.free.request import FreeRequest
from passes.search.layer.place import LayerRequest
from passes.search.request import Request
from passes.trace.trace import trace
from runtime.simulate.simulate import Simulation

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
    return {**vars(simulation), "memory": curves}


def test_a_layer_wise_candidate(graph: OpGraph) -> None:
    request = LayerRequest(JOB, microbatches=4, schedule="zb-h1", min_stages=2, pins={"0": 0, "4": 1})
    compiled, again = both(graph, request)
    is_the_same(compiled, again)
    assert again.groups == ((0,), (1,))
    assert again.sharded is None
    assert again.stage_of == compiled.outcome.best.candidate.stage_of


def test_a_sharded_candidate(graph: OpGraph) -> None:
    compiled, again = both(graph, FeatureRequest(JOB, microbatches=2, pins={"*": "column_row"}))
    is_the_same(compiled, again)
    placement = compiled.outcome.best.candidate.sharding
    assert placement is not None
    assert again.groups == (placement.mesh.ranks,) == ((0, 1),)
    assert again.sharded is not None
    assert again.traffic
    assert again.layouts == {}, "what the devices share crosses between no two stages"
    one = realize(graph, costs_of(graph, TWO), TWO, JOB, sharded_candidate(graph, placement))
    is_the_same(compiled, one)


def test_a_free_candidate(graph: OpGraph) -> None:
    """Back and forth between devices: several segments of one device."""
    pins = {"0": 0, "2": 1, "4": 0}
    compiled, again = both(
        graph, FreeRequest(JOB, microbatches=2, pins=pins, split=False, time_limit_seconds=0.5)
    )
    is_the_same(compiled, again)
    assert not compiled.outcome.best.candidate.contiguous
    assert len(again.groups) > 2
    assert {layout.ranks for layout in again.layouts.values()} == {(0,), (1,)}


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
