"""An unrolled LSTM, a layer per device: segments by reach make a wavefront of it. The timelines are for the eye."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cost_models.cluster import ClusterSpec
from examples.lstm_seq2seq import lstm_seq2seq
from partitioner.models.as_graph import as_graph
from passes.costs.costs import GraphCosts, costs_of
from passes.graph.graph import OpGraph
from passes.graph.recomputed import recomputed_ops
from passes.lower.segment import Segmentation, by_reach, by_stage
from passes.lower.step import programs_for
from passes.lower.summarize import segment_graph
from runtime.check.check import check
from runtime.simulate.simulation import Simulation
from runtime.simulate.timeline import render
from tests.support.simulate_ranks import simulate_ranks

STEPS, BATCH = 2, 4


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    return as_graph(lstm_seq2seq(16, 32, 2, STEPS, STEPS, BATCH))


@pytest.fixture(scope="module")
def costs(graph: OpGraph, cluster: ClusterSpec) -> GraphCosts:
    return costs_of(graph, cluster)


@pytest.fixture(scope="module")
def cluster() -> ClusterSpec:
    """Slow devices and fast links: what counts is who computes when."""
    device = {"kind": "cpu", "memory": "1GiB", "memory_bandwidth": 1e9, "flops": {"float32": 1e6}}
    links = {"default": {"bandwidth": "10GB/s", "latency": 0.0}}
    return ClusterSpec.from_dict({"nodes": [{"name": "n", "count": 2, "device": device, "links": links}]})


def test_a_wavefront_beats_stage_after_stage(
    graph: OpGraph, costs: GraphCosts, cluster: ClusterSpec, golden: Callable[[str, str], None]
) -> None:
    rank_of = _layer_of(graph)
    recomputed = recomputed_ops(graph)
    stages = by_stage(graph, rank_of, ((0,), (1,)), recomputed)
    reach = by_reach(graph, {name: (rank,) for name, rank in rank_of.items()}, recomputed)
    slow = _simulated(graph, costs, cluster, stages, "gpipe")
    fast = _simulated(graph, costs, cluster, reach, "list")
    golden(
        "wavefront",
        f"stage after stage: {len(stages)} segments\n{render(slow, 96)}\n\n"
        f"wavefront: {len(reach)} segments\n{render(fast, 96)}",
    )
    # Of 2 s time steps, a wavefront takes 2 s + 1 where stages take 4 s; less, as products with a layer's own last
    # output run ahead of what comes from below. Two devices cannot take less than half.
    assert 0.5 <= fast.step_seconds / slow.step_seconds < (2 * STEPS + 1) / (4 * STEPS)


def _layer_of(graph: OpGraph) -> dict[str, int]:
    """0: the embeddings and the lower layer; 1: the upper layer and what follows."""
    recomputed = recomputed_ops(graph)
    lower = ("embedding", "cells.0")
    found: dict[str, int] = {}
    for node in graph.ops:
        if node.name not in recomputed:
            path = str(node.meta["module_path"])
            reads = [found[source.name] for source in node.all_input_nodes if source.name in found]
            inside = any(part in path for part in lower)
            found[node.name] = 0 if inside else 1 if path else max(reads, default=0)
    return found


def _simulated(
    graph: OpGraph, costs: GraphCosts, cluster: ClusterSpec, segmentation: Segmentation, schedule: str
) -> Simulation:
    """One micro-batch, no optimizer."""
    segments = segment_graph(graph, costs, segmentation, cluster, BATCH)
    programs = programs_for(segments, cluster, schedule, 1, []).all()
    check(programs, segments, 1)
    return simulate_ranks(programs, segments, links=cluster)
