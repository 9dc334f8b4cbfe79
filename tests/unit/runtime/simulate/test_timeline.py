"""The pictures of a simulated step."""

from __future__ import annotations

import json
from dataclasses import replace

from runtime.program.order import build_programs
from runtime.program.program import ComputeOrder, SegmentGraph, TiedGroup
from runtime.schedules import SCHEDULES
from runtime.simulate.simulate import Simulation, simulate
from runtime.simulate.timeline import chrome_trace, render
from tests.support.uniform_links import UniformLinks
from tests.unit.runtime.schedules.helpers import chain, no_time, one_f_one_b, split_backward


def run(graph: SegmentGraph, order: ComputeOrder, microbatches: int) -> Simulation:
    programs = build_programs(
        graph, order, microbatches, transfer_seconds=no_time, tied=[TiedGroup(("wte",), (0, 1))]
    )
    return simulate(
        programs,
        graph,
        links=UniformLinks(1e12),
        optimizer_seconds=[1.0] * graph.world_size,
        reduce_seconds=lambda reduction: 1.0,
    )


def test_1f1b_reads_as_the_textbook_draws_it() -> None:
    assert render(run(chain(3), one_f_one_b(3, 4), 4), width=60) == (
        "step 20.000 s · bubble 40.0% · one column 333.333 ms\n"
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
    empty = simulate((), SegmentGraph((), (), 0), links=UniformLinks(1.0))
    assert render(empty) == "the step takes no time"


def test_the_trace_is_json_with_every_instruction_transfer_and_memory_change() -> None:
    simulation = run(chain(2), one_f_one_b(2, 2), 2)
    events = json.loads(json.dumps(chrome_trace(simulation)))["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    assert [e["name"] for e in slices if e["pid"] == 0] == ["0F0", "0F1", "0B0", "0B1", "+wte@0,1", "step"]
    assert slices[0] == {
        "name": "0F0", "cat": "forward", "ph": "X", "pid": 0, "tid": 0, "ts": 0.0, "dur": 1e6,
    }  # fmt: skip
    begins = [e for e in events if e["ph"] == "b"]
    ends = [e for e in events if e["ph"] == "e"]
    assert len(begins) == len(ends) == simulation.message_count == 4
    assert {e["args"]["to"] for e in begins} == {0, 1}
    peak = max(e["args"]["bytes"] for e in events if e["ph"] == "C" and e["pid"] == 0)
    assert peak == simulation.peak_bytes[0]
