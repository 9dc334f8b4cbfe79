"""The proof of the programs of groups, which stands for those of all their ranks.

``check`` reads the program of every rank; here each group of ranks that run segments together has one (``members``), and
a step of 16,384 ranks in 16 stages is proved as one of 16. The *quotient* of the ranks' programs by their groups:

    compute of a group       one node; so it is among ranks, who compute it together
    bundle                   one node for all pieces of a value and micro-batch from one group to another
    sum of gradients         one node; so it is among its ranks
    program of a group       a chain of computes and sums; bundles are issued between them, and queued, as among ranks

**A quotient without a fault and members that follow it are programs of ranks without a fault.** A member follows its group
if its program is the group's, with each bundle replaced by the pieces that the rank sends or receives of it, by
(target, source), and without the sums that are of other ranks.

*Nothing lost.* A rank computes what its group does, in the same order. A bundle is sent by the group that makes the value,
after it is made, and received by the group that uses it, before its use, once each; a piece of it is sent by one rank of
the one and received by one of the other, since the graph lists it once, at the same place of their programs. The graph
also says how many bytes it has: programs name none. Sums are looked at rank by rank: they say who takes part.

*No deadlock.* Suppose ranks wait in a circle. Each wait is one of a rank's program: a compute or sum behind another, a
piece issued behind a compute or sum, a compute behind a piece that it consumes, an operation behind another of its
queue. The group's program has what stands for the two in the same order and, where these differ, the quotient has the
same wait, or a way through sums and bundles that the rank has no part in. For these stand on the same chains: under each
rule of queues, a rank's queue is part of its group's. So the circle maps onto a closed walk of the quotient. This has no
circle, therefore the walk stays on one node. Computes and sums do not wait for themselves: a rank has each once. So the
node is a bundle, and each piece of the circle comes behind the one before in some rank's queue. But there pieces are
ordered by (target, source), which rises with every wait and cannot come back.

The converse does not hold: pieces of unlike ranks may overtake each other harmlessly, which the quotient refuses.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from cost_models.errors import DeadlockError, InternalError
from cost_models.units import counted
from runtime.check.check import RULES, Proof, rule_texts
from runtime.check.facts import Fault, ProgramFacts
from runtime.check.sums import tied_summed
from runtime.collector import collector_paused
from runtime.program.crossings import crossings
from runtime.program.groups import on_leaders, refuse_impossible_groups
from runtime.program.program import (
    Collective,
    Instruction,
    Message,
    Program,
    Recv,
    ReduceGradients,
    Segment,
    SegmentGraph,
    Send,
    TiedGroup,
    pair_queue,
)

_BundleEnds: TypeAlias = tuple[str, bool, int, int]
"""(value, gradient or not, first rank of the group that sends, first rank of the one that receives)."""


@collector_paused()
def check_groups(
    programs: Sequence[Program],
    graph: SegmentGraph,
    microbatches: int,
    *,
    member: Callable[[int], Program],
    members: Iterable[int],
    tied: Sequence[TiedGroup] = (),
    training: bool = True,
    optimizer: bool | None = None,
    one_queue: bool = False,
) -> Proof:
    """Prove the programs of groups, and that those of ``members`` follow them, or raise with every fault found.

    programs    the group's program at the number of its first rank; those of the ranks that follow it are empty
    graph       that of the ranks
    member      makes a rank's program; every rank's is proved if all come from it
    members     the ranks whose programs are made and compared: all before they run, ``some_of_each`` while planning

    Everything else, and the errors raised, as in ``check``, whose rules these are.
    """
    refuse_impossible_groups(graph)
    led = on_leaders(graph)
    misplaced = [n for n, program in enumerate(programs) if program.rank != n]
    if len(programs) != graph.world_size or misplaced:
        raise InternalError(f"check {len(programs)} programs of {graph.world_size} ranks, by groups",
                            [f"program {n} is for rank {programs[n].rank}" for n in misplaced])  # fmt: skip
    quotient = replace(led.graph, segments=tuple(map(_still_shared, led.graph.segments, graph.segments)))
    facts = ProgramFacts(programs, quotient, microbatches, tied, training, optimizer, False, one_queue)
    bundles = _bundles(graph)
    faults = [*_pieces_once(bundles), *_followers_without(programs, led.leader_of)]
    for _, rule in RULES:
        faults += rule(_by_rank(facts, led.leader_of) if rule is tied_summed else facts)
    peers = _peers(bundles)
    count = 0
    for rank in members:
        count += 1
        faults += _follows(member(rank), programs[led.leader_of[rank]], rank, peers)
    if faults:
        error = DeadlockError if any(fault.hangs for fault in faults) else InternalError
        raise error(
            f"check the programs of {counted(len(set(led.leader_of)), 'group')} of {counted(graph.world_size, 'rank')}"
            f" and of {counted(count, 'member')}: {counted(len(faults), 'fault')}",
            [fault.text for fault in faults],
        )
    return Proof(
        ranks=graph.world_size,
        instructions=_instructions(programs, led.leader_of, bundles),
        messages=sum(len(bundles[_bundle(message)]) for message in facts.sends),
        collectives=len({reduction for _, reduction in facts.reductions}),
        rules=rule_texts(one_queue),
    )


def some_of_each(graph: SegmentGraph) -> list[int]:
    """Return the first, the middle and the last rank of each group: those most unlike each other in their pieces."""
    groups = dict.fromkeys(segment.ranks for segment in graph.segments)
    return [rank for g in groups for rank in dict.fromkeys((g[0], g[len(g) // 2], g[-1]))]


def _still_shared(leaders: Segment, ranks: Segment) -> Segment:
    """Return the leader's segment with a collective, if ranks compute it together: its group's queue runs it.

    Without it no circle would be missed: whatever the group communicates next is behind the same messages in its queue.
    But every wait of the ranks would not have its own in the quotient.
    """
    inside = (Collective("compute", (ranks.ranks,), 0.0, False),) if ranks.shared else ()
    return replace(leaders, collectives=inside)


def _bundle(message: Message) -> _BundleEnds:
    return message.value, message.gradient, message.source, message.target


def _bundles(graph: SegmentGraph) -> dict[_BundleEnds, list[tuple[int, int]]]:
    """Return the (target, source) of the pieces of each bundle of a micro-batch, in order."""
    found: dict[_BundleEnds, list[tuple[int, int]]] = {}
    for value in graph.values:
        home = graph.segments[value.producer].rank
        for crossing in crossings(graph, value):
            away = crossing.ranks[0]
            for pieces, key in (
                (crossing.there, (value.name, False, home, away)),
                (crossing.back, (value.name, True, away, home)),
            ):
                if pieces:
                    found[key] = sorted((piece.target, piece.source) for piece in pieces)
    return found


def _peers(
    bundles: Mapping[_BundleEnds, Sequence[tuple[int, int]]],
) -> dict[tuple[_BundleEnds, int], list[int]]:
    """Return the ranks with which a rank exchanges its pieces of a bundle, in order."""
    found: dict[tuple[_BundleEnds, int], list[int]] = {}
    for bundle, pieces in bundles.items():
        for target, source in pieces:
            found.setdefault((bundle, source), []).append(target)
            found.setdefault((bundle, target), []).append(source)
    return found


def _pieces_once(bundles: Mapping[_BundleEnds, Sequence[tuple[int, int]]]) -> Iterator[Fault]:
    """Find pieces that a value lists twice: which send is which receive's would be undefined."""
    for (value, gradient, _, _), pieces in bundles.items():
        for (target, source), (again, other) in itertools.pairwise(pieces):
            if (target, source) == (again, other):
                name = f"the gradient of {value}" if gradient else f"value {value}"
                yield Fault(f"{name} has two pieces from rank {source} to rank {target}", True)


