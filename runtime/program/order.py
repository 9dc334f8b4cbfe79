"""One order of all communications, and the programs that issue their projections of it.

Two ranks that list their common messages in different orders can wait for each other forever: NCCL runs both
directions of a pair of ranks on one queue, some set-ups run all of a device's point-to-point on one, and a
send completes only when its receive runs. So every message of the step gets a place in ONE order, by the time
at which the timing pass sends it, and every rank issues its own messages in that order.

    schedule (computes per rank)         global order                  programs
    rank 0: 0F0 0F1 0B0 0B1     ──►   x:0  x:1  d(x):0  d(x):1   ──►   0F0 >x:0@1 0F1 >x:1@1 <d(x):0@1 0B0 …
    rank 1: 1F0 1B0 1F1 1B1                                            <x:0@0 <x:1@0 1F0 1B0 >d(x):0@0 1F1 …

Why this cannot deadlock, whatever the real durations turn out to be: a message waits for the computes issued
before it on its two ranks; each of those waits for messages received earlier on that rank, and these come
earlier in the one order. Every chain of waits from message to message goes strictly down the order.

Where a message is issued (slot k = just before the rank's k-th compute):
    a send     right after the compute that produces it
    a receive  one compute ahead of its consumer, and so early that its transfer and those behind it in the queue
               fit before their consumers start; earlier where a later message of the order must be issued earlier.
               Small ones as early as the order allows (``EARLY_BYTES``)

Between device groups a message is a bundle: all pieces of the value, one place in the order. The groups' programs come
first, those of their ranks from them (``members``).

``one_queue``: NCCL promises no progress between communicators, so a device may run all that it communicates one after the
other: messages, the collectives inside of shared computes, sums. Nothing hangs there either, since computes and sums
have their places between the messages of the one order. But a receive that is posted before a shared compute must end
before the collectives in it, so it is not issued before a shared compute that starts earlier than its send:

    sent while 1F0 runs      one queue per pair:  <x:0@0 <x:1@0 1F0 1F1        one queue:  <x:0@0 1F0 <x:1@0 1F1
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache, partial
from typing import NamedTuple

from cost_models.errors import InternalError
from runtime.collector import collector_paused
from runtime.program.crossings import crossings
from runtime.program.groups import OnLeaders, on_leaders
from runtime.program.members import GroupPrograms
from runtime.program.program import (
    ComputeOrder,
    Instruction,
    Message,
    OptimizerStep,
    PieceBytes,
    Program,
    Recv,
    ReduceGradients,
    Segment,
    SegmentGraph,
    Send,
    TiedGroup,
    TransferSeconds,
    group_queue,
    pair_queue,
)
from runtime.program.timing import Timing, time_orders

EARLY_BYTES = 256 * 2**10
"""Bytes that a rank may spend, about, per value, on receives posted more than one compute ahead.

