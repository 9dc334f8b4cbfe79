"""The checker: what it accepts, and that each planted fault is rejected by name."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cost_models.errors import DeadlockError, InternalError
from runtime.check.check import RULES, check
from runtime.program.program import (
    Backward,
    BackwardWeight,
    ComputeOrder,
    Forward,
    Instruction,
    Message,
    OptimizerStep,
    Program,
    Recv,
    ReduceGradients,
    Segment,
    SegmentCost,
    SegmentGraph,
    Send,
    TiedGroup,
    group_queue,
    pair_queue,
)
from runtime.schedules import SCHEDULES
from tests.support.matrix import drawn
from tests.support.random_dags import Case, cases
from tests.support.rank_programs import build_programs
from tests.support.work import calls
from tests.unit.runtime.schedules.helpers import chain, gpipe, no_time, one_f_one_b, split_backward

TIED = (TiedGroup(("wte",), (0, 2)),)


def programs_of(stages: int = 3, microbatches: int = 2, order: Callable[..., ComputeOrder] = one_f_one_b):  # type: ignore[no-untyped-def]
    return build_programs(
        chain(stages), order(stages, microbatches), microbatches, transfer_seconds=no_time, tied=TIED
    )


def edited(
    programs: tuple[Program, ...], rank: int, edit: Callable[[list[Instruction]], object]
) -> list[Program]:
    """``programs`` after ``edit`` changed the list of one rank in place."""
    instructions = list(programs[rank].instructions)
    edit(instructions)
    return [replace(p, instructions=tuple(instructions)) if p.rank == rank else p for p in programs]


def at(instructions: list[Instruction], text: str) -> int:
    return [str(i) for i in instructions].index(text)


def drop(text: str) -> Callable[[list[Instruction]], object]:
    return lambda instructions: instructions.pop(at(instructions, text))


def move(text: str, to: int) -> Callable[[list[Instruction]], object]:
    return lambda instructions: instructions.insert(to, instructions.pop(at(instructions, text)))


def faults(programs: list[Program], error: type[InternalError] = InternalError) -> str:
    with pytest.raises(error) as caught:
        check(programs, chain(3), 2, tied=TIED)
    assert type(caught.value) is error
    return str(caught.value)


# What is accepted


def test_the_proof_says_what_was_proved() -> None:
    proof = check(programs_of(), chain(3), 2, tied=TIED)
    assert (proof.ranks, proof.messages, proof.collectives) == (3, 8, 1)
    assert proof.instructions == 12 + 16 + 2 + 3
    assert proof.rules == tuple(text for text, _ in RULES)
    assert str(proof).startswith(
        "checked 33 instructions on 3 ranks, 8 messages, 1 collective:\n  - every forward"
    )


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (3, 7)])
def test_every_published_schedule_is_accepted(name: str, p: int, m: int) -> None:
    schedule = SCHEDULES[name]
    stages = p * (schedule.chunks or 2)
    if schedule.check(stages, p, m) is not None:
        stages, m = stages, p * 3
    graph = chain(stages)
    ranks = schedule.stage_ranks(stages, range(p))
    graph = replace(
        graph,
        segments=tuple(replace(s, ranks=(r,)) for s, r in zip(graph.segments, ranks, strict=True)),
        world_size=p,
    )
    orders = schedule.order(graph, m)
    programs = build_programs(graph, orders, m, transfer_seconds=lambda s, t, n: 0.01)
    check(programs, graph, m)


@drawn(250)
@given(cases())
def test_programs_of_random_dags_are_accepted(case: Case) -> None:
    programs = build_programs(
        case.graph, case.orders, case.microbatches, transfer_seconds=case.transfer_seconds, tied=case.tied
    )
    check(programs, case.graph, case.microbatches, tied=case.tied)


@drawn(50)
@given(cases())
def test_forward_programs_of_random_dags_are_accepted(case: Case) -> None:
    orders = tuple(tuple(c for c in order if isinstance(c, Forward)) for order in case.orders)
    programs = build_programs(
        case.graph, orders, case.microbatches, transfer_seconds=case.transfer_seconds, training=False
    )
    check(programs, case.graph, case.microbatches, training=False)


# Deadlocks


def textbook(stages: int, microbatches: int) -> list[Program]:
    """Receive, compute, send: each communication where a textbook's 1F1B has it."""
    programs = []
    for s, order in enumerate(one_f_one_b(stages, microbatches)):
        instructions: list[Instruction] = []
        for c in order:
            mb, back = c.microbatch, isinstance(c, Backward)
            ahead, behind = (s + 1, s - 1) if back else (s - 1, s + 1)
            if 0 <= ahead < stages:
                message = Message(f"x{s if back else s - 1}", mb, back, ahead, s)
                instructions.append(Recv(message, pair_queue(s, ahead)))
            instructions.append(c)
            if 0 <= behind < stages:
                message = Message(f"x{s - 1 if back else s}", mb, back, s, behind)
                instructions.append(Send(message, pair_queue(s, behind)))
        programs.append(Program(s, (*instructions, OptimizerStep())))
    return programs


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("blocking", [True, False])
def test_textbook_1f1b_deadlocks(p: int, blocking: bool) -> None:
    with pytest.raises(DeadlockError) as caught:
        check(textbook(p, 2 * p), chain(p), 2 * p, blocking=blocking)
    assert len(caught.value.because) == 1
    assert "wait for each other forever" in str(caught.value)
    assert ("when sends and receives block" in str(caught.value)) is blocking


