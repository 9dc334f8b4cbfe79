"""Pipelines of device groups: values that go in pieces are ordered, proved and simulated to the byte."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict

import pytest

from cost_models.errors import DeadlockError, InternalError
from cost_models.layout import Layout, Mesh, Replicate, Shard
from runtime.check.check import check
from runtime.mesh.cross_mesh import pieces
from runtime.program import timing
from runtime.program.program import (
    Backward,
    Forward,
    PieceBytes,
    Program,
    Recv,
    Segment,
    SegmentCost,
    SegmentGraph,
    Send,
    TiedGroup,
    Value,
)
from runtime.program.relabel import RankMap, relabelled_programs, relabelled_segments
from runtime.program.timing import quick_makespan
from runtime.schedules import SCHEDULES
from tests.support.rank_programs import build_programs
from tests.support.simulate_ranks import simulate_ranks
from tests.support.uniform_links import UniformLinks
from tests.unit.runtime.schedules.helpers import no_time

ELEMENTS = 24
COST = SegmentCost(1.0, 1.0, 1.0, saved_bytes=10)
GROUPS = [(2, 2), (1, 3), (3, 1), (2, 1, 1), (2, 3, 2), (4, 4)]


def layout(ranks: tuple[int, ...], split: bool) -> Layout:
    return Layout(Mesh(ranks, (len(ranks),), ("group",)), (Shard(0) if split else Replicate(),))


def sent(source: Layout, target: Layout) -> tuple[PieceBytes, ...]:
    """A byte per element."""
    return tuple(PieceBytes(p.source, p.target, p.elements) for p in pieces((ELEMENTS,), source, target))


def pipeline(sizes: tuple[int, ...], rounds: int = 1, *, split: bool = True) -> SegmentGraph:
    """A chain of stages on groups of ``sizes`` ranks, ``rounds`` of them on each group, that split what they exchange."""
    ends = list(itertools.accumulate(sizes))
    groups = [tuple(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)] * rounds
    segments = tuple(Segment(index, ranks, COST) for index, ranks in enumerate(groups))
    values = []
    for index, (home, away) in enumerate(itertools.pairwise(groups)):
        leaving, arriving = layout(home, True), layout(away, split)
        values.append(
            Value(
                f"h{index}", index, (index + 1,), ELEMENTS // len(home), True,
                sent(leaving, arriving) if home != away else (),
                sent(arriving, leaving) if home != away else (),
            )
        )  # fmt: skip
    return SegmentGraph(segments, tuple(values), ends[-1])


def programs_of(graph: SegmentGraph, schedule: str, microbatches: int) -> tuple[Program, ...]:
    orders = SCHEDULES[schedule].order(graph, microbatches)
    return build_programs(graph, orders, microbatches, transfer_seconds=no_time)


def test_two_ranks_send_to_one_and_back() -> None:
    programs = programs_of(pipeline((2, 1)), "1f1b", 2)
    assert [str(program) for program in programs] == [
        "rank 0: 0F0 >h0:0@2 0F1 >h0:1@2 <d(h0):0@2 <d(h0):1@2 0B0 0B1 step",
        "rank 1: 0F0 >h0:0@2 0F1 >h0:1@2 <d(h0):0@2 <d(h0):1@2 0B0 0B1 step",
        "rank 2: <h0:0@0 <h0:0@1 <h0:1@0 <h0:1@1 1F0 1B0 >d(h0):0@0 >d(h0):0@1 1F1 1B1 >d(h0):1@0 >d(h0):1@1 step",
    ]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("sizes", GROUPS)
def test_programs_are_proved_and_simulated_to_the_byte(sizes: tuple[int, ...], schedule: str) -> None:
    graph, microbatches = pipeline(sizes), 4
    programs = programs_of(graph, schedule, microbatches)
    crossing = sum(a + b - math.gcd(a, b) for a, b in itertools.pairwise(sizes))
    assert check(programs, graph, microbatches).messages == 2 * crossing * microbatches
    simulation = simulate_ranks(programs, graph, links=UniformLinks(1e9))
    assert sum(simulation.pair_bytes.values()) == 2 * ELEMENTS * (len(sizes) - 1) * microbatches
    wanted: defaultdict[tuple[int, int], float] = defaultdict(float)
    for value in graph.values:
        for piece in (*value.pieces, *value.gradient_pieces):
            wanted[piece.source, piece.target] += piece.size_bytes * microbatches
    assert simulation.pair_bytes == wanted


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize(("stages", "rounds", "schedule"), [(3, 1, "1f1b"), (2, 2, "interleaved")])
def test_the_bubble_of_equal_stages_with_free_links(
    width: int, stages: int, rounds: int, schedule: str
) -> None:
    """(p - 1) / (v m + p - 1): p groups, v stages on each, m micro-batches (Narayanan et al. 2021, section 2.2)."""
    graph, microbatches = pipeline((width,) * stages, rounds), 4
    programs = programs_of(graph, schedule, microbatches)
    check(programs, graph, microbatches)
    simulation = simulate_ranks(programs, graph, links=UniformLinks(math.inf))
    bubble = (stages - 1) / (rounds * microbatches + stages - 1)
    assert simulation.bubble_fraction == pytest.approx(bubble, abs=1e-12)


@pytest.mark.parametrize("sizes", GROUPS)
def test_a_whole_copy_for_every_reader(sizes: tuple[int, ...]) -> None:
    graph = pipeline(sizes, split=False)
    programs = programs_of(graph, "1f1b", 3)
    check(programs, graph, 3)
    simulation = simulate_ranks(programs, graph, links=UniformLinks(1e9))
    crossing = sum(ELEMENTS * (b + 1) for b in sizes[1:])
    assert sum(simulation.pair_bytes.values()) == crossing * 3


@pytest.mark.parametrize("sizes", GROUPS)
def test_nothing_is_faster_than_the_timing_pass_says(sizes: tuple[int, ...]) -> None:
    graph, links = pipeline(sizes), UniformLinks(10.0)

    def seconds(source: int, target: int, size_bytes: int) -> float:
        return links.path(source, target).transfer_seconds(size_bytes)

    orders = SCHEDULES["1f1b"].order(graph, 4)
    programs = build_programs(graph, orders, 4, transfer_seconds=seconds)
    check(programs, graph, 4)
    simulation = simulate_ranks(programs, graph, links=links)
    assert simulation.step_seconds >= quick_makespan(graph, orders, 4, seconds) * (1 - 1e-12)


@pytest.mark.parametrize("sizes", GROUPS)
def test_pairs_of_ranks_that_take_equal_seconds_are_timed_once(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = pipeline(sizes, split=False)
    orders = SCHEDULES["1f1b"].order(graph, 6)
    unlike_pairs, timed = timing._unlike_pairs, list[set[tuple[int, int]]]()

    def unlike(bundles):  # type: ignore[no-untyped-def]
        timed.append(unlike_pairs(bundles))
        return timed[-1]

    makespans = []
    for seconds in (lambda a, b, n: 0.3, lambda a, b, n: 0.1 * (1 + (a + b) % 2) * n):
        monkeypatch.setattr(timing, "_unlike_pairs", unlike)
        makespans.append(quick_makespan(graph, orders, 6, seconds))
        assert len(timed[-1]) <= 2 * 2 * (len(sizes) - 1), "of two kinds of pairs, one each way"
        monkeypatch.setattr(timing, "_unlike_pairs", lambda bundles: {ends for b in bundles for ends in b})
        assert quick_makespan(graph, orders, 6, seconds) == makespans[-1]
    assert makespans[0] != makespans[1]


def test_a_group_waits_for_the_slowest_of_its_ranks() -> None:
    """Rank 2 has its half after 12 s, rank 3 after 24: both compute from then on."""
    graph = pipeline((1, 2))
    (value,) = graph.values
    (first, second) = value.pieces
    uneven = Value(
        "h0", 0, (1,), ELEMENTS, True, (first, second._replace(size_bytes=24)), value.gradient_pieces
    )
    graph = SegmentGraph(graph.segments, (uneven,), graph.world_size)
    simulation = simulate_ranks(programs_of(graph, "gpipe", 1), graph, links=UniformLinks(1.0))
    starts = [spans[0].start_seconds for spans in simulation.timeline]
    assert starts[1] == starts[2] > 24.0


def test_a_transfer_of_one_rank_slows_its_group() -> None:
    """Two micro-batches come one after the other, 24 s each at a byte a second: the second beside the first compute."""
    cost = SegmentCost(100.0, 0.0, 0.0)
    piece = PieceBytes(0, 2, ELEMENTS)
    graph = SegmentGraph(
        (Segment(0, (0,), SegmentCost(0.0, 0.0, 0.0)), Segment(1, (1, 2), cost, has_backward=False)),
        (Value("h", 0, (1,), ELEMENTS, False, (piece._replace(target=1, size_bytes=0), piece)),),
        3,
    )
    orders = ((Forward(0, 0), Forward(0, 1), Backward(0, 0), Backward(0, 1)), (Forward(1, 0), Forward(1, 1)))
    programs = build_programs(graph, orders, 2, transfer_seconds=no_time)
    simulation = simulate_ranks(programs, graph, links=UniformLinks(1.0), contention=2.0)
    first = [spans[0] for spans in simulation.timeline[1:]]
    assert [(span.start_seconds, span.end_seconds) for span in first] == [(24.0, 24.0 + 100.0 + 12.0)] * 2


def test_a_group_holds_what_it_receives_in_pieces() -> None:
    graph = pipeline((1, 2))
    simulation = simulate_ranks(programs_of(graph, "gpipe", 1), graph, links=UniformLinks(math.inf))
    half = ELEMENTS // 2
    assert simulation.peak_bytes[1] == simulation.peak_bytes[2] == COST.saved_bytes + half + half


def test_pieces_are_renamed_with_their_ranks() -> None:
    graph, ranks = pipeline((2, 1)), RankMap((2, 0, 1))
    programs = programs_of(graph, "1f1b", 2)
    renamed = relabelled_segments(graph, ranks)
    assert check(relabelled_programs(programs, ranks), renamed, 2).messages == 8
    assert {(piece.source, piece.target) for piece in renamed.values[0].pieces} == {(1, 0), (2, 0)}


@pytest.mark.parametrize(
    ("pieces_kept", "said"),
    [(slice(0, 0), "reach []"), (slice(0, 1), "reach [1]")],
    ids=["none", "one of two"],
)
def test_a_value_without_its_pieces_is_refused(pieces_kept: slice, said: str) -> None:
    graph = pipeline((1, 2))
    (value,) = graph.values
    lacking = Value("h0", 0, (1,), ELEMENTS, False, value.pieces[pieces_kept])
    with pytest.raises(InternalError) as caught:
        programs_of(SegmentGraph(graph.segments, (lacking,), 3), "gpipe", 1)
    assert f"value h0 goes from segment 0 on ranks (0,) to ranks (1, 2), but its pieces {said}" in str(
        caught.value
    )


def test_a_piece_that_is_lost_or_comes_late_is_found() -> None:
    graph = pipeline((2, 2))
    programs = list(programs_of(graph, "1f1b", 2))
    for drop in (Send, Recv):
        rank = next(r for r, p in enumerate(programs) for i in p.instructions if isinstance(i, drop))
        own = list(programs[rank].instructions)
        own.remove(next(i for i in own if isinstance(i, drop)))
        with pytest.raises(DeadlockError, match=r"never sends|never receives"):
            check([*programs[:rank], Program(rank, tuple(own)), *programs[rank + 1 :]], graph, 2)
    late = list(programs[2].instructions)
    late.sort(key=lambda i: isinstance(i, Recv))
    with pytest.raises(DeadlockError, match="wait for each other forever"):
        check([*programs[:2], Program(2, tuple(late)), programs[3]], graph, 2)


def test_sums_within_a_group_come_after_its_messages() -> None:
    graph = pipeline((2, 2))
    tied = (TiedGroup(("w",), (0, 1)), TiedGroup(("v",), (2, 3)), TiedGroup(("t",), (0, 1, 2, 3)))
    orders = SCHEDULES["1f1b"].order(graph, 2)
    programs = build_programs(graph, orders, 2, transfer_seconds=no_time, tied=tied)
    assert check(programs, graph, 2, tied=tied).collectives == 3
