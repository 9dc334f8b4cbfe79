"""Segments: acyclic for any placement; one per stage for layer-wise plans."""

from __future__ import annotations

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.cluster import ClusterSpec
from cost_models.errors import InternalError
from passes.graph.graph import OpGraph
from passes.graph.recomputed import recomputed_ops
from passes.lower.lower import crossing_values
from passes.lower.segment import Segmentation, by_reach, by_stage, segment_edges
from passes.lower.summarize import tied_groups
from runtime.check.check import check
from runtime.program.program import Segment, SegmentCost, SegmentGraph, TiedGroup, Value
from runtime.schedules import SCHEDULES
from tests.support.matrix import drawn
from tests.support.random_graphs import RandomModel, random_model, random_placement
from tests.support.rank_programs import build_programs
from tests.support.simulate_ranks import simulate_ranks


def test_a_split_chain_has_one_segment_per_stage() -> None:
    graph = random_model(0).graph
    names = [node.name for node in graph.ops]
    stage_of = {name: int(position >= len(names) // 2) for position, name in enumerate(names)}
    segmentation = by_stage(graph, stage_of, ((0,), (1,)), frozenset())
    assert segmentation.ranks == ((0,), (1,))
    assert segmentation.segment_of == stage_of


def test_a_stage_that_reads_from_a_later_one_is_refused() -> None:
    graph = random_model(0).graph
    names = [node.name for node in graph.ops]
    stage_of = {name: int(position < len(names) // 2) for position, name in enumerate(names)}
    with pytest.raises(InternalError, match="a stage reads from a later stage"):
        by_stage(graph, stage_of, ((0,), (1,)), frozenset())


@drawn(220)
@given(seed=st.integers(0, 10**6), ranks=st.integers(2, 4), microbatches=st.integers(1, 4))
def test_any_placement_is_segmented_scheduled_proved_and_simulated(
    seed: int, ranks: int, microbatches: int
) -> None:
    model = random_model(seed)
    recomputed = recomputed_ops(model.graph)
    placement = random_placement(model.graph, recomputed, ranks, seed)
    segmentation = by_reach(model.graph, placement, recomputed)
    _is_sound(model.graph, segmentation, placement)
    segments, tied = summary(model, segmentation, ranks)
    orders = SCHEDULES["list"].order(segments, microbatches)
    programs = build_programs(segments, orders, microbatches, transfer_seconds=lambda *_: 0.1, tied=tied)
    proof = check(programs, segments, microbatches, tied=tied)
    assert proof.instructions == sum(len(program.instructions) for program in programs)
    simulation = simulate_ranks(programs, segments, links=ClusterSpec.local(ranks))
    work = sum((s.cost.forward_seconds + s.cost.backward_seconds * s.has_backward) for s in segments.segments)
    assert simulation.step_seconds >= microbatches * work / ranks - 1e-9


def _is_sound(graph: OpGraph, segmentation: Segmentation, placement: dict[str, tuple[int, ...]]) -> None:
    assert set(segmentation.segment_of) == set(placement)
    assert all(segmentation.ranks[s] == placement[name] for name, s in segmentation.segment_of.items())
    edges = segment_edges(graph, segmentation.segment_of)
    assert nx.is_directed_acyclic_graph(nx.DiGraph(list(edges)))
    assert all(a < b for a, b in edges), "segments are numbered in topological order"


def summary(
    model: RandomModel, segmentation: Segmentation, ranks: int
) -> tuple[SegmentGraph, tuple[TiedGroup, ...]]:
    """The segment graph with unit costs per op."""
    graph = model.graph
    crossing = crossing_values(graph, segmentation)
    values = tuple(
        Value(name, segmentation.segment_of[name], consumers, 8, name in graph.needs_grad)
        for name, consumers in crossing.items()
    )
    backward = {s for name, s in segmentation.segment_of.items() if name in graph.needs_grad}
    backward |= {c for value in values if value.needs_grad for c in value.consumers}
    counts = [0] * len(segmentation)
    for segment in segmentation.segment_of.values():
        counts[segment] += 1
    segments = tuple(
        Segment(i, group, SegmentCost(counts[i], counts[i], 0.0), i in backward)
        for i, group in enumerate(segmentation.ranks)
    )
    return SegmentGraph(segments, values, ranks), tied_groups(graph, segmentation)