def test_the_circle_is_told_instruction_by_instruction() -> None:
    with pytest.raises(DeadlockError) as caught:
        check(textbook(2, 4), chain(2), 4)
    (reason,) = caught.value.because
    assert reason.startswith("these wait for each other forever with one queue per pair of ranks: ")
    circle = reason.split(": ", 1)[1].split("; ")
    # d(x0):0 cannot leave rank 1 before rank 0 receives it, behind its own send of x0:1; that waits for rank 1.
    assert len(circle) == 2
    assert any("rank 0" in line and "is queued behind" in line for line in circle)


@pytest.mark.parametrize("order", [gpipe, one_f_one_b])
def test_one_order_runs_where_the_textbook_does_not(order: Callable[..., ComputeOrder]) -> None:
    programs = build_programs(chain(4), order(4, 8), 8, transfer_seconds=no_time)
    check(programs, chain(4), 8)


def test_swapped_receives_deadlock() -> None:
    def swap(instructions: list[Instruction]) -> None:
        a, b = at(instructions, "<x0:0@0"), at(instructions, "<x0:1@0")
        instructions[a], instructions[b] = instructions[b], instructions[a]

    error = faults(edited(programs_of(order=gpipe), 1, swap), DeadlockError)
    assert "<x0:1@0" in error
    assert "is queued behind" in error


def test_a_circle_through_three_device_queues_is_found() -> None:
    """Each pair alone is in order, so only the rule of one queue per device sees it."""
    graph = chain(3)
    names = [("a", 0, 1), ("b", 1, 2), ("c", 2, 0)]
    sends = {name: Send(Message(name, 0, False, s, t), pair_queue(s, t)) for name, s, t in names}
    recvs = {name: Recv(m.message, m.queue) for name, m in sends.items()}
    lists = [[sends["a"], recvs["c"]], [sends["b"], recvs["a"]], [sends["c"], recvs["b"]]]
    with pytest.raises(DeadlockError) as caught:
        check([Program(r, tuple(lists[r])) for r in range(3)], graph, 0)
    assert "with one point-to-point queue per device" in str(caught.value)


def test_collectives_out_of_order_between_overlapping_groups_deadlock() -> None:
    tied = (TiedGroup(("a",), (0, 1, 2)), TiedGroup(("b",), (0, 1)))
    programs = build_programs(chain(3), gpipe(3, 2), 2, transfer_seconds=no_time, tied=tied)
    check(programs, chain(3), 2, tied=tied)
    wrong = edited(programs, 1, lambda i: i.insert(at(i, "+b@0,1"), i.pop(at(i, "+a@0,1,2"))))
    if wrong[1] == programs[1]:
        wrong = edited(programs, 1, lambda i: i.insert(at(i, "+a@0,1,2"), i.pop(at(i, "+b@0,1"))))
    with pytest.raises(DeadlockError) as caught:
        check(wrong, chain(3), 2, tied=tied)
    assert "comes after +a@0,1,2" in str(caught.value)
    assert "comes after +b@0,1" in str(caught.value)


# Messages


def test_a_missing_send() -> None:
    error = faults(edited(programs_of(), 0, drop(">x0:1@1")), DeadlockError)
    assert "rank 0: never sends x0:1 to rank 1" in error
    assert "rank 1: <x0:1@0" in error
    assert "has no send on rank 0" in error


