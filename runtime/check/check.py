"""The check that programs run to their end and lose no gradient, before a plan is saved or executed.

``check`` reads nothing but the programs and the segment graph: it shares no code with what made the programs, but for the
names of queues, the pieces that a value lists, and ``refuse_impossible_groups``, by which both refuse graphs that programs
cannot serve.
Each rule is a function that yields faults; all are reported at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from cost_models.errors import DeadlockError, InternalError
from cost_models.units import counted
from runtime.check.deadlock import QueueRule, find_deadlock
from runtime.check.facts import Fault, ProgramFacts
from runtime.check.sums import tied_summed
from runtime.collector import collector_paused
from runtime.program.crossings import pieces_between
from runtime.program.groups import refuse_impossible_groups
from runtime.program.program import (
    Message,
    PieceBytes,
    Program,
    SegmentGraph,
    TiedGroup,
    pair_queue,
)


@dataclass(frozen=True)
class Proof:
    """The facts proved about a set of programs."""

    ranks: int
    instructions: int
    messages: int
    collectives: int
    rules: tuple[str, ...]

    def __str__(self) -> str:
        size = f"{counted(self.instructions, 'instruction')} on {counted(self.ranks, 'rank')}"
        size += f", {counted(self.messages, 'message')}"
        if self.collectives:
            size += f", {counted(self.collectives, 'collective')}"
        return f"checked {size}:\n" + "\n".join(f"  - {rule}" for rule in self.rules)


_NAME = {"F": "forward", "B": "backward", "I": "input half of backward", "W": "weight half of backward"}


@collector_paused()
def check(
    programs: Sequence[Program],
    graph: SegmentGraph,
    microbatches: int,
    *,
    tied: Sequence[TiedGroup] = (),
    training: bool = True,
    optimizer: bool | None = None,
    blocking: bool = False,
    one_queue: bool = False,
) -> Proof:
    """Prove the rules of ``RULES`` for ``programs``, or raise with every fault found.

    optimizer   True: ranks with a backward must step; False: none may; None: all of them or none
    blocking    judge programs whose sends and receives block their rank until they complete
    one_queue   judge them for devices that have one queue for everything, collectives included, as well

    Raises ``DeadlockError`` if some rank would wait forever, ``InternalError`` for every other fault.
    """
    refuse_impossible_groups(graph)
    misplaced = [
        f"program {index} of {len(programs)} is for rank {program.rank}"
        for index, program in enumerate(programs)
        if program.rank != index
    ]
    if len(programs) != graph.world_size or misplaced:
        raise InternalError(f"check {len(programs)} programs of {graph.world_size} ranks", misplaced)
    facts = ProgramFacts(programs, graph, microbatches, tied, training, optimizer, blocking, one_queue)
    faults = [fault for _, rule in RULES for fault in rule(facts)]
    if faults:
        error = DeadlockError if any(fault.hangs for fault in faults) else InternalError
        raise error(
            f"check the programs of {counted(len(programs), 'rank')}: {counted(len(faults), 'fault')}",
            [fault.text for fault in faults],
        )
    return Proof(
        ranks=len(programs),
        instructions=sum(len(program.instructions) for program in programs),
        messages=len(facts.sends),
        collectives=len({reduction for _, reduction in facts.reductions}),
        rules=rule_texts(one_queue),
    )


def rule_texts(one_queue: bool) -> tuple[str, ...]:
    """Return what was proved when no rule found a fault."""
    *texts, no_deadlock = (text for text, _ in RULES)
    return (*texts, f"{no_deadlock}, for messages or for everything" if one_queue else no_deadlock)


def _computes_owed(facts: ProgramFacts) -> Iterator[Fault]:
    """Find computes that break: each forward once on each rank, each owed backward once, whole or halved; in that order."""
    owed: set[tuple[str, int, int]] = set()
    for segment in facts.graph.segments:
        s = segment.index
        for mb in range(facts.microbatches):
            kinds = "F"
            if facts.training and segment.has_backward:
                halves = ("I", s, mb) in facts.computes or ("W", s, mb) in facts.computes
                kinds = "FIW" if halves and ("B", s, mb) not in facts.computes else "FB"
            owed.update((kind, s, mb) for kind in kinds)
            for rank in segment.ranks:
                yield from _owed_by(facts, s, mb, kinds, rank)
    for key, places in facts.computes.items():
        kind, s, _ = key
        for place in places:
            if key not in owed:
                yield Fault(f"{facts.text(place)} is a {_NAME[kind]} that nothing owes")
            elif place[0] not in facts.graph.segments[s].ranks:
                ranks = ", ".join(map(str, facts.graph.segments[s].ranks))
                yield Fault(f"{facts.text(place)} belongs on rank {ranks}")
        again = [at for i, at in enumerate(places) if any(at[0] == other[0] for other in places[:i])]
        for place in again[:1]:
            own = [other for other in places if other[0] == place[0]]
            yield Fault(f"{facts.text(place)} runs {len(own)} times, first at {own[0]}")


def _owed_by(facts: ProgramFacts, segment: int, microbatch: int, kinds: str, rank: int) -> Iterator[Fault]:
    previous = None
    for kind in kinds:
        here = facts.at(kind, segment, microbatch, rank)
        if here is None:
            name = f"{segment}{kind}{microbatch}"
            yield Fault(f"rank {rank}: {name} is missing, the {_NAME[kind]} owed by segment {segment}", False)
        elif previous is not None and here < previous:
            yield Fault(f"{facts.text((rank, here))} runs before {facts.text((rank, previous))}")
        previous = here if here is not None else previous


def _messages_matched(facts: ProgramFacts) -> Iterator[Fault]:
    """Find sends without exactly their receive on the right peer and queue, and the converse."""
    queues: dict[tuple[int, int], str] = {}
    for mine, theirs, name, other in (
        (facts.sends, facts.receives, "send", "receive"),
        (facts.receives, facts.sends, "receive", "send"),
    ):
        for message, entries in mine.items():
            home, peer = (
                (message.source, message.target) if name == "send" else (message.target, message.source)
            )
            (place, queue), *again = entries
            if place[0] != home or not 0 <= peer < len(facts.programs) or home == peer:
                yield Fault(
                    f"{facts.text(place)} is a {name} of a message {message.source} -> {message.target}", True
                )
            for repeated, _ in again:
                yield Fault(f"{facts.text(repeated)} repeats the {name} at instruction {place[1]}", True)
            if queue != queues.setdefault((home, peer), pair_queue(home, peer)):
                yield Fault(
                    f"{facts.text(place)} uses queue {queue}, its ranks' queue is {queues[home, peer]}", True
                )
            if message not in theirs:
                yield Fault(f"{facts.text(place)} has no {other} on rank {peer}", True)
            elif name == "send" and queue != theirs[message][0][1]:
                answer, their_queue = theirs[message][0]
                yield Fault(
                    f"{facts.text(place)} uses queue {queue}, {facts.text(answer)} {their_queue}", True
                )


def _data_flows(facts: ProgramFacts) -> Iterator[Fault]:
    """Find values and owed gradients that are not sent after they are made or not received before they are used."""
    wanted: set[Message] = set()
    ranks_of = [segment.ranks for segment in facts.graph.segments]
    everywhere = [(s, rank) for s, ranks in enumerate(ranks_of) for rank in ranks]
    all_of_them = range(facts.microbatches)
    forward = {(s, r): [facts.at("F", s, mb, r) for mb in all_of_them] for s, r in everywhere}
    gradients = {(s, r): [facts.gradients_at(s, mb, r) for mb in all_of_them] for s, r in everywhere}
    for value in facts.graph.values:
        producer, group = value.producer, ranks_of[value.producer]
        for users_group in dict.fromkeys(ranks_of[c] for c in value.consumers):
            users = [c for c in value.consumers if ranks_of[c] == users_group]
            if users_group == group:
                there = back = tuple(PieceBytes(rank, rank, 0) for rank in group)
            else:
                there, back = pieces_between(value, group, users_group)
            for home, away, _ in there:
                used = _over(min, [forward[c, away] for c in users])
                way = Message(value.name, 0, False, home, away)
                yield from _all_pass(facts, wanted, way, forward[producer, home], used)
            for away, home, _ in back if facts.training and value.needs_grad else ():
                made = _over(max, [gradients[c, away] for c in users])
                way = Message(value.name, 0, True, away, home)
                yield from _all_pass(facts, wanted, way, made, gradients[producer, home])
    if not (facts.sends.keys() <= wanted and facts.receives.keys() <= wanted):
        for message, entries in (*facts.sends.items(), *facts.receives.items()):
            if message not in wanted:
                yield Fault(f"{facts.text(entries[0][0])} moves a tensor that no segment needs")


def _over(choose: Callable[..., int], rows: list[list[int | None]]) -> list[int | None]:
    """Choose the first or last of several computes, of those that are there, per micro-batch."""
    if len(rows) == 1:
        return rows[0]
    return [choose((i for i in places if i is not None), default=None) for places in zip(*rows, strict=True)]


def _all_pass(
    facts: ProgramFacts, wanted: set[Message], way: Message, made: list[int | None], used: list[int | None]
) -> Iterator[Fault]:
    """Find faults on the ways of one value (or gradient) between two ranks, per micro-batch."""
    value, _, gradient, source, target = way
    for mb, (maker, user) in enumerate(zip(made, used, strict=True)):
        message = Message(value, mb, gradient, source, target)
        sends, receives = facts.sends.get(message), facts.receives.get(message)
        if (
            source != target
            and sends is not None
            and receives is not None
            and maker is not None
            and user is not None
            and sends[0][0] >= (source, maker)
            and receives[0][0] <= (target, user)
        ):
            wanted.add(message)
        else:
            yield from _passes(facts, wanted, message, maker, user)


def _passes(
    facts: ProgramFacts, wanted: set[Message], message: Message, made: int | None, first_use: int | None
) -> Iterator[Fault]:
    """Find faults on the way of one tensor: made, sent, received, used. Within a rank there is only an order."""
    if message.source == message.target:
        if made is not None and first_use is not None and first_use < made:
            user, maker = facts.text((message.target, first_use)), facts.text((message.source, made))
            yield Fault(f"{user} uses {message.label} before {maker} makes it")
        return
    wanted.add(message)
    sends, receives = facts.sends.get(message), facts.receives.get(message)
    if sends is None:
        yield Fault(f"rank {message.source}: never sends {message.label} to rank {message.target}", True)
    elif made is not None and sends[0][0] < (message.source, made):
        yield Fault(f"{facts.text(sends[0][0])} sends before {facts.text((message.source, made))} makes it")
    if receives is None:
        yield Fault(f"rank {message.target}: never receives {message.label} from rank {message.source}", True)
    elif first_use is not None and receives[0][0] > (message.target, first_use):
        yield Fault(
            f"{facts.text(receives[0][0])} comes after {facts.text((message.target, first_use))} needs it"
        )


def _step_last(facts: ProgramFacts) -> Iterator[Fault]:
    """Find ranks with a backward that do not step once, as their last instruction."""
    stepping = {rank for rank, _ in facts.steps}
    wants = facts.optimizer if facts.optimizer is not None else bool(stepping)
    for rank, index in facts.steps:
        behind = facts.programs[rank].instructions[index + 1 :]
        if not facts.training or facts.optimizer is False:
            yield Fault(f"{facts.text((rank, index))} steps in programs that do not train")
        elif behind:
            yield Fault(f"{facts.text((rank, index))} comes before {' '.join(map(str, behind[:3]))}")
    owing = {rank for segment in facts.graph.segments if segment.has_backward for rank in segment.ranks}
    if facts.training and wants:
        for rank in sorted(owing - stepping):
            yield Fault(f"rank {rank}: has a backward but no optimizer step")


def _no_deadlock(facts: ProgramFacts) -> Iterator[Fault]:
    """Find a circle of waits."""
    if any(len(entries) > 1 for side in (facts.sends, facts.receives) for entries in side.values()):
        return  # which of the repeated ones matches is undefined; the repetition is reported already
    strictest: QueueRule = "everything" if facts.one_queue else "device"
    circle = find_deadlock(facts.programs, facts.graph, rule=strictest, blocking=facts.blocking)
    if not circle:
        return
    scope = "when sends and receives block"
    if not facts.blocking:
        found = ((find_deadlock(facts.programs, facts.graph, rule=rule), rule) for rule in _SCOPE)
        circle, rule = next((circle, rule) for circle, rule in found if circle)
        scope = _SCOPE[rule]
    yield Fault(f"these wait for each other forever {scope}: " + "; ".join(circle), True)


_SCOPE: dict[QueueRule, str] = {
    "pair": "with one queue per pair of ranks",
    "device": "with one point-to-point queue per device",
    "everything": "with one queue per device for messages and collectives",
}
"""The rules of queues, each stricter than the one before."""


RULES: tuple[tuple[str, Callable[[ProgramFacts], Iterator[Fault]]], ...] = (
    ("every forward once, every owed backward once (whole, or input half then weight half)", _computes_owed),
    ("every send has its one receive on the right rank and queue, and the converse", _messages_matched),
    ("every value and every owed gradient is sent after it is made and received before its use", _data_flows),
    ("every tied parameter's gradient is summed once, after the last backward", tied_summed),
    ("the optimizer steps last, on every rank that has a backward", _step_last),
    ("no deadlock, with one queue per pair of ranks and with one per device", _no_deadlock),
)
