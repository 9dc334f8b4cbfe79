"""The waits of a schedule of torch's pipelines: who waits for whom when torch runs it, and whether that ends.

    compute_only     torch adds a send behind each compute whose result goes to another rank, and that rank's receive at the
                     place that it has reached ("_add_send_recv"): what it cannot place it refuses
    compute_comms    runs as it stands there

Messages between two ranks have no names: the first one sent is the first one received. Sends and receives are posted and
not waited for, but by the compute that needs what is received, and at the end of the step by every send.

    Gloo             posts in any order: a rank waits in its computes alone
    NCCL             one queue for the messages of two ranks, both ways (a communicator of the pair): a send waits for its
                     receive, unless its bytes fit a buffer, and what is posted behind it waits, too

Source: torch 2.13, torch.distributed.pipelining.schedules ("_batch_p2p" posts sends and receives one by one).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from partitioner.formats.schedule_csv import COMPUTES, OF_STAGES, Action, AtOnce, Cell, TorchSchedule
from runtime.check.deadlock import find_deadlock
from runtime.program.program import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    Instruction,
    Message,
    Program,
    Recv,
    Segment,
    SegmentCost,
    SegmentGraph,
    Send,
    Value,
    pair_queue,
)

AHEAD = 3
"""Stages whose parameters torch holds gathered at once."""
_COMPUTE: dict[str, type[Compute]] = {"F": Forward, "B": Backward, "I": BackwardInput, "W": BackwardWeight}


@dataclass(frozen=True)
class Waits:
    """The answer about a schedule that breaks no other rule of torch's."""

    refused: tuple[str, ...] = ()
    """Ranks that torch cannot place messages for: it refuses the file. Each waits for the next, round."""
    fails: tuple[str, ...] = ()
    """Computes before whose own receive torch raises, and messages that are mixed up: wrong numbers."""
    hangs: tuple[str, ...] = ()
    """Waits without an end on any backend."""
    hangs_on_nccl: tuple[str, ...] = ()
    """A circle of waits where two ranks have one queue for what they send each other."""


def waits_of(schedule: TorchSchedule) -> Waits:
    """Tell whether a schedule ends. It has to be without ``problems``."""
    ranks, last = schedule.stage_ranks(), schedule.stages - 1
    if schedule.form == "compute_only":
        schedule, refused = with_messages(schedule)
        if refused:
            return Waits(refused=refused)
    rows = [[a for cell in row for a in _actions(cell) if a.kind not in OF_STAGES] for row in schedule.rows]
    posted = _Posted.of(rows, ranks, last)
    fails = tuple(posted.faults())
    if fails:
        return Waits(fails=fails)
    hangs = tuple(posted.stuck())
    if hangs:
        return Waits(hangs=hangs)
    programs, graph = _programs(rows, ranks, last)
    return Waits(hangs_on_nccl=tuple(map(_in_torchs_words, find_deadlock(programs, graph, rule="pair"))))


def _actions(cell: Cell) -> tuple[Action, ...]:
    return cell.actions if isinstance(cell, AtOnce) else (cell,)


def needed(action: Action, ranks: dict[int, int], last: int) -> tuple[str, int] | None:
    """Return the kind of receive that a compute waits for, and the rank that sends; None if it needs nothing."""
    if action.kind == "F" and action.stage > 0:
        kind, neighbour = "RECV_F", action.stage - 1
    elif action.kind in ("B", "I") and action.stage < last:
        kind, neighbour = "RECV_B", action.stage + 1
    else:
        return None
    source = ranks[neighbour]
    return None if source == ranks[action.stage] else (kind, source)


def _peer(action: Action, ranks: dict[int, int]) -> int | None:
    """Return the rank at the other end of a message; None if there is no such stage, or it is on the same rank."""
    step = 1 if action.kind in ("SEND_F", "RECV_B") else -1
    other = ranks.get(action.stage + step)
    return None if other == ranks[action.stage] else other


