"""The judge of every search: it keeps the fastest that fits, and knows by how much the others do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from cost_models.cluster import ClusterSpec
from cost_models.spreads import PEAK_BYTES
from passes.costs.costs import costs_of
from passes.graph.graph import OpGraph
from passes.lower.candidate import Candidate
from passes.lower.job import Job
from passes.lower.segment import Segmentation
from passes.search.judge import (
    MEMORY_ROUNDS,
    Carried,
    Judge,
    Simulated,
    fastest_fitting,
    memory_rounds,
)
from passes.trace.trace import trace

JOB = Job(8, "sgd")


class Counting(Judge):
    """Counts the candidates that are carried through."""

    count = 0

    def carry(self, candidate: Candidate, segmentation: Segmentation | None = None) -> Carried:
        self.count += 1
        return super().carry(candidate, segmentation)


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.Tanh())))
    return trace(model, (torch.randn(2, 256),), loss_fn=lambda y, x: y.square().mean())


def judge_of(graph: OpGraph, memory_bytes: int = 1 << 30) -> Counting:
    """Return a judge of two workers with so much memory each."""
    machine = ClusterSpec.local(2, memory=memory_bytes)
    return Counting(graph, costs_of(graph, machine), machine, JOB)


def cut_at(graph: OpGraph, share: float, microbatches: int) -> Candidate:
    """Return two stages, the first with a share of the ops."""
    ops = [node.name for node in graph.ops]
    stage_of = {name: int(i >= share * len(ops)) for i, name in enumerate(ops)}
    return Candidate(stage_of, ((0,), (1,)), microbatches, "1f1b")


def test_everything_is_remembered_and_the_fastest_kept(graph: OpGraph) -> None:
    judge = judge_of(graph)
    candidates = [cut_at(graph, share, m) for share in (0.25, 0.5) for m in (1, 2, 8)]
    found = [judge.simulate(candidate) for candidate in candidates]
    assert judge.tried == found
    assert [each.candidate for each in found] == candidates
    best, *others = sorted(found, key=lambda each: each.step_seconds)
    assert best.step_seconds < others[0].step_seconds
    kept = judge.kept(best.candidate)
    assert kept is not None
    assert kept.seconds == best.step_seconds == kept.realized.simulation.step_seconds
    assert all(judge.kept(other.candidate) is None for other in others)


def test_what_is_kept_is_not_carried_through_again(graph: OpGraph) -> None:
    judge = judge_of(graph)
    slow, fast = sorted(
        (judge.simulate(cut_at(graph, 0.5, m)) for m in (1, 8)), key=lambda each: -each.step_seconds
    )
    assert judge.count == 2
    assert judge.carried(fast.candidate) is judge.kept(fast.candidate)
    assert judge.count == 2
    assert judge.carried(slow.candidate).seconds == slow.step_seconds
    assert judge.count == 3


def test_what_overflows_is_not_kept_however_fast(graph: OpGraph) -> None:
    """Devices hold what the slower of two candidates needs, and not what the faster does."""
    roomy = judge_of(graph)
    heavy, light = (roomy.simulate(cut_at(graph, 0.5, m)) for m in (2, 8))
    assert max(heavy.peak_bytes) > max(light.peak_bytes)
    assert heavy.step_seconds < light.step_seconds
    room = int(max(light.peak_bytes))
    tight = judge_of(graph, room)
    over, fits = tight.simulate(heavy.candidate), tight.simulate(light.candidate)
    assert not over.fits
    assert over.overflow_bytes == int(max(heavy.peak_bytes)) - room
    assert fits.fits
    assert fits.overflow_bytes == 0
    assert tight.kept(over.candidate) is None
    assert tight.kept(fits.candidate) is not None
    assert fastest_fitting(tight.tried) is fits


def test_what_fits_the_memory_and_not_its_room_overflows(graph: OpGraph) -> None:
    roomy = judge_of(graph).simulate(cut_at(graph, 0.5, 8))
    machine = ClusterSpec.local(2, memory=int(max(roomy.peak_bytes)))
    judge = Judge(graph, costs_of(graph, machine), machine, replace(JOB, risk=0.05))
    found = judge.simulate(cut_at(graph, 0.5, 8))
    assert not found.fits
    assert found.overflow_bytes == machine.devices[0].memory_bytes - judge.cluster.devices[0].room_bytes > 0
    assert found.chance == pytest.approx(PEAK_BYTES["cpu"].chance_above(1.0, 1.0))
    assert found.chance > 0.05


def test_what_is_chosen_is_kept_whatever_was_kept_before(graph: OpGraph) -> None:
    judge = judge_of(graph)
    slow, fast = sorted(
        (judge.simulate(cut_at(graph, 0.5, m)) for m in (1, 8)), key=lambda each: -each.step_seconds
    )
    chosen = judge.carry(slow.candidate)
    judge.choose(chosen)
    assert judge.carried(slow.candidate) is chosen
    assert judge.kept(fast.candidate) is None


def test_nothing_that_fits_is_no_choice(graph: OpGraph) -> None:
    candidate = cut_at(graph, 0.5, 1)
    assert fastest_fitting([]) is None
    assert fastest_fitting([Simulated(candidate, 1.0, [2], 1)]) is None
    slower, faster = (Simulated(candidate, seconds, [1], 0) for seconds in (2.0, 1.5))
    assert fastest_fitting([Simulated(candidate, 1.0, [2], 1), slower, faster]) is faster


def test_memory_rounds_end_when_the_search_is_content() -> None:
    rooms: list[tuple[int, float]] = []

    def search(number: int, room: float) -> float | None:
        rooms.append((number, room))
        return None if number == 1 else room / 2

    memory_rounds(search, 1.0)
    assert rooms == [(0, 1.0), (1, 0.5)]


def test_memory_rounds_end_though_the_search_never_is() -> None:
    rooms: list[int] = []

    def search(number: int, room: int) -> int | None:
        rooms.append(room)
        return room - 1

    memory_rounds(search, 10)
    assert rooms == [10 - number for number in range(MEMORY_ROUNDS)]