def _followers_without(programs: Sequence[Program], leader_of: Sequence[int]) -> Iterator[Fault]:
    """Find programs of groups at ranks that do not lead one, and sums that none of the group's ranks takes part in."""
    for rank, leader in enumerate(leader_of):
        if rank != leader and programs[rank].instructions:
            yield Fault(f"rank {rank} follows rank {leader}, but has a program of its own among the groups'")
    for program in programs:
        for instruction in program.instructions:
            if isinstance(instruction, ReduceGradients) and not any(
                0 <= rank < len(leader_of) and leader_of[rank] == program.rank for rank in instruction.ranks
            ):
                yield Fault(f"rank {program.rank}: {instruction} sums over ranks of other groups alone", True)


def _by_rank(facts: ProgramFacts, leader_of: Sequence[int]) -> ProgramFacts:
    """Return what the rule of sums reads, for each rank: the sums that it takes part in and where its backwards end."""
    found = ProgramFacts(
        (), facts.graph, facts.microbatches, facts.tied, facts.training, facts.optimizer, False
    )
    found.programs = [facts.programs[leader] for leader in leader_of]
    for (leader, index), reduction in facts.reductions:
        for rank in reduction.ranks:
            if 0 <= rank < len(leader_of) and leader_of[rank] == leader:
                found.reductions.append(((rank, index), reduction))
    last = facts.last_backward
    found.last_backward = {rank: last[leader] for rank, leader in enumerate(leader_of) if leader in last}
    return found


def _follows(
    program: Program, group: Program, rank: int, peers: Mapping[tuple[_BundleEnds, int], Sequence[int]]
) -> Iterator[Fault]:
    """Find the first instruction of a rank that is not its part of its group's program."""
    if program.rank != rank:
        yield Fault(f"rank {rank} got the program of rank {program.rank}")
    wanted: list[Instruction] = []
    for instruction in group.instructions:
        match instruction:
            case Send(message=message):
                for target in peers.get((_bundle(message), rank), ()):
                    piece = message._replace(source=rank, target=target)
                    wanted.append(Send(piece, pair_queue(rank, target)))
            case Recv(message=message):
                for source in peers.get((_bundle(message), rank), ()):
                    piece = message._replace(source=source, target=rank)
                    wanted.append(Recv(piece, pair_queue(source, rank)))
            case ReduceGradients(ranks=ranks) if rank not in ranks:
                pass
            case _:
                wanted.append(instruction)
    for index, (own, other) in enumerate(itertools.zip_longest(program.instructions, wanted)):
        if own != other:
            yield Fault(f"rank {rank}: {own or 'nothing'} (instruction {index}) "
                        f"where its group's program has {other or 'nothing'}", True)  # fmt: skip
            return


def _instructions(
    programs: Sequence[Program],
    leader_of: Sequence[int],
    bundles: Mapping[_BundleEnds, Sequence[tuple[int, int]]],
) -> int:
    """Count the instructions of all ranks."""
    members = Counter(leader_of)
    count = 0
    for program in programs:
        for instruction in program.instructions:
            if isinstance(instruction, Send | Recv):
                count += len(bundles[_bundle(instruction.message)])
            elif isinstance(instruction, ReduceGradients):
                count += sum(leader_of[rank] == program.rank for rank in instruction.ranks)
            else:
                count += members[program.rank]
    return count
