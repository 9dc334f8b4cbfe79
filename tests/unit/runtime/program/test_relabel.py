"""Ranks renamed: the same programs under other numbers, proved again."""

from __future__ import annotations

import random
from itertools import permutations

import pytest

from cost_models.errors import InternalError
from runtime.check.check import check
from runtime.program.program import Program, Segment, SegmentCost, SegmentGraph, Send, TiedGroup, Value
from runtime.program.relabel import RankMap, relabelled_programs, relabelled_segments
from runtime.schedules import SCHEDULES
from tests.support.rank_programs import build_programs

COST = SegmentCost(1.0, 1.0, 1.0)
TIED: list[TiedGroup] = [TiedGroup(("wte",), (0, 3))]


def chain(devices: tuple[int, ...], world_size: int) -> SegmentGraph:
    segments = tuple(Segment(s, (device,), COST) for s, device in enumerate(devices))
    values = tuple(Value(f"h{s}", s, (s + 1,), 8, True) for s in range(len(devices) - 1))
    return SegmentGraph(segments, values, world_size)


def programs_of(
    graph: SegmentGraph, microbatches: int, tied: list[TiedGroup], schedule: str
) -> tuple[Program, ...]:
    orders = SCHEDULES[schedule].order(graph, microbatches)
    return build_programs(graph, orders, microbatches, transfer_seconds=lambda *_: 0.1, tied=tied)


def test_a_plan_on_three_of_four_devices_as_text() -> None:
    graph = chain((0, 2, 3), 4)
    programs = programs_of(graph, 2, TIED, "gpipe")
    assert [str(program) for program in programs] == [
        "rank 0: 0F0 >h0:0@2 0F1 >h0:1@2 <d(h0):0@2 <d(h0):1@2 0B0 0B1 +wte@0,3 step",
        "rank 1: ",
        "rank 2: <h0:0@0 <h0:1@0 1F0 >h1:0@3 1F1 >h1:1@3 <d(h1):0@3 <d(h1):1@3 1B0 >d(h0):0@0 1B1 >d(h0):1@0 step",
        "rank 3: <h1:0@2 <h1:1@2 2F0 2F1 2B0 >d(h1):0@2 2B1 >d(h1):1@2 +wte@0,3 step",
    ]
    renamed = relabelled_programs(programs, RankMap((0, 3, 2)))
    assert [str(program) for program in renamed] == [
        "rank 0: 0F0 >h0:0@2 0F1 >h0:1@2 <d(h0):0@2 <d(h0):1@2 0B0 0B1 +wte@0,1 step",
        "rank 1: <h1:0@2 <h1:1@2 2F0 2F1 2B0 >d(h1):0@2 2B1 >d(h1):1@2 +wte@0,1 step",
        "rank 2: <h0:0@0 <h0:1@0 1F0 >h1:0@1 1F1 >h1:1@1 <d(h1):0@1 <d(h1):1@1 1B0 >d(h0):0@0 1B1 >d(h0):1@0 step",
    ]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "list"])
def test_every_renaming_is_proved_again(schedule: str) -> None:
    graph = chain((5, 1, 3), 6)
    tied: list[TiedGroup] = [TiedGroup(("a", "b"), (1, 5)), TiedGroup(("c",), (1, 3, 5))]
    programs = programs_of(graph, 5, tied, schedule)
    for devices in permutations((1, 3, 5)):
        ranks = RankMap(devices)
        segments = relabelled_segments(graph, ranks)
        renamed = relabelled_programs(programs, ranks)
        groups = [group._replace(ranks=tuple(sorted(ranks.ranks(group.ranks)))) for group in tied]
        check(renamed, segments, 5, tied=groups)
        assert segments.world_size == len(renamed) == 3
        queues = {i.queue for program in renamed for i in program.instructions if isinstance(i, Send)}
        assert queues == {
            f"p2p:{min(pair)}-{max(pair)}" for pair in (ranks.ranks((5, 1)), ranks.ranks((1, 3)))
        }


def test_renaming_back_gives_the_same_programs() -> None:
    graph = chain((2, 0, 1, 3), 4)
    programs = programs_of(graph, 3, TIED, "1f1b")
    devices = random.Random(0).sample(range(4), 4)
    there = RankMap(tuple(devices))
    back = RankMap(tuple(there.rank_of_device[device] for device in range(4)))
    assert relabelled_programs(relabelled_programs(programs, there), back) == programs
    assert relabelled_segments(relabelled_segments(graph, there), back) == graph


def test_what_cannot_be_renamed_is_refused() -> None:
    programs = programs_of(chain((0, 1), 2), 1, [], "gpipe")
    with pytest.raises(InternalError, match="nobody plays device 1, whose program has 5 instructions"):
        relabelled_programs(programs, RankMap((0,)))
    with pytest.raises(InternalError, match="a device stands twice"):
        RankMap((0, 0))
    odd = Send(programs[0].instructions[1].message, "everything")  # type: ignore[union-attr]
    with pytest.raises(InternalError, match="it is called everything, not p2p:0-1"):
        relabelled_programs([Program(0, (odd,)), Program(1, ())], RankMap((0, 1)))
