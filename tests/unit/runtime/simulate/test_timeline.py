"""The pictures of a simulated step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runtime.program.program import Backward, ComputeOrder, Forward, SegmentGraph, TiedGroup
from runtime.schedules import SCHEDULES
from runtime.simulate.simulation import Simulation
from runtime.simulate.timeline import render, render_within
from tests.support.rank_programs import build_programs
from tests.support.simulate_ranks import simulate_ranks
from tests.support.uniform_links import UniformLinks
from tests.unit.runtime.schedules.helpers import chain, no_time, one_f_one_b, split_backward


def run(graph: SegmentGraph, order: ComputeOrder, microbatches: int) -> Simulation:
    programs = build_programs(
        graph, order, microbatches, transfer_seconds=no_time, tied=[TiedGroup(("wte",), (0, 1))]
    )
    return simulate_ranks(
        programs,
        graph,
        links=UniformLinks(1e12),
        optimizer_seconds=[1.0] * graph.world_size,
        reduce_seconds=lambda reduction: 1.0,
    )


def test_1f1b_reads_as_the_textbook_draws_it() -> None:
    assert render(run(chain(3), one_f_one_b(3, 4), 4), width=60) == (
        "step 20.0 s · bubble 40.0% · one column 333 ms\n"
        "rank 0  F0-F1-F2-............B0----F3-B1----...B2----...B3----+--S--  busy  60%  peak 360 B\n"
        "rank 1  ...F0-F1-......B0----F2-B1----F3-B2----...B3----......+--S--  busy  60%  peak 270 B\n"
        "rank 2  ......F0-B0----F1-B1----F2-B2----F3-B3----S--...............  busy  60%  peak 130 B"
    )


def test_split_backward_shows_both_halves() -> None:
    picture = render(run(chain(2), split_backward(one_f_one_b(2, 2)), 2), width=30)
    assert picture.splitlines()[1:] == [
        "rank 0  F0-F1-...I0-W0-...I1-W1-+--S--  busy  60%  peak 240 B",
        "rank 1  ...F0-I0-W0-F1-I1-W1-...+--S--  busy  60%  peak 130 B",
    ]


def test_several_segments_of_a_rank_are_told_apart_where_there_is_room() -> None:
    graph = chain(4)
    ranks = SCHEDULES["zb-v"].stage_ranks(4, range(2))
    graph = replace(
        graph,
        segments=tuple(replace(s, ranks=(r,)) for s, r in zip(graph.segments, ranks, strict=True)),
        world_size=2,
    )
    simulation = run(graph, SCHEDULES["zb-v"].order(graph, 4), 4)
    wide = render(simulation, width=round(simulation.step_seconds * 4))
    assert "0F0-" in wide
    assert "3I0-" in wide
    narrow = render(simulation, width=round(simulation.step_seconds))
    assert "0F0" not in narrow
    assert "F" in narrow


def test_columns_never_overflow_and_an_empty_step_is_said() -> None:
    simulation = run(chain(3), one_f_one_b(3, 64), 64)
    for width in (1, 7, 80, 501):
        rows = render(simulation, width=width).splitlines()[1:]
        assert len({row.index("  busy") for row in rows}) == 1
        assert all(row.index("  busy") == len("rank 0  ") + width for row in rows)
    empty = simulate_ranks((), SegmentGraph((), (), 0), links=UniformLinks(1.0))
    assert render(empty) == "the step takes no time"


def equal_chains(ranks: int) -> Simulation:
    """Simulate ranks that do the same, with nothing between them."""
    one = chain(1).segments[0]
    graph = SegmentGraph(tuple(replace(one, index=r, ranks=(r,)) for r in range(ranks)), (), ranks)
    return run(graph, tuple((Forward(r, 0), Backward(r, 0)) for r in range(ranks)), 1)


def test_ranks_that_look_alike_share_a_row() -> None:
    assert render(equal_chains(16), width=15).splitlines()[1:] == [
        "ranks 0-1   F0-B0----+--S--  busy  60%  peak 100 B",
        "ranks 2-15  F0-B0----S--...  busy  60%  peak 100 B",
    ]


def test_of_many_rows_the_first_and_last_are_drawn() -> None:
    simulation = run(chain(40), one_f_one_b(40, 2), 2)
    rows = render(simulation, width=60, most_rows=6).splitlines()[1:]
    assert [row.split()[:2] for row in rows] == [
        ["rank", "0"], ["rank", "1"], ["rank", "2"], ["…", "(34"], ["rank", "37"], ["rank", "38"], ["rank", "39"]
    ]  # fmt: skip


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_timeline_keeps_within_a_width(width: int) -> None:
    for simulation in (run(chain(3), one_f_one_b(3, 4), 4), equal_chains(16)):
        rows = render_within(simulation, width).splitlines()[1:]
        assert max(map(len, rows)) == width
