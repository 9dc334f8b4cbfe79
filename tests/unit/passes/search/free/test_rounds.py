"""Rounds of the free search: shapes that win, shapes that are not made, sizes cut again, time."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from passes.search.free.candidates import FreeCandidates, Scheduled
from passes.search.placed import Placed

from cost_models.cluster import ClusterSpec
from passes.compile import compile_graph, layer_wise
from passes.costs.costs import costs_of
from passes.graph.graph import OpGraph
from passes.graph.recomputed import recomputed_ops
from passes.lower.segment import Segmentation
from passes.search.free import rounds as free_rounds
from passes.search.free import variants as free_variants
from passes.search.free.place import FreeCandidate, FreeRequest
from passes.search.free.rounds import place_rounds
from passes.search.free.shapes import Shape, family_seconds
from passes.search.free.splits import automatic_families
from passes.search.free.variants import Attempt, TimeBudget, Variant
from passes.search.layer.place import LayerRequest
from tests.unit.passes.search.free.test_shapes import BATCH, cluster, graph

__all__ = ["graph"]


def request(limit: float, **others: Any) -> FreeRequest:
    return FreeRequest(BATCH, optimizer="sgd", time_limit_seconds=limit, **others)


def layers(graph: OpGraph, machine: ClusterSpec) -> Placed:
    return layer_wise(graph, costs_of(graph, machine), machine, LayerRequest(BATCH, optimizer="sgd"))


def rounds(graph: OpGraph, machine: ClusterSpec, limit: float) -> free_rounds._Rounds:
    asked = request(limit)
    costs = costs_of(graph, machine)
    return free_rounds._Rounds(graph, costs, machine, asked, None, TimeBudget.of(asked))


def noting(candidates: FreeCandidates, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The schedules under which candidates are simulated from now on."""
    names: list[str] = []
    schedule = candidates.schedule

    def noted(candidate: FreeCandidate, segmentation: Segmentation, name: str) -> Scheduled:
        names.append(name)
        return schedule(candidate, segmentation, name)

    monkeypatch.setattr(candidates, "schedule", noted)
    return names


def test_blocks_win_where_messages_are_free(graph: OpGraph) -> None:
    """Speeds 3, 1, 1, 1 and a step of one micro-batch: whole layers cannot run beside each other."""
    machine = cluster()
    placed = compile_graph(graph, machine, request(3.0, objective="latency")).placed
    alone = layers(graph, machine).realized.simulation.step_seconds
    assert placed.splits
    assert placed.realized.simulation.step_seconds < 0.8 * alone
    assert placed.realized.simulation.step_seconds > 0.5 * alone, (
        "3 of 6 parts of all speed are the fast device's"
    )


def test_no_graph_is_rewritten_where_blocks_cannot_win(
    graph: OpGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(free_variants, "split_neurons", None)
    machine = cluster("1MB/s")
    start = layers(graph, machine)
    asked = request(0.6, objective="latency")
    placed = place_rounds(graph, costs_of(graph, machine), machine, asked, start, TimeBudget.of(asked))
    assert placed.splits == ()
    assert placed.realized.simulation.step_seconds <= start.realized.simulation.step_seconds


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
        scheduled = SimpleNamespace(realized=SimpleNamespace(simulation=simulation))
        variant = Variant(graph, at.costs, now.splits, now)
        attempt = cast("Attempt", SimpleNamespace(variant=variant, scheduled=scheduled))
        again = at.cut_again(attempt)
        return () if again is None else again.sizes

    assert cut((128, 128)) == ((192, 64),)
    assert cut((192, 64)) == (), "as busy as each other"
    (fast, slow), *_ = cut((192, 64), extra=float(total[0]) / 4)
    assert slow > 64, "what else the fast device does is left to it"
    assert (fast, slow) == (176, 80)


def test_what_was_simulated_is_not_simulated_again(graph: OpGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = cluster()
    recomputed = recomputed_ops(graph)
    candidates = FreeCandidates(graph, costs_of(graph, machine), machine, request(1.0), recomputed)
    names = noting(candidates, monkeypatch)
    ranks = {node.name: i % 2 for i, node in enumerate(graph.ops) if node.name not in recomputed}
    candidate = FreeCandidate(ranks, 2)
    simulated = candidates.simulate(candidate)
    assert sorted(names) == ["list", "list-split"]
    found = candidates.realized(candidate)
    assert len(names) == 2
    assert found.seconds == simulated.step_seconds
    assert candidates.merged(candidate, found, -1.0) is found, "no time for it"
    assert candidates.merged(candidate, found).seconds <= found.seconds


def test_a_long_step_is_simulated_under_one_schedule(graph: OpGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one follows at the end, if time is left."""
    monkeypatch.setattr("passes.search.free.candidates.LONG", 0)
    machine = cluster()
    recomputed = recomputed_ops(graph)
    candidates = FreeCandidates(graph, costs_of(graph, machine), machine, request(1.0), recomputed)
    names = noting(candidates, monkeypatch)
    candidate = FreeCandidate({n.name: 0 for n in graph.ops if n.name not in recomputed}, 1)
    candidates.simulate(candidate)
    assert names == ["list-split"]
    candidates.realized(candidate, 0.0)
    assert names == ["list-split"]
    candidates.realized(candidate, math.inf)
    assert names == ["list-split", "list"]