def test_a_missing_receive() -> None:
    error = faults(edited(programs_of(), 1, drop("<x0:1@0")), DeadlockError)
    assert "rank 1: never receives x0:1 from rank 0" in error
    assert "has no receive on rank 1" in error


def test_a_forgotten_gradient_message() -> None:
    both = edited(programs_of(), 1, drop(">d(x0):0@0"))
    both = edited(tuple(both), 0, drop("<d(x0):0@1"))
    error = faults(both, DeadlockError)
    assert "rank 1: never sends d(x0):0 to rank 0" in error
    assert "rank 0: never receives d(x0):0 from rank 1" in error


def test_a_repeated_send() -> None:
    error = faults(edited(programs_of(), 0, lambda i: i.insert(5, i[at(i, ">x0:0@1")])), DeadlockError)
    assert "repeats the send" in error


def test_different_queues_on_the_two_sides() -> None:
    def other_queue(instructions: list[Instruction]) -> None:
        index = at(instructions, "<x0:0@0")
        instructions[index] = replace(instructions[index], queue="world")  # type: ignore[call-arg]

    assert "uses queue p2p:0-1" in faults(edited(programs_of(), 1, other_queue), DeadlockError)


def test_a_message_that_nobody_needs() -> None:
    message = Message("x0", 0, False, 0, 2)
    programs = edited(programs_of(), 0, lambda i: i.insert(1, Send(message, pair_queue(0, 2))))
    programs = edited(tuple(programs), 2, lambda i: i.insert(0, Recv(message, pair_queue(0, 2))))
    assert "moves a tensor that no segment needs" in faults(programs)


def test_a_value_sent_before_it_is_made() -> None:
    assert "sends before rank 0: 0F1" in faults(edited(programs_of(), 0, move(">x0:1@1", 0)), DeadlockError)


def test_a_value_received_after_it_is_used() -> None:
    def after_use(instructions: list[Instruction]) -> None:
        receive = instructions.pop(at(instructions, "<x0:0@0"))
        instructions.insert(at(instructions, "1F0") + 1, receive)

    error = faults(edited(programs_of(), 1, after_use), DeadlockError)
    assert "rank 1: <x0:0@0 (instruction 2) comes after rank 1: 1F0 (instruction 1) needs it" in error


# Computes


def test_a_missing_backward() -> None:
    assert "rank 1: 1B1 is missing, the backward owed by segment 1" in faults(
        edited(programs_of(), 1, drop("1B1"))
    )


def test_a_missing_weight_half() -> None:
    programs = build_programs(chain(3), split_backward(gpipe(3, 2)), 2, transfer_seconds=no_time, tied=TIED)
    check(programs, chain(3), 2, tied=TIED)
    assert "2W1 is missing, the weight half of backward" in faults(edited(programs, 2, drop("2W1")))


def test_a_weight_half_before_its_input_half() -> None:
    programs = build_programs(chain(3), split_backward(gpipe(3, 2)), 2, transfer_seconds=no_time, tied=TIED)
    early = edited(programs, 2, lambda i: i.insert(at(i, "2I0"), i.pop(at(i, "2W0"))))
    assert "rank 2: 2W0 (instruction 4) runs before rank 2: 2I0 (instruction 5)" in faults(early)


def test_a_whole_backward_and_a_half() -> None:
    programs = edited(programs_of(), 1, lambda i: i.insert(at(i, "1B0") + 1, BackwardWeight(1, 0)))
    assert "1W0 (instruction 8) is a weight half of backward that nothing owes" in faults(programs)


def test_a_double_forward() -> None:
    programs = edited(programs_of(), 1, lambda i: i.insert(at(i, "1B0"), Forward(1, 0)))
    assert "runs 2 times" in faults(programs)


def test_a_compute_on_the_wrong_rank() -> None:
    programs = edited(programs_of(), 1, drop("1B1"))
    programs = edited(tuple(programs), 0, lambda i: i.insert(len(i) - 2, Backward(1, 1)))
    error = faults(programs)
    assert "belongs on rank 1" in error
    assert "rank 1: 1B1 is missing" in error


# Tied gradients and the step


def test_a_forgotten_tied_gradient_sum() -> None:
    programs = edited(programs_of(), 0, drop("+wte@0,2"))
    programs = edited(tuple(programs), 2, drop("+wte@0,2"))
    error = faults(programs)
    assert "rank 0: the gradient of tied parameter wte is never summed over (0, 2)" in error
    assert "rank 2: the gradient of tied parameter wte is never summed over (0, 2)" in error


