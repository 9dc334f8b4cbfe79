"""The communicators of groups' leaders are those that the executor would make for their own programs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cost_models.cluster import ClusterSpec
from cost_models.nccl_memory import CODE_BYTES, CommunicatorUse, communicator_bytes
from runtime.program.communicators import EVERYONE, GATHERS, SUMS, communicators_of_leaders, process_bytes
from runtime.program.members import GroupPrograms
from runtime.program.order import build_group_programs
from runtime.program.program import Collective, Program, Recv, ReduceGradients, SegmentGraph, Send, TiedGroup
from runtime.schedules import SCHEDULES
from tests.unit.runtime.program.test_between_groups import GROUPS, pipeline
from tests.unit.runtime.schedules.helpers import no_time

ALL = ((0, 1), (2, 3))


def programs_of(graph: SegmentGraph, tied: tuple[TiedGroup, ...] = ()) -> GroupPrograms:
    orders = SCHEDULES["1f1b"].order(graph, 4)
    return build_group_programs(graph, orders, 4, transfer_seconds=no_time, tied=tied)


def by_program(program: Program) -> dict[object, CommunicatorUse]:
    """What a rank's own instructions do with each communicator."""
    found: dict[object, CommunicatorUse] = {}
    for instruction in program.instructions:
        if isinstance(instruction, ReduceGradients):
            key: object = ("group", tuple(sorted(instruction.ranks)))
            use = GATHERS if instruction.scattered else SUMS
        elif isinstance(instruction, Send | Recv):
            message = instruction.message
            key = ("messages", tuple(sorted((message.source, message.target))))
            sends = isinstance(instruction, Send)
            use = CommunicatorUse(sends=int(sends), receives=int(not sends))
        else:
            continue
        found[key] = found.get(key, CommunicatorUse()) | use
    return found


@pytest.mark.parametrize("sizes", GROUPS, ids=str)
def test_those_of_leaders_are_their_programs(sizes: tuple[int, ...]) -> None:
    graph = pipeline(sizes)
    first, *_, last = (segment.ranks for segment in graph.segments)
    tied = (TiedGroup(("tied",), (first[0], last[0])), TiedGroup(("part",), first, scattered=True))
    groups = programs_of(graph, tied[: 1 + (len(first) > 1)])
    everyone = {("all", tuple(range(sum(sizes)))): EVERYONE}
    found = communicators_of_leaders(groups)
    assert found == {leader: everyone | by_program(groups.member(leader)) for leader in found}


def test_collectives_inside_of_segments_and_after_the_update() -> None:
    graph = pipeline((2, 2))
    inside = [Collective(kind, ALL, 1.0, False, axis="tensor") for kind in ("all_reduce", "all_to_all")]
    sharded = [replace(segment, collectives=tuple(inside)) for segment in graph.segments]
    groups = programs_of(replace(graph, segments=tuple(sharded)))
    found = communicators_of_leaders(groups, [Collective("all_gather", ((0, 1, 2, 3),), 1.0, False)])
    assert found[2]["group", (2, 3)] == CommunicatorUse(sums=True, sends=1, receives=1)
    assert found[0]["group", (0, 1, 2, 3)] == GATHERS


def test_a_process_holds_its_context_and_its_groups_communicators() -> None:
    cluster = ClusterSpec.preset("dgx-h100", nodes=1)
    groups = programs_of(pipeline((2, 2)))
    held = process_bytes(replace(groups, leader_of=(*groups.leader_of, 4, 5, 6, 7)), cluster)
    (first, uses), *_ = communicators_of_leaders(groups).items()
    assert first == 0
    own = sum(communicator_bytes(ranks, cluster, use) for (_, ranks), use in uses.items())
    assert held[0] == held[1] == (cluster.devices[0].context_bytes, own + CODE_BYTES, 0)
    assert held[4:] == ((0, 0, 0),) * 4
