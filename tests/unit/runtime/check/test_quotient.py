"""The proof by groups: it proves what the checker of all ranks proves, and refuses what that refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from benchmarks import quotient_scale
from benchmarks.quotient_mutants import ESCAPE, Mutant, mutants, verdict
from cost_models.errors import DeadlockError, InternalError
from runtime.check import quotient
from runtime.check.check import check
from runtime.check.quotient import check_groups, some_of_each
from runtime.program.members import GroupPrograms
from runtime.program.order import build_group_programs
from runtime.program.program import (
    Forward,
    Instruction,
    Program,
    Recv,
    ReduceGradients,
    SegmentGraph,
    Send,
    TiedGroup,
    group_queue,
)
from runtime.schedules import SCHEDULES
from tests.support.work import calls
from tests.unit.runtime.program.test_between_groups import pipeline
from tests.unit.runtime.schedules.helpers import no_time

GROUPS = [(1, 1), (2, 2), (1, 3), (2, 1, 1), (4, 4)]
TIED = (TiedGroup(("w",), (0, 1)), TiedGroup(("t",), (0, 1, 2, 3)))


def grouped(graph: SegmentGraph, schedule: str, *, one_queue: bool = False) -> GroupPrograms:
    orders = SCHEDULES[schedule].order(graph, 6)
    return build_group_programs(
        graph, orders, 6, transfer_seconds=no_time, tied=TIED[: graph.world_size // 2], one_queue=one_queue
    )


@pytest.mark.parametrize("one_queue", [False, True])
@pytest.mark.parametrize(
    ("schedule", "rounds"), [("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("interleaved", 2)]
)
@pytest.mark.parametrize("sizes", GROUPS)
def test_the_proof_by_groups_is_that_of_all_ranks(
    sizes: tuple[int, ...], schedule: str, rounds: int, one_queue: bool
) -> None:
    graph = pipeline(sizes, rounds)
    groups = grouped(graph, schedule, one_queue=one_queue)
    tied = TIED[: graph.world_size // 2]
    wanted = check(groups.all(), graph, 6, tied=tied, one_queue=one_queue)
    for members in (range(graph.world_size), some_of_each(graph), ()):
        proof = check_groups(
            groups.programs, graph, 6, member=groups.member, members=members, tied=tied, one_queue=one_queue
        )
        assert proof == wanted


def test_members_are_taken_from_everywhere_in_their_groups() -> None:
    assert some_of_each(pipeline((1, 2, 6), 2)) == [0, 1, 2, 3, 6, 8]


# What is refused


def refused(
    change: Callable[[list[Instruction]], object],
    rank: int,
    *,
    of_group: bool = False,
    error: type[InternalError] = DeadlockError,
) -> str:
    """Change the program of a rank, or of the group that it leads; return what the proof says."""
    graph = pipeline((2, 2))
    groups = grouped(graph, "1f1b")
    own = list((groups.programs if of_group else groups.all())[rank].instructions)
    change(own)
    changed = Program(rank, tuple(own))
    programs = groups.programs
    if of_group:
        programs = tuple(changed if program.rank == rank else program for program in programs)
        groups = replace(groups, programs=programs)
    with pytest.raises(error) as caught:
        check_groups(
            programs,
            graph,
            6,
            member=lambda r: changed if r == rank and not of_group else groups.member(r),
            members=range(4),
            tied=TIED,
        )
    return str(caught.value)


def first(instructions: list[Instruction], kind: type) -> int:
    return next(n for n, i in enumerate(instructions) if isinstance(i, kind))


def test_a_member_that_leaves_out_a_piece_is_found() -> None:
    said = refused(lambda own: own.pop(first(own, Recv)), 3)
    assert "rank 3: <h0:1@1 (instruction 0) where its group's program has <h0:0@1" in said


def test_a_member_that_computes_in_another_order_is_found() -> None:
    def swap(own: list[Instruction]) -> None:
        a, b = [n for n, i in enumerate(own) if isinstance(i, Forward)][:2]
        own[a], own[b] = own[b], own[a]

    assert "rank 1: 0F1 (instruction 0) where its group's program has 0F0" in refused(swap, 1)


def test_a_member_without_a_sum_is_found() -> None:
    said = refused(lambda own: own.pop(first(own, ReduceGradients)), 1)
    assert "where its group's program has +w@0,1" in said


def test_a_group_that_never_sends_is_found_and_so_are_late_receives() -> None:
    assert "rank 0: never sends h0:0 to rank 2" in refused(
        lambda own: own.pop(first(own, Send)), 0, of_group=True
    )
    late = refused(lambda own: own.sort(key=lambda i: isinstance(i, Recv)), 2, of_group=True)
    assert "wait for each other forever" in late


def test_a_sum_that_a_group_leaves_out_is_found_for_each_of_its_ranks() -> None:
    said = refused(lambda own: own.pop(first(own, ReduceGradients)), 0, of_group=True, error=InternalError)
    assert "the gradient of tied parameter w is never summed over (0, 1)" in said
    assert "rank 0: the gradient" in said
    assert "rank 1: the gradient" in said


def test_a_sum_of_other_groups_is_found() -> None:
    other = ReduceGradients(("v",), (2, 3), group_queue((2, 3)))
    said = refused(lambda own: own.insert(-1, other), 0, of_group=True)
    assert "rank 0: +v@2,3 sums over ranks of other groups alone" in said


def test_a_program_of_a_rank_that_follows_another_is_found() -> None:
    said = refused(lambda own: own.append(Forward(0, 0)), 1, of_group=True, error=InternalError)
    assert "rank 1 follows rank 0, but has a program of its own" in said


def test_a_piece_that_is_listed_twice_is_found() -> None:
    graph = pipeline((1, 2))
    (value,) = graph.values
    twice = replace(graph, values=(replace(value, pieces=(*value.pieces, value.pieces[0])),))
    groups = grouped(twice, "gpipe")
    with pytest.raises(DeadlockError, match="value h0 has two pieces from rank 0 to rank 1"):
        check_groups(groups.programs, twice, 6, member=groups.member, members=(), tied=TIED[:1])


def test_programs_of_thousands_of_ranks_are_proved_without_being_made() -> None:
    """4,096 ranks, 64 micro-batches: 1.5 million instructions, of which those of 16 groups and 48 ranks are made."""
    graph, tied = quotient_scale.pipeline(16, 256)
    proofs = []

    def prove() -> None:
        orders = SCHEDULES["1f1b"].order(graph, 64)
        groups = build_group_programs(graph, orders, 64, transfer_seconds=no_time, tied=tied, one_queue=True)
        some = some_of_each(graph)
        proofs.append(
            check_groups(
                groups.programs, graph, 64, member=groups.member, members=some, tied=tied, one_queue=True
            )
        )

    assert calls(prove) < 1_500_000
    (proof,) = proofs
    assert (proof.ranks, proof.messages, proof.collectives) == (4096, 2 * 15 * 256 * 64, 16 * 8)


# Mutants: ``python -m benchmarks.quotient_mutants`` draws thousands


@pytest.fixture(scope="module")
def drawn_mutants() -> list[Mutant]:
    return list(mutants(80, seed=0))


@pytest.mark.parametrize("one_queue", [False, True])
def test_no_mutant_is_accepted_that_the_checker_of_all_ranks_refuses(
    drawn_mutants: list[Mutant], one_queue: bool
) -> None:
    found = [verdict(mutant, one_queue) for mutant in drawn_mutants]
    assert ESCAPE not in found
    assert len(set(found)) == 3, "some accepted by both, some refused by both, some by the groups' alone"


@pytest.mark.parametrize("rule", ["_follows", "_pieces_once"])
def test_mutants_escape_a_proof_that_lacks_a_rule(
    drawn_mutants: list[Mutant], rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quotient, rule, lambda *_: iter(()))
    assert ESCAPE in [verdict(mutant, False) for mutant in drawn_mutants]


def test_mutants_escape_a_proof_without_deadlocks(
    drawn_mutants: list[Mutant], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quotient, "RULES", quotient.RULES[:-1])
    assert ESCAPE in [verdict(mutant, True) for mutant in drawn_mutants]