def with_messages(schedule: TorchSchedule) -> tuple[TorchSchedule, tuple[str, ...]]:
    """Add what torch adds to computes, in its order, and tell for whom ranks stand still where it cannot.

    Rank by rank, one cell each: a compute that has what it reads, its sends behind it, and their receives where their ranks
    are then. Gathers and sums of parameters take a turn each, so they are there, too.
    """
    ranks, last = schedule.stage_ranks(), schedule.stages - 1
    left = [deque(_with_sums(_with_gathers(row), schedule.microbatches)) for row in schedule.rows]
    made: list[list[Cell]] = [[] for _ in left]
    there: set[Action] = set()
    while any(left):
        before = sum(map(len, left))
        for rank, row in enumerate(left):
            if not row or not all(_ready(action, there, last) for action in _actions(row[0])):
                continue
            cell = row.popleft()
            made[rank].append(cell)
            for action in _actions(cell):
                there.add(action)
                if action.kind not in ("F", "B", "I"):
                    continue
                letter, step = ("F", 1) if action.kind == "F" else ("B", -1)
                target = ranks.get(action.stage + step)
                if target is not None and target != rank:
                    made[rank].append(Action(action.stage, f"SEND_{letter}", action.microbatch))
                    made[target].append(Action(action.stage + step, f"RECV_{letter}", action.microbatch))
        if sum(map(len, left)) == before:
            stuck = [
                next((a for a in _actions(row[0]) if not _ready(a, there, last)), None) if row else None
                for row in left
            ]
            return schedule, tuple(_round(stuck, ranks))
    return TorchSchedule(tuple(map(tuple, made))), ()


def _with_gathers(row: Sequence[Cell]) -> Iterator[Cell]:
    """Gather the parameters of the next three stages of a row, and give up those of others ("_add_unshard_reshard")."""
    active: set[int] = set()
    for place, cell in enumerate(row):
        wanted: list[int] = []
        for later in row[place:]:
            wanted += [a.stage for a in _actions(later) if a.stage not in wanted]
            if len(wanted) >= AHEAD:
                break
        evicted = [stage for stage in active if stage not in wanted]  # in a set's order, as there
        fetched = [stage for stage in wanted if stage not in active]
        yield from (Action(stage, "RESHARD") for stage in evicted)
        yield from (Action(stage, "UNSHARD") for stage in fetched)
        active.difference_update(evicted)
        active.update(fetched)
        yield cell
    yield from (Action(stage, "RESHARD") for stage in list(active))


def _with_sums(row: Iterator[Cell], microbatches: int) -> Iterator[Cell]:
    """Sum a stage's gradients behind its last backward ("_add_reduce_grad")."""
    done: Counter[int] = Counter()
    for cell in row:
        yield cell
        for action in _actions(cell):
            if action.kind in ("B", "W"):
                done[action.stage] += 1
                if done[action.stage] == microbatches:
                    yield Action(action.stage, "REDUCE_GRAD")


def _ready(action: Action, there: Collection[Action], last: int) -> bool:
    """Tell whether what a compute reads has been made, on its own rank or another."""
    if action.kind == "F" and action.stage > 0:
        return Action(action.stage - 1, "F", action.microbatch) in there
    if action.kind in ("B", "I") and action.stage < last:
        return any(Action(action.stage + 1, kind, action.microbatch) in there for kind in ("B", "I"))
    return True


def _round(stuck: Sequence[Action | None], ranks: dict[int, int]) -> Iterator[str]:
    """Yield the waits of ranks that stand still, from one to the next until they come round."""
    rank = next(index for index, action in enumerate(stuck) if action is not None)
    trail: dict[int, str] = {}
    while rank not in trail and (action := stuck[rank]) is not None:
        stage, letter = (action.stage - 1, "F") if action.kind == "F" else (action.stage + 1, "B")
        trail[rank] = (
            f"rank {rank}: {action} waits for {stage}{letter}{action.microbatch} of rank {ranks[stage]}"
        )
        rank = ranks[stage]
    yield from list(trail.values())[list(trail).index(rank) if rank in trail else 0 :]


