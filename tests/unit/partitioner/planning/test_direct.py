"""Fully connected layers, each on a group of its own, in parts: messages and bytes of the direct interface, by closed form.

L layers of F parts, per micro-batch     2 (L - 1) F²   messages: each part gives each part of the next layer its columns,
                                                        and is given back a part of their gradient by each

In the plan, in the simulation, and in what ranks cut out of their tensors for process groups.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from cost_models.cluster import ClusterSpec
from cost_models.errors import InternalError, PlanError
from partitioner import Plan, partition
from partitioner.record.rebuild import plan_code, plan_programs, plan_segments, simulate_plan
from passes.lower.lower import value_spec
from runtime.check.check import check
from runtime.check.quotient import check_groups
from runtime.program.order import build_group_programs
from runtime.program.program import Message, Program, Recv, Send
from runtime.schedules import SCHEDULES
from tests.support.matrix import thinned
from tests.unit.partitioner.planning.test_message_counts import WIDTH, graph_of
from tests.unit.runtime.schedules.helpers import no_time

MICROBATCHES, SAMPLES = 3, 4
"""Samples of each micro-batch."""


@cache
def plan_of(layers: int, parts: int, cluster: ClusterSpec | None = None, samples: int = SAMPLES) -> Plan:
    """A layer per stage, by columns, so that each part needs all of what the layer before makes."""
    graph = graph_of(layers)
    linear = [node.name for node in graph.ops if "linear" in str(node.target)]
    return partition(
        graph,
        cluster or ClusterSpec.local(layers * parts),
        strategy="hybrid",
        fix={"pipeline": layers, "borders": tuple(linear[1:])},
        pins={"layers.*.weight": "S0"} if parts > 1 else {},
        schedule="1f1b",
        microbatches=MICROBATCHES,
        batch_size=MICROBATCHES * samples,
    )


def arriving(plan: Plan) -> list[str]:
    """How the value of the stage before arrives on every stage but the first."""
    found = []
    for value, stage in zip(plan.values, plan.stages[1:], strict=True):
        assert stage.sharding is not None
        found.append(stage.sharding.values[value.name])
    return found


@pytest.mark.parametrize(
    ("layers", "parts"), thinned(itertools.product([2, 3, 4], [1, 2, 4]), [(2, 1), (3, 2), (4, 4)])
)
def test_messages_and_bytes(layers: int, parts: int) -> None:
    plan = plan_of(layers, parts)
    assert parts == 1 or arriving(plan) == ["R~"] * (layers - 1)
    again = Plan.from_json(plan.model_dump_json())
    assert again == plan
    messages = 2 * (layers - 1) * parts**2 * MICROBATCHES
    assert plan.proof.messages == plan.prediction.messages == messages
    simulation = simulate_plan(again)
    assert simulation.message_count == messages
    columns = SAMPLES * WIDTH * 4 // parts
    wanted = {
        ends: columns * MICROBATCHES
        for before, after in itertools.pairwise(stage.devices for stage in plan.stages)
        for a, b in itertools.product(before, after)
        for ends in ((a, b), (b, a))
    }
    assert simulation.message_bytes == wanted
    assert handed_over(again, layers) == wanted


def handed_over(plan: Plan, layers: int) -> Counter[tuple[int, int]]:
    """Bytes that ranks cut out of their tensors for the messages of their programs."""
    graph, found = graph_of(layers), Counter[tuple[int, int]]()
    interfaces = {index: code.interfaces for index, code in plan_code(plan, graph).lowered().items()}
    stage_of = {rank: number for number, stage in enumerate(plan.stages) for rank in stage.devices}
    for message in sent(plan_programs(plan)):
        stage = stage_of[message.source]
        own = interfaces[stage].get(message.value)
        shape = (SAMPLES, WIDTH)  # a gradient's part is as large as the value
        if own is not None:
            there = (SAMPLES, WIDTH // len(plan.stages[stage].devices))
            shape = own.piece(shape if message.gradient else there, message.source, message.target).shape
        itemsize = value_spec(graph, message.value).dtype.itemsize
        found[message.source, message.target] += math.prod(shape) * itemsize
    return found


def sent(programs: tuple[Program, ...]) -> list[Message]:
    return [i.message for program in programs for i in program.instructions if isinstance(i, Send)]


@pytest.mark.parametrize(("samples", "arrives"), [(SAMPLES, "R~"), (2**16, "S0")])
def test_the_cheaper_way_of_gradients_is_taken(samples: int, arrives: str) -> None:
    """Between nodes little is taken directly, which saves waiting for a sum. Of much, each element crosses once: a node's
    own links gather it, and sum its gradient before."""
    assert arriving(plan_of(2, 8, ClusterSpec.preset("dgx-h100", nodes=2), samples)) == [arrives]


def test_no_part_of_a_gradient_is_forgotten_or_counted_twice() -> None:
    graph, count = plan_segments(plan_of(2, 2)), MICROBATCHES
    programs = plan_programs(plan_of(2, 2))
    check(programs, graph, count)
    gradient = next(m for m in sent(programs) if m.gradient)
    for keep in (0, 2):
        changed = []
        for program in programs:
            own = []
            for instruction in program.instructions:
                moves = isinstance(instruction, Send | Recv) and instruction.message == gradient
                own += [instruction] * (keep if moves else 1)
            changed.append(Program(program.rank, tuple(own)))
        with pytest.raises(InternalError, match=r"never|repeats"):
            check(changed, graph, count)


@pytest.mark.parametrize("fault", ["lost", "twice"])
def test_the_proof_of_groups_refuses_a_graph_without_a_part(fault: str) -> None:
    graph = plan_segments(plan_of(2, 2))
    groups = build_group_programs(
        graph, SCHEDULES["1f1b"].order(graph, 4), 4, transfer_seconds=no_time, optimizer=False
    )
    check_groups(groups.programs, graph, 4, member=groups.member, members=range(4), optimizer=False)
    (value,) = graph.values
    first, *others = value.gradient_pieces
    changed = tuple(others) if fault == "lost" else (first, first, *others)
    faulty = replace(graph, values=(replace(value, gradient_pieces=changed),))
    with pytest.raises(InternalError, match=r"not as many parts|two pieces"):
        check_groups(groups.programs, faulty, 4, member=groups.member, members=range(4), optimizer=False)


@pytest.mark.parametrize(
    ("stage", "text", "said"),
    [
        (0, "R~", "no other stage is sent a gradient of it"),
        (1, "S1~", "is not"),
        (1, "P", "no part of a sum"),
    ],
)
def test_what_cannot_be_is_refused_in_a_plan_file(stage: int, text: str, said: str) -> None:
    data = json.loads(plan_of(2, 2).model_dump_json())
    (name,) = data["stages"][stage]["sharding"]["values"]
    data["stages"][stage]["sharding"]["values"][name] = text
    with pytest.raises(PlanError, match=said):
        Plan.from_json(json.dumps(data))
