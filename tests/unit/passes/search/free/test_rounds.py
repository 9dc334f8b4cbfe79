"""Rounds of the free search: shapes that win, shapes that are not made, time."""

from __future__ import annotations

import time
from typing import Any

import pytest

from cost_models.cluster import ClusterSpec
from passes.compile import compile_graph
from passes.costs.costs import costs_of
from passes.graph.graph import OpGraph
from passes.lower.candidate import Candidate, anywhere
from passes.lower.segment import Segmentation
from passes.search.free import rounds as free_rounds
from passes.search.free import variants as free_variants
from passes.search.free.judge import ListJudge
from passes.search.free.request import FreeRequest
from passes.search.free.rounds import place_anywhere
from passes.search.free.variants import Attempt, TimeBudget, Variant
from passes.search.judge import Carried, Judge
from passes.search.layer.request import LayerRequest
from passes.search.outcome import Outcome
from passes.search.place import place_stages
from tests.unit.passes.search.free.test_shapes import JOB, cluster, graph

__all__ = ["graph"]


def request(limit: float, **others: Any) -> FreeRequest:
    return FreeRequest(JOB, time_limit_seconds=limit, **others)


def layers(graph: OpGraph, machine: ClusterSpec) -> Outcome:
    costs = costs_of(graph, machine)
    return place_stages(LayerRequest(JOB), Judge(graph, costs, machine, JOB))


def rounds(graph: OpGraph, machine: ClusterSpec, limit: float) -> free_rounds._Rounds:
    asked = request(limit)
    costs = costs_of(graph, machine)
    return free_rounds._Rounds(graph, costs, machine, asked, None, TimeBudget.of(asked))


def noting(judge: ListJudge, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The schedules under which candidates are simulated from now on."""
    names: list[str] = []
    schedule = judge.schedule

    def noted(candidate: Candidate, segmentation: Segmentation, name: str) -> Carried:
        names.append(name)
        return schedule(candidate, segmentation, name)

    monkeypatch.setattr(judge, "schedule", noted)
    return names


def test_blocks_win_where_messages_are_free(graph: OpGraph) -> None:
    """Speeds 3, 1, 1, 1 and a step of one micro-batch: whole layers cannot run beside each other."""
    machine = cluster()
    compiled = compile_graph(graph, machine, request(3.0, objective="latency"))
    alone, seconds = layers(graph, machine).best.step_seconds, compiled.realized.simulation.step_seconds
    assert compiled.outcome.splits
    assert seconds < 0.8 * alone
    assert seconds > 0.5 * alone, "3 of 6 parts of all speed are the fast device's"


def test_no_graph_is_rewritten_where_blocks_cannot_win(
    graph: OpGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(free_variants, "split_neurons", None)
    machine = cluster("1MB/s")
    start = layers(graph, machine)
    asked = request(0.6, objective="latency")
    costs = costs_of(graph, machine)
    outcome = place_anywhere(asked, Judge(graph, costs, machine, JOB))
    assert outcome.splits == ()
    assert outcome.carried.realized.simulation.step_seconds == outcome.best.step_seconds
    assert outcome.best.step_seconds <= start.best.step_seconds


def test_the_unsplit_graph_has_at_least_half_of_the_time(
    graph: OpGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[tuple[bool, float]] = []

    def noted(variant: Variant, machine: ClusterSpec, asked: FreeRequest, *rest: Any) -> Attempt:
        assert asked.time_limit_seconds is not None
        limits.append((bool(variant.splits), asked.time_limit_seconds))
        return free_variants.place_variant(variant, machine, asked, *rest)

    monkeypatch.setattr("passes.search.free.rounds.place_variant", noted)
    for bandwidth, share in (("10TB/s", 0.5), ("0.01MB/s", 0.9)):
        limits.clear()
        at = rounds(graph, cluster(bandwidth), 1.0)
        at.start = layers(graph, at.cluster)
        at.budget = TimeBudget.of(at.request)
        at.run()
        (split, seconds), *others = limits
        assert not split
        assert seconds >= share * 0.9, "nearly all of it where no shape may win"
        assert all(limit <= 0.5 for _, limit in others)


def test_nothing_is_made_when_the_time_is_over(graph: OpGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_variants, "split_neurons", None)
    late = rounds(graph, cluster(), 1.0)
    late.budget = TimeBudget(time.perf_counter() - 1.0)
    late.shape(late.ranked()[0])
    assert late.attempts == []


def test_a_placement_is_ranked_with_split_backwards_and_chosen_with_whole_ones_too(
    graph: OpGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = cluster()
    judge = ListJudge(graph, costs_of(graph, machine), machine, JOB)
    names = noting(judge, monkeypatch)
    ranks = {node.name: i % 2 for i, node in enumerate(graph.ops) if node.name not in judge.recomputed}
    candidate = anywhere(ranks, machine.world_size, 2)
    simulated = judge.simulate(candidate)
    assert names == ["list-split"]
    assert judge.finished(candidate, -1.0).seconds == simulated.step_seconds, "no time for the other"
    assert names == ["list-split"]
    assert judge.finished(candidate).seconds <= simulated.step_seconds
    assert names == ["list-split", "list"], "what was simulated is not simulated again"