A message whose receive waits for it goes straight out. One that comes first has to ask, and the sender's next free moment
answers: two more wake-ups of sleeping threads, which with small computes cost more than everything else (Gloo, GPipe,
8 micro-batches of 8 B on two busy cores: 20 ms a step when posted one compute ahead, 4 ms when posted early).
"""

_TIME_SLACK = 1e-9
"""Relative slack when comparing times, so that rounding does not move a receive by one compute."""


class _Planned(NamedTuple):
    """A message with its place in the global order (the first four fields, compared in turn).

    Between groups it is a bundle of pieces, and its ranks are their leaders.
    """

    send_seconds: float
    cause: int
    """Topological number of the compute that produces it: breaks ties so that causes stay before effects."""
    value: int
    target: int
    microbatch: int
    source: int
    gradient: bool
    send_slot: int
    """Earliest slot on the source: just after the producing compute."""
    consumer: int
    """Position on the target of the first compute that needs it."""
    needed_seconds: float
    """Start of that compute."""
    transfer_seconds: float
    """Seconds of its slowest piece."""
    size_bytes: int
    """Bytes of it that one rank receives, at most."""


@collector_paused()
def build_group_programs(
    graph: SegmentGraph,
    orders: ComputeOrder,
    microbatches: int,
    *,
    transfer_seconds: TransferSeconds,
    tied: Sequence[TiedGroup] = (),
    optimizer: bool = True,
    training: bool = True,
    one_queue: bool = False,
) -> GroupPrograms:
    """Return one program per group of ranks that run segments together, from which each rank's follows.

    A value is sent once per group that consumes it, and its gradient (summed over that group's consumers) comes
    back once, if ``needs_grad``. Tied gradients are summed after the group's last backward; then the optimizer
    steps. ``training=False`` makes forward programs: no gradients, no reduction, no step.

    ``one_queue``: receives come late enough for devices that have one queue for everything (see above).

    Ranks that share a segment run one order, that of the first of them (``groups``). Raises ``InternalError`` where
    groups overlap or a value does not say in which pieces it goes to or from several ranks.
    """
    _refuse_impossible(graph, orders, training)
    led = on_leaders(graph)
    timing = time_orders(graph, orders, microbatches, transfer_seconds)
    _refuse_incomplete(graph, timing, microbatches, training)
    planned = sorted(_messages(graph, timing, microbatches, transfer_seconds, training))
    slots = _place(planned, timing, graph, one_queue)
    tails = _tails(graph, led, timing, tied, optimizer) if training else [[] for _ in range(graph.world_size)]
    programs = []
    for rank, leader in enumerate(led.leader_of):
        instructions: list[Instruction] = []
        if rank == leader:
            order, issued = orders[rank] if rank < len(orders) else (), slots[rank]
            for slot, compute in enumerate(order):
                if slot in issued:
                    instructions += issued[slot]
                instructions.append(compute)
            instructions += issued.get(len(order), ())
            instructions += tails[rank]
        programs.append(Program(rank, tuple(instructions)))
    return GroupPrograms(graph, led.leader_of, tuple(programs))


def _messages(
    graph: SegmentGraph, timing: Timing, microbatches: int, transfer_seconds: TransferSeconds, training: bool
) -> Iterator[_Planned]:
    """Yield every message that the values of ``graph`` cause, with its time and its window on both sides."""
    position, start, end, sequence = timing.position, timing.start, timing.end, timing.sequence
    backward = len(graph.segments) * microbatches
    bundle = lru_cache(maxsize=None)(partial(_bundle, transfer_seconds=transfer_seconds))
    for number, value in enumerate(graph.values):
        home = graph.segments[value.producer].rank
        for (away, *_), consumers, there, back in crossings(graph, value):
            ways = [(home, away, False, there), (away, home, True, back)]
            for source, target, gradient, pieces in ways if training and back else ways[:1]:
                seconds, size_bytes = bundle(pieces)
                for mb in range(microbatches):
                    sent = value.producer * microbatches + mb
                    used = min((c * microbatches + mb for c in consumers), key=position.__getitem__)
                    if gradient:
                        used = backward + sent
                        sent = max(
                            (backward + c * microbatches + mb for c in consumers), key=position.__getitem__
                        )
                    yield _Planned(
                        end[sent], sequence[sent], number, target, mb, source, gradient, position[sent] + 1,
                        position[used], start[used], seconds, size_bytes,
                    )  # fmt: skip


def _bundle(pieces: Sequence[PieceBytes], transfer_seconds: TransferSeconds) -> tuple[float, int]:
    """Return the seconds of the slowest piece, and the bytes of the rank that receives most."""
    if len(pieces) == 1:
        return transfer_seconds(*pieces[0]), pieces[0].size_bytes
    received: Counter[int] = Counter()
    for piece in pieces:
        received[piece.target] += piece.size_bytes
    return max(transfer_seconds(*piece) for piece in pieces), max(received.values())


def _place(
    planned: Sequence[_Planned], timing: Timing, graph: SegmentGraph, one_queue: bool
) -> list[dict[int, list[Instruction]]]:
    """Give every leader its projection of the one order: slot -> communications.

    Slots must not decrease along the order. Going up, a receive wants a late slot but none before an earlier send's, nor,
    with ``one_queue``, before a shared compute that starts before it is sent; going down, it is moved ahead of whatever
    must be issued before. Sends never move: along the order their slots on one group never decrease, and a receive's
    consumer lies behind every send before it. Neither does a receive move ahead of a compute that it has to be behind:
    that compute starts before whatever comes later in the order is sent.
    """
    names = [value.name for value in graph.values]
    queues: dict[tuple[int, int], str] = {}
    projection: list[list[tuple[int, Instruction]]] = [[] for _ in range(graph.world_size)]
    lowest = [0] * graph.world_size
    late = {segment.rank for segment in graph.segments if segment.shared} if one_queue else set()
    for latest, (
        send_seconds,
        _,
        number,
        target,
        mb,
        source,
        gradient,
        send_slot,
        consumer,
        _,
        _,
        size_bytes,
    ) in zip(_latest_posts(planned), planned, strict=True):
        message = Message(names[number], mb, gradient, source, target)
        queue = queues.get((source, target))
        if queue is None:
            queue = queues[source, target] = pair_queue(source, target)
        lowest[source] = max(lowest[source], send_slot)
        projection[source].append((lowest[source], Send(message, queue)))
        in_time = bisect_right(timing.rank_ends[target], latest + _TIME_SLACK * abs(latest), 0, consumer)
        ahead = 1 + EARLY_BYTES // max(size_bytes, 1)
        slot = max(min(in_time, consumer - ahead), lowest[target])
        if target in late:
            sent = send_seconds - _TIME_SLACK * abs(send_seconds)
            slot = max(slot, bisect_left(timing.rank_starts[target], sent, 0, consumer))
        projection[target].append((slot, Recv(message, queue)))
    slots: list[dict[int, list[Instruction]]] = [{} for _ in range(graph.world_size)]
    for leader, issued in enumerate(projection):
        ahead_of = len(timing.rank_ends[leader]) if leader < len(timing.rank_ends) else 0
        for slot, instruction in reversed(issued):
            ahead_of = min(ahead_of, slot)
            slots[leader].setdefault(ahead_of, []).append(instruction)
    for own in slots:
        for together in own.values():
            together.reverse()
    return slots


def _latest_posts(planned: Sequence[_Planned]) -> list[float]:
    """Return, for each message, the last moment to post its receive so that nobody waits longer than in the timing pass.

    Goes backwards along each pair's queue: a message must leave the queue before its consumer starts and before the
    next message must begin; posting before it is sent would gain nothing.
    """
    latest = [0.0] * len(planned)
    next_begins: dict[tuple[int, int], float] = {}
    for index in range(len(planned) - 1, -1, -1):
        message = planned[index]
        source, target = message.source, message.target
        pair = (source, target) if source < target else (target, source)
        deadline = min(message.needed_seconds, next_begins.get(pair, message.needed_seconds))
        begins = max(message.send_seconds, deadline - message.transfer_seconds)
        latest[index] = next_begins[pair] = begins
    return latest


class _Summing(NamedTuple):
    """The ranks of a sum of gradients, ascending."""

    ranks: tuple[int, ...]
    leaders: tuple[int, ...]
    """Those of their groups."""
    moment: tuple[float, bool]
    """Its place in the one order: the last end of any compute on its ranks, then sums of one group first."""
    queue: str


def _tails(
    graph: SegmentGraph, led: OnLeaders, timing: Timing, tied: Sequence[TiedGroup], optimizer: bool
) -> list[list[Instruction]]:
    """List what each group does after its last compute: sums of tied gradients, then the optimizer step.

    A sum's time is the last end of any compute on its ranks, so every message of these ranks comes before it in the
    one order, without merging; sums among themselves go by (time, one group's before several groups', place in ``tied``):
    those of one group may start early (``early``).
    """
    tails: list[list[Instruction]] = [[] for _ in range(graph.world_size)]
    last_end = [ends[-1] if ends else 0.0 for ends in timing.rank_ends]
    last_end += [0.0] * (graph.world_size - len(last_end))

    @cache  # few sets of ranks sum the gradients of many parameters
    def summing(unsorted: tuple[int, ...]) -> _Summing:
        ranks = tuple(sorted(set(unsorted)))
        leaders = tuple(dict.fromkeys(led.leader_of[rank] for rank in ranks))
        moment = max(last_end[leader] for leader in leaders), len(leaders) > 1
        return _Summing(ranks, leaders, moment, group_queue(ranks))

    for group in sorted(tied, key=lambda group: summing(group.ranks).moment):
        own = summing(group.ranks)
        for leader in own.leaders if len(own.ranks) > 1 else ():
            tails[leader].append(ReduceGradients(group.parameters, own.ranks, own.queue, group.scattered))
    if optimizer:
        for leader in {s.rank for s in graph.segments if s.has_backward}:
            tails[leader].append(OptimizerStep())
    return tails


def _refuse_impossible(graph: SegmentGraph, orders: ComputeOrder, training: bool) -> None:
    """Raise ``InternalError`` for graphs and orders that no program can come from."""
    problems = []
    if len(orders) > graph.world_size:
        problems.append(f"{len(orders)} orders for a world of {graph.world_size} ranks")
    own: defaultdict[int, set[int]] = defaultdict(set)
    for segment in graph.segments:
        for rank in segment.ranks:
            own[rank].add(segment.index)
    for rank, order in enumerate(orders):
        for compute in () if {compute.segment for compute in order} <= own[rank] else order:
            if not 0 <= compute.segment < len(graph.segments):
                problems.append(f"rank {rank}: {compute} names a segment that does not exist")
            elif compute.segment not in own[rank]:
                problems.append(
                    f"rank {rank}: {compute} belongs on ranks {graph.segments[compute.segment].ranks}"
                )
    for value in graph.values:
        if training and value.needs_grad:
            owing: list[Segment] = [graph.segments[s] for s in (value.producer, *value.consumers)]
            problems += [
                f"value {value.name} needs a gradient but segment {s.index} has no backward"
                for s in owing
                if not s.has_backward
            ]
    if problems:
        raise InternalError("build the programs of a schedule", problems)


def _refuse_incomplete(graph: SegmentGraph, timing: Timing, microbatches: int, training: bool) -> None:
    """Raise ``InternalError`` for computes that the orders lack, which messages would have to wait for."""
    backward = len(graph.segments) * microbatches
    missing = []
    for segment in graph.segments:
        for mb in range(microbatches):
            node = segment.index * microbatches + mb
            if timing.position[node] < 0:
                missing.append(f"rank {segment.rank}: the orders lack {segment.index}F{mb}")
            if training and segment.has_backward and timing.position[backward + node] < 0:
                missing.append(
                    f"rank {segment.rank}: the orders lack {segment.index}B{mb} or {segment.index}I{mb}"
                )
    if missing:
        raise InternalError("build the programs of a schedule", missing)