@dataclass(frozen=True)
class _Posted:
    """Rows with messages, matched in the order in which two ranks post them."""

    rows: Sequence[Sequence[Action]]
    ranks: dict[int, int]
    last: int
    sent: dict[tuple[int, int], list[tuple[int, Action]]]
    """Place in the row and action of each message of (source, target)."""
    received: dict[tuple[int, int], list[tuple[int, Action]]]

    @classmethod
    def of(cls, rows: Sequence[Sequence[Action]], ranks: dict[int, int], last: int) -> _Posted:
        sent: dict[tuple[int, int], list[tuple[int, Action]]] = defaultdict(list)
        received: dict[tuple[int, int], list[tuple[int, Action]]] = defaultdict(list)
        for rank, row in enumerate(rows):
            for place, action in enumerate(row):
                if action.kind not in COMPUTES and (peer := _peer(action, ranks)) is not None:
                    if action.kind.startswith("SEND"):
                        sent[rank, peer].append((place, action))
                    else:
                        received[peer, rank].append((place, action))
        return cls(rows, ranks, last, sent, received)

    def faults(self) -> Iterator[str]:
        """Yield what torch raises for, and what it takes for something else."""
        for rank, row in enumerate(self.rows):
            before: set[Action] = set()
            for action in row:
                need = needed(action, self.ranks, self.last)
                if need is not None and Action(action.stage, need[0], action.microbatch) not in before:
                    yield f"rank {rank}: {action} comes before {action.stage}{need[0]}{action.microbatch}"
                made = {"SEND_F": ("F",), "SEND_B": ("B", "I")}.get(action.kind, ())
                if made and not any(Action(action.stage, kind, action.microbatch) in before for kind in made):
                    yield f"rank {rank}: {action} comes before {action.stage}{made[0]}{action.microbatch}"
                before.add(action)
        for (source, target), messages in self.sent.items():
            for (_, out), (_, into) in zip(messages, self.received[source, target], strict=False):
                step = 1 if out.kind == "SEND_F" else -1
                if (into.stage, into.kind[-1], into.microbatch) != (
                    out.stage + step,
                    out.kind[-1],
                    out.microbatch,
                ):
                    yield f"rank {target}: {into} takes what rank {source} sends with {out}, its next: wrong numbers"

    def stuck(self) -> Iterator[str]:
        """Yield waits without an end: computes for messages that are not sent, and sends that nobody receives."""
        number = {
            (rank, place): (pair, count)
            for pair, messages in self.received.items()
            for count, (place, _) in enumerate(messages)
            for rank in pair[1:]
        }
        at, out = [0] * len(self.rows), dict.fromkeys(self.sent, 0)
        waiting: dict[int, tuple[int, str]] = {}
        moved = True
        while moved:
            moved = False
            for rank, row in enumerate(self.rows):
                while at[rank] < len(row):
                    action = row[at[rank]]
                    need = needed(action, self.ranks, self.last)
                    if need is not None:
                        receive = Action(action.stage, need[0], action.microbatch)
                        pair, count = number.get((rank, self._place(rank, receive)), ((need[1], rank), 0))
                        if out.get(pair, 0) <= count:
                            waiting[rank] = (
                                pair[0],
                                f"rank {rank}: {action} waits for the message of {receive}",
                            )
                            break
                    elif action.kind.startswith("SEND") and (peer := _peer(action, self.ranks)) is not None:
                        out[rank, peer] += 1
                    at[rank], moved = at[rank] + 1, True
                    waiting.pop(rank, None)
        if waiting:
            rank, trail = min(waiting), dict[int, str]()
            while rank in waiting and rank not in trail:
                peer, text = waiting[rank]
                trail[rank] = f"{text} from rank {peer}" + (
                    "" if peer in waiting else ", which never sends it"
                )
                rank = peer
            yield from list(trail.values())[list(trail).index(rank) if rank in trail else 0 :]
            return
        for (source, target), messages in self.sent.items():
            for _, action in messages[len(self.received[source, target]) :]:
                yield f"rank {source}: {action} waits for a receive on rank {target}, which is not there"

    def _place(self, rank: int, receive: Action) -> int:
        return self.rows[rank].index(receive)


def _programs(
    rows: Sequence[Sequence[Action]], ranks: dict[int, int], last: int
) -> tuple[list[Program], SegmentGraph]:
    """Write rows as programs of a chain of stages."""
    cost = SegmentCost(1.0, 1.0, 1.0)
    graph = SegmentGraph(
        tuple(Segment(stage, (ranks[stage],), cost) for stage in range(last + 1)),
        tuple(Value(f"s{stage}", stage, (stage + 1,), 1, needs_grad=True) for stage in range(last)),
        len(rows),
    )
    return [Program(rank, tuple(_instructions(row, rank, ranks))) for rank, row in enumerate(rows)], graph


def _instructions(row: Sequence[Action], rank: int, ranks: dict[int, int]) -> Iterator[Instruction]:
    for action in row:
        microbatch = action.microbatch or 0
        if action.kind in _COMPUTE:
            yield _COMPUTE[action.kind](action.stage, microbatch)
            continue
        peer = _peer(action, ranks)
        if peer is None:
            continue
        gradient, sends = action.kind.endswith("B"), action.kind.startswith("SEND")
        producer = action.stage - (gradient == sends)
        source, target = (rank, peer) if sends else (peer, rank)
        message = Message(f"s{producer}", microbatch, gradient, source, target)
        yield (Send if sends else Recv)(message, pair_queue(rank, peer))


def _in_torchs_words(text: str) -> str:
    """Write messages as torch does: >s2:1@0 is 2SEND_F1, <d(s2):0@0 is 2RECV_B0."""

    def action(match: re.Match[str]) -> str:
        sends, gradient, producer = match[1] == ">", match[2] is not None, int(match[3])
        kind = f"{'SEND' if sends else 'RECV'}_{'B' if gradient else 'F'}"
        return str(Action(producer + (sends == gradient), kind, int(match[4])))

    return re.sub(r"([<>])(d\()?s(\d+)\)?:(\d+)@\d+", action, text)