def test_a_reduction_that_one_rank_forgets() -> None:
    error = faults(edited(programs_of(), 2, drop("+wte@0,2")), DeadlockError)
    assert "waits for rank 2, which does not take part" in error


def test_a_reduction_before_the_last_backward() -> None:
    early = edited(programs_of(), 0, lambda i: i.insert(at(i, "0B1"), i.pop(at(i, "+wte@0,2"))))
    assert "+wte@0,2 (instruction" in faults(early)
    assert "sums before rank 0: 0B1" in faults(early)


def test_a_reduction_that_nobody_asked_for() -> None:
    extra = ReduceGradients(("wpe",), (0, 1), group_queue((0, 1)))
    programs = edited(programs_of(), 0, lambda i: i.insert(len(i) - 1, extra))
    programs = edited(tuple(programs), 1, lambda i: i.insert(len(i) - 1, extra))
    assert "sums wpe, which is not tied over these ranks" in faults(programs)


def test_a_step_before_a_backward() -> None:
    assert "step (instruction 0) comes before" in faults(edited(programs_of(), 1, move("step", 0)))


def test_a_rank_that_does_not_step() -> None:
    assert "rank 1: has a backward but no optimizer step" in faults(edited(programs_of(), 1, drop("step")))


def test_programs_without_an_optimizer_pass_unless_it_is_asked_for() -> None:
    programs = build_programs(chain(2), gpipe(2, 2), 2, transfer_seconds=no_time, optimizer=False)
    check(programs, chain(2), 2)
    with pytest.raises(InternalError, match="no optimizer step"):
        check(programs, chain(2), 2, optimizer=True)


# Mutations of random programs

Edit = Callable[[random.Random, list[Instruction]], bool]


def delete_any(dice: random.Random, instructions: list[Instruction]) -> bool:
    instructions.pop(dice.randrange(len(instructions)))
    return True


def repeat_any(dice: random.Random, instructions: list[Instruction]) -> bool:
    index = dice.randrange(len(instructions))
    instructions.insert(index + 1, instructions[index])
    return True


def swap_on_a_pair(dice: random.Random, instructions: list[Instruction]) -> bool:
    """Two communications with one peer, out of order on one side."""
    found = [i for i, instruction in enumerate(instructions) if isinstance(instruction, Send | Recv)]
    pairs = [
        (a, b)
        for a in found
        for b in found
        if a < b and instructions[a].queue == instructions[b].queue  # type: ignore[union-attr]
    ]
    if not pairs:
        return False
    a, b = dice.choice(pairs)
    instructions[a], instructions[b] = instructions[b], instructions[a]
    return True


def compute_to_the_front(dice: random.Random, instructions: list[Instruction]) -> bool:
    """A backward before its own forward."""
    backwards = [i for i, c in enumerate(instructions) if isinstance(c, Backward | BackwardWeight)]
    if not backwards:
        return False
    instructions.insert(0, instructions.pop(dice.choice(backwards)))
    return True


@drawn(250)
@given(
    cases(),
    st.sampled_from([delete_any, repeat_any, swap_on_a_pair, compute_to_the_front]),
    st.integers(0, 2**32),
)
def test_mutated_programs_are_rejected(case: Case, edit: Edit, seed: int) -> None:
    programs = build_programs(
        case.graph, case.orders, case.microbatches, transfer_seconds=case.transfer_seconds, tied=case.tied
    )
    dice = random.Random(seed)
    filled = [p.rank for p in programs if p.instructions]
    rank = dice.choice(filled)
    changed = []

    def apply(instructions: list[Instruction]) -> None:
        changed.append(edit(dice, instructions))

    mutant = edited(programs, rank, apply)
    assume(changed == [True])
    stepping = any(isinstance(i, OptimizerStep) for p in programs for i in p.instructions)
    with pytest.raises(InternalError):
        check(mutant, case.graph, case.microbatches, tied=case.tied, optimizer=stepping)


def test_twice_the_microbatches_are_checked_with_twice_the_work() -> None:
    graph = chain(64)

    def work(microbatches: int) -> int:
        orders = one_f_one_b(64, microbatches)
        programs = build_programs(graph, orders, microbatches, transfer_seconds=no_time)
        return calls(lambda: check(programs, graph, microbatches))

    assert work(128) <= 2.2 * work(64)


