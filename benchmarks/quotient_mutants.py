"""Mutants of pipelines of device groups: the proof by groups never accepts what the checker of all ranks refuses.

    python -m benchmarks.quotient_mutants                         1,000 mutants, with and without one queue for everything
    python -m benchmarks.quotient_mutants --count 5000 --seed 7

Random pipelines on at most 16 ranks are changed at random: the groups' programs, from which all ranks' then follow; the
programs of single ranks beside unchanged groups; or the pieces that a value lists. The edits are those of
``benchmarks.mutants`` and some that only groups have. Both checkers judge each mutant. A mutant that the groups' accepts
and the ranks' refuses is an escape. The converse is allowed: pieces of unlike ranks may overtake each other harmlessly.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.mutants import EDITS, Edit
from cost_models.errors import InternalError
from cost_models.layout import Layout, Mesh, Partial, Placement, Replicate, Shard
from runtime.check.check import check
from runtime.check.quotient import check_groups
from runtime.mesh.cross_mesh import pieces
from runtime.program.members import GroupPrograms
from runtime.program.order import build_group_programs
from runtime.program.program import (
    Instruction,
    OptimizerStep,
    PieceBytes,
    Program,
    Recv,
    ReduceGradients,
    Segment,
    SegmentCost,
    SegmentGraph,
    Send,
    TiedGroup,
    Value,
)
from runtime.schedules import SCHEDULES

GROUPS = [(1, 2), (2, 2), (1, 3), (3, 2), (2, 1, 1), (2, 3, 2), (4, 4), (1, 4, 3, 2), (6, 4, 6)]
SCHEDULED = [("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("interleaved", 2)]
"""A schedule, and the stages that it puts on each group."""

ELEMENTS = 24
"""Elements of every value: all sizes of groups above divide them."""


@dataclass(frozen=True)
class Subject:
    """A pipeline of groups and its programs."""

    programs: GroupPrograms
    microbatches: int
    tied: tuple[TiedGroup, ...]


def subject(draw: random.Random) -> Subject:
    """Draw a chain of stages, maybe with a skip, whose groups split or copy what they exchange and sum gradients."""
    sizes, (schedule, rounds) = draw.choice(GROUPS), draw.choice(SCHEDULED)
    ends = list(itertools.accumulate(sizes))
    groups = [tuple(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)] * rounds
    cost = SegmentCost(1.0, draw.choice([1.0, 1.5]), 1.0)
    ways = list(itertools.pairwise(range(len(groups))))
    if len(sizes) > 2 and draw.random() < 0.5:
        ways.append((0, len(groups) - 1))
    values = [
        _value(f"h{number}", producer, consumer, groups, draw.random() < 0.5)
        for number, (producer, consumer) in enumerate(ways)
    ]
    segments = tuple(Segment(index, ranks, cost) for index, ranks in enumerate(groups))
    graph = SegmentGraph(segments, tuple(values), ends[-1])
    tied = tuple(
        TiedGroup((f"w{number}",), tuple(sorted(draw.sample(range(ends[-1]), draw.randint(2, ends[-1])))))
        for number in range(draw.randint(0, 3))
    )
    microbatches = draw.choice([1, 2]) * len(sizes)
    slow = draw.choice([0.0, 0.01, 0.2])
    programs = build_group_programs(
        graph,
        SCHEDULES[schedule].order(graph, microbatches),
        microbatches,
        transfer_seconds=lambda source, target, size_bytes: slow * size_bytes * (1 + (source + target) % 3),
        tied=tied,
        one_queue=draw.random() < 0.5,
    )
    return Subject(programs, microbatches, tied)


def _value(name: str, producer: int, consumer: int, groups: Sequence[tuple[int, ...]], split: bool) -> Value:
    home, away = groups[producer], groups[consumer]
    leaving, arriving = _layout(home, Shard(0)), _layout(away, Shard(0) if split else Replicate())
    in_parts = _layout(away, Partial()) if not split and producer % 2 else arriving
    crosses = home != away
    return Value(
        name, producer, (consumer,), ELEMENTS // len(home), True,
        _sent(leaving, arriving) if crosses else (), _sent(in_parts, leaving) if crosses else (),
    )  # fmt: skip


def _layout(ranks: tuple[int, ...], placement: Placement) -> Layout:
    return Layout(Mesh(ranks, (len(ranks),), ("group",)), (placement,))


def _sent(source: Layout, target: Layout) -> tuple[PieceBytes, ...]:
    return tuple(PieceBytes(p.source, p.target, p.elements) for p in pieces((ELEMENTS,), source, target))


# --------------------------------------------------------------------------------------------------
# Changes that only groups have


def _runs(program: list[Instruction]) -> Iterator[tuple[int, int]]:
    """Yield the (first, behind the last) of neighbouring pieces of one bundle."""
    bundles = [(type(i), i.message[:3]) if isinstance(i, Send | Recv) else None for i in program]
    start = 0
    for bundle, same in itertools.groupby(bundles):
        end = start + len(list(same))
        if bundle is not None and end - start > 1:
            yield start, end
        start = end


def _shuffle_pieces(draw: random.Random, programs: list[list[Instruction]]) -> bool:
    """Give the pieces of a bundle another order on one rank."""
    found = [(program, run) for program in programs for run in _runs(program)]
    if not found:
        return False
    program, (start, end) = draw.choice(found)
    own = program[start:end]
    draw.shuffle(own)
    program[start:end] = own
    return True


def _shuffle_all_pieces(draw: random.Random, programs: list[list[Instruction]]) -> bool:
    """Give the pieces of every bundle another order, on every rank its own."""
    for program in programs:
        for start, end in list(_runs(program)):
            own = program[start:end]
            draw.shuffle(own)
            program[start:end] = own
    return True


def _drop_piece(draw: random.Random, programs: list[list[Instruction]]) -> bool:
    """Drop a piece: its send, its receive, or both."""
    messages = sorted({i.message for p in programs for i in p if isinstance(i, Send | Recv)})
    if not messages:
        return False
    gone, sides = draw.choice(messages), draw.choice([(Send,), (Recv,), (Send, Recv)])
    for program in programs:
        program[:] = [i for i in program if not (isinstance(i, sides) and i.message == gone)]
    return True


def _swap_computes(draw: random.Random, programs: list[list[Instruction]]) -> bool:
    """Swap two computes that follow each other on one rank."""
    program = draw.choice([p for p in programs if p])
    at = [n for n, i in enumerate(program) if _computes(i)]
    if len(at) < 2:
        return False
    a = draw.randrange(len(at) - 1)
    program[at[a]], program[at[a + 1]] = program[at[a + 1]], program[at[a]]
    return True


def _move_receive(draw: random.Random, programs: list[list[Instruction]]) -> bool:
    """Move a receive, and at times all behind it, to the other side of a compute, earlier or later."""
    found = [(p, n) for p in programs for n, i in enumerate(p) if isinstance(i, Recv)]
    if not found:
        return False
    program, at = draw.choice(found)
    computes = [n for n, i in enumerate(program) if _computes(i)]
    earlier, later = [n for n in computes if n < at], [n for n in computes if n > at]
    if earlier and (not later or draw.random() < 0.7):
        program.insert(draw.choice(earlier[-2:]), program.pop(at))
    elif later:
        program.insert(draw.choice(later[:2]), program.pop(at))
    return True


def _order(draw: random.Random, programs: list[list[Instruction]]) -> bool:
    """Change the order a little, several times: much of this is harmless, and the rest often only waits in a circle."""
    for _ in range(draw.randint(2, 5)):
        draw.choice([_move_receive, _swap_computes, EDITS["swap neighbours"]])(draw, programs)
    return True


def _computes(instruction: Instruction) -> bool:
    return not isinstance(instruction, Send | Recv | ReduceGradients | OptimizerStep)


GROUP_EDITS: dict[str, Edit] = {
    **EDITS,
    "computes": _swap_computes,
    "receive": _move_receive,
}
RANK_EDITS: dict[str, Edit] = {
    **GROUP_EDITS,
    "pieces": _shuffle_pieces,
    "all pieces": _shuffle_all_pieces,
    "drop piece": _drop_piece,
}


# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    """Groups' programs and all ranks', one of them or both changed."""

    name: str
    edit: str
    groups: GroupPrograms
    ranks: tuple[Program, ...]
    of: Subject

    def accepted_by_ranks(self, one_queue: bool) -> bool:
        """Tell whether the checker of all ranks accepts it."""
        graph, of = self.groups.graph, self.of
        return _accepted(lambda: check(self.ranks, graph, of.microbatches, tied=of.tied, one_queue=one_queue))

    def accepted_by_groups(self, one_queue: bool) -> bool:
        """Tell whether the proof by groups does, all members looked at."""
        return _accepted(
            lambda: check_groups(
                self.groups.programs,
                self.groups.graph,
                self.of.microbatches,
                member=self.ranks.__getitem__,
                members=range(len(self.ranks)),
                tied=self.of.tied,
                one_queue=one_queue,
            )
        )


def _accepted(prove: Callable[[], object]) -> bool:
    try:
        prove()
    except InternalError:
        return False
    return True


def mutants(count: int, seed: int) -> Iterator[Mutant]:
    """Draw ``count`` of them, each of a subject of its own."""
    drawn = (mutant(number) for number in itertools.count(seed))
    return itertools.islice((found for found in drawn if found is not None), count)


def mutant(seed: int) -> Mutant | None:
    """Draw a subject and change it once or twice; None if nothing changed."""
    draw = random.Random(seed)
    of = subject(draw)
    groups = of.programs
    before = groups.all()
    where = draw.choice(["groups", "groups", "groups", "order", "order", "ranks", "ranks", "both", "graph"])
    edits = []
    if where in ("groups", "order", "both"):
        several = {"order": _order} if where == "order" else GROUP_EDITS
        name, programs = _changed(draw, several, groups.programs)
        groups = replace(groups, programs=programs)
        edits.append(f"groups: {name}")
    if where == "graph":
        groups = replace(groups, graph=_with_a_piece_twice(draw, groups.graph))
        edits.append("graph: piece twice")
    ranks = groups.all()
    if where in ("ranks", "both"):
        name, ranks = _changed(draw, RANK_EDITS, ranks)
        edits.append(f"ranks: {name}")
    if groups == of.programs and ranks == before:
        return None
    return Mutant(f"seed {seed}", edits[-1] if len(edits) == 1 else "both", groups, ranks, of)


def _changed(
    draw: random.Random, edits: dict[str, Edit], programs: Sequence[Program]
) -> tuple[str, tuple[Program, ...]]:
    name = draw.choice(list(edits))
    lists = [list(program.instructions) for program in programs]
    edits[name](draw, lists)
    return name, tuple(replace(p, instructions=tuple(own)) for p, own in zip(programs, lists, strict=True))


def _with_a_piece_twice(draw: random.Random, graph: SegmentGraph) -> SegmentGraph:
    """Cut a piece in two, between the same ranks."""
    values = list(graph.values)
    at = draw.choice([n for n, value in enumerate(values) if value.pieces])
    value = values[at]
    if draw.random() < 0.5:
        values[at] = replace(value, pieces=_cut(*value.pieces))
    else:
        values[at] = replace(value, gradient_pieces=_cut(*value.gradient_pieces))
    return replace(graph, values=tuple(values))


def _cut(first: PieceBytes, *others: PieceBytes) -> tuple[PieceBytes, ...]:
    return first._replace(size_bytes=1), first._replace(size_bytes=first.size_bytes - 1), *others


BOTH_ACCEPT, BOTH_REFUSE, GROUPS_REFUSE, ESCAPE = "both accept", "both refuse", "groups' refuses", "escape"
VERDICTS = (BOTH_ACCEPT, BOTH_REFUSE, GROUPS_REFUSE, ESCAPE)


def verdict(mutated: Mutant, one_queue: bool) -> str:
    """Return what the two checkers make of a mutant."""
    ranks, groups = mutated.accepted_by_ranks(one_queue), mutated.accepted_by_groups(one_queue)
    return {(True, True): BOTH_ACCEPT, (False, False): BOTH_REFUSE, (True, False): GROUPS_REFUSE}.get(
        (ranks, groups), ESCAPE
    )


def main() -> int:
    """Judge the mutants of the command line; 1 if any escapes."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--count", type=int, default=1000)
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    escapes = []
    found: dict[bool, defaultdict[str, Counter[str]]] = {q: defaultdict(Counter) for q in (False, True)}
    for mutated in mutants(given.count, given.seed):
        for one_queue, tally in found.items():
            said = verdict(mutated, one_queue)
            tally[mutated.edit][said] += 1
            tally["all"][said] += 1
            if said == ESCAPE:
                escapes.append(f"{mutated.name}, one queue {one_queue}: {mutated.edit}")
    for one_queue, tally in found.items():
        print("one queue for everything" if one_queue else "queues for messages alone")
        print(f"{'':28}" + "".join(f"{name:>17}" for name in VERDICTS))
        for edit in sorted(tally, key=lambda name: (name == "all", name)):
            print(f"{edit:28}" + "".join(f"{tally[edit][name]:17}" for name in VERDICTS))
    for text in escapes:
        print(text)
    return 1 if escapes else 0


if __name__ == "__main__":
    sys.exit(main())
