"""Rounds of the free search: shapes that win, shapes that are not made, sizes cut again, time."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cost_models.cluster import ClusterSpec
from passes.compile import compile_graph
from passes.costs.costs import costs_of
from passes.graph.graph import OpGraph
from passes.lower.candidate import Candidate, anywhere
from passes.lower.segment import Segmentation
from passes.search.free import rounds as free_rounds
from passes.search.free import variants as free_variants
from passes.search.free.list_judge import ListJudge
from passes.search.free.request import FreeRequest
from passes.search.free.rounds import place_anywhere
from passes.search.free.shapes import Shape, family_seconds
from passes.search.free.splits import automatic_families
from passes.search.free.tuning import FreeTuning
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
    return place_stages(graph, costs, machine, LayerRequest(JOB), Judge(graph, costs, machine, JOB))


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
    outcome = place_anywhere(graph, costs, machine, asked, Judge(graph, costs, machine, JOB))
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
    best = late.ranked()[0]
    assert late.shape(best, 1.0) is None
    assert late.found == []


def test_sizes_are_cut_again_until_devices_are_as_busy(graph: OpGraph) -> None:
    """The slow device works 3 times as long as the fast one, which has nothing else to do."""
    machine = cluster(speeds=(3, 1))
    at = rounds(graph, machine, 1.0)
    family = automatic_families(graph, at.costs, machine)[0][0]
    assert family.units == 256
    shape = Shape((family,), ((128, 128),), (0, 1), 1, 1.0)
    total = family_seconds(graph, at.costs, machine, at.request, 1, [family]).whole[0]

    def cut(sizes: tuple[int, int], extra: float = 0.0) -> tuple[tuple[int, ...], ...]:
        now = replace(shape, sizes=(sizes,))
        busy = [sizes[d] / 256 * float(total[d]) + (extra if d == 0 else 0.0) for d in range(2)]
        simulation = SimpleNamespace(busy_seconds=busy)
        carried = SimpleNamespace(realized=SimpleNamespace(simulation=simulation))
        variant = Variant(graph, at.costs, now.splits, now)
        attempt = cast("Attempt", SimpleNamespace(variant=variant, carried=carried))
        again = at.cut_again(attempt)
        return () if again is None else again.sizes

    assert cut((128, 128)) == ((192, 64),)
    assert cut((192, 64)) == (), "as busy as each other"
    (fast, slow), *_ = cut((192, 64), extra=float(total[0]) / 4)
    assert slow > 64, "what else the fast device does is left to it"
    assert (fast, slow) == (176, 80)


def test_what_was_simulated_is_not_simulated_again(graph: OpGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = cluster()
    judge = ListJudge(graph, costs_of(graph, machine), machine, JOB)
    names = noting(judge, monkeypatch)
    ranks = {node.name: i % 2 for i, node in enumerate(graph.ops) if node.name not in judge.recomputed}
    candidate = anywhere(ranks, machine.world_size, 2)
    simulated = judge.simulate(candidate)
    assert sorted(names) == ["list", "list-split"]
    found = judge.finished(candidate)
    assert len(names) == 2
    assert found.seconds == simulated.step_seconds
    assert judge.merged(found, -1.0) is found, "no time for it"
    assert judge.merged(found).seconds <= found.seconds


def test_a_long_step_is_simulated_under_one_schedule(graph: OpGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one follows at the end, if time is left."""
    machine = cluster()
    judge = ListJudge(graph, costs_of(graph, machine), machine, JOB, FreeTuning(long_step=0))
    names = noting(judge, monkeypatch)
    everything = {n.name: 0 for n in graph.ops if n.name not in judge.recomputed}
    candidate = anywhere(everything, machine.world_size, 1)
    judge.simulate(candidate)
    assert names == ["list-split"]
    judge.finished(candidate, 0.0)
    assert names == ["list-split"]
    judge.finished(candidate, math.inf)
    assert names == ["list-split", "list"]