GROUP = SegmentGraph(tuple(Segment(s, (0, 1), SegmentCost(1.0, 2.0, 0.0)) for s in range(2)), (), 2)


SCATTERED = (TiedGroup(("w",), (0, 1), scattered=True),)


def group_programs() -> tuple[Program, ...]:
    order = tuple(
        c for mb in range(2) for c in (Forward(0, mb), Forward(1, mb), Backward(1, mb), Backward(0, mb))
    )
    return build_programs(GROUP, (order,), 2, transfer_seconds=no_time, tied=SCATTERED)


def test_ranks_that_run_a_segment_together_pass() -> None:
    programs = group_programs()
    assert str(programs[0]).replace("rank 0", "rank 1") == str(programs[1])
    assert check(programs, GROUP, 2, tied=SCATTERED).collectives == 1


def test_ranks_of_a_segment_in_different_orders_wait_forever() -> None:
    def swap(instructions: list[Instruction]) -> None:
        a, b = at(instructions, "0F0"), at(instructions, "1F0")
        instructions[a], instructions[b] = instructions[b], instructions[a]

    with pytest.raises(DeadlockError, match=r"rank 1: 0F0 \(its other side is on rank 0\) comes after 1F0"):
        check(edited(group_programs(), 1, swap), GROUP, 2, tied=SCATTERED)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (drop("1B1"), "rank 1: 1B1 is missing"),
        (drop("+/w@0,1"), "rank 1: the gradient of tied parameter w is never summed"),
        (drop("step"), "rank 1: has a backward but no optimizer step"),
        (lambda i: i.append(i[0]), "rank 1: 0F0 (instruction 10) runs 2 times"),
    ],
)
def test_one_rank_of_a_segment_that_differs_is_named(
    edit: Callable[[list[Instruction]], object], message: str
) -> None:
    with pytest.raises(InternalError) as caught:
        check(edited(group_programs(), 1, edit), GROUP, 2, tied=SCATTERED)
    assert message in str(caught.value)


def test_a_sum_that_scatters_on_one_rank_only() -> None:
    def whole(instructions: list[Instruction]) -> None:
        place = at(instructions, "+/w@0,1")
        instructions[place] = ReduceGradients(("w",), (0, 1), group_queue((0, 1)))

    with pytest.raises(InternalError, match="which does not take part"):
        check(edited(group_programs(), 1, whole), GROUP, 2, tied=SCATTERED)


def requeued(programs: tuple[Program, ...], old: str, new: str) -> list[Program]:
    """Both sides of everything on one queue, on another."""
    return [
        replace(
            program,
            instructions=tuple(
                replace(i, queue=new)
                if isinstance(i, Send | Recv | ReduceGradients) and i.queue == old
                else i
                for i in program.instructions
            ),
        )
        for program in programs
    ]


@pytest.mark.parametrize(("old", "new"), [("p2p:0-1", "p2p:1-2"), ("group:0-2", "group:0-1-2")])
def test_a_queue_that_both_sides_agree_on_and_that_is_not_theirs(old: str, new: str) -> None:
    text = faults(requeued(programs_of(), old, new), DeadlockError)
    assert f"uses queue {new}" in text


def test_a_scatter_after_the_sum_of_its_parts() -> None:
    """Two axes: the gradient is scattered along one, and the parts are summed along the other."""
    ranks = (0, 1, 2, 3)
    graph = SegmentGraph((Segment(0, ranks, SegmentCost(1.0, 1.0, 1.0)),), (), 4)
    tied = (
        TiedGroup(("w",), (0, 1), True),
        TiedGroup(("w",), (2, 3), True),
        TiedGroup(("w",), (0, 2)),
        TiedGroup(("w",), (1, 3)),
    )
    order = ((Forward(0, 0), Backward(0, 0)),)
    programs = build_programs(graph, order, 1, transfer_seconds=no_time, tied=tied)
    check(programs, graph, 1, tied=tied)

    def swap(instructions: list[Instruction]) -> None:
        first, second = (n for n, i in enumerate(instructions) if isinstance(i, ReduceGradients))
        instructions[first], instructions[second] = instructions[second], instructions[first]

    mutant = list(programs)
    for rank in ranks:
        mutant = edited(tuple(mutant), rank, swap)
    with pytest.raises(DeadlockError, match="after a sum that is of its result"):
        check(mutant, graph, 1, tied=tied)
