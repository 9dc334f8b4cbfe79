"""The memory of every rank over time, from the times of a simulated step.

Charged to a rank (times are of the simulated instructions; bytes are multiplied by the micro-batch's scale):

    what                       from                                  until
    state                      always: parameters, gradients, optimizer, the rank's part of the batch; but gradients
                               that a segment's first backward makes are not there before its end
    saved by a forward         start of the forward                  end of its backward; when split, the input half
                                                                     frees all but ``weight_saved_bytes``, the weight
                                                                     half the rest; without a backward, its own end
    made within a backward     start of the backward                 its end; the first makes gradients as well
    a value, where produced    start of the forward                  its sends are done, its local consumers too and,
                                                                     if it needs a gradient, its producer's backward
                                                                     (which starts from it, so the executor keeps it)
    a value, where received    the receive is posted                 its local consumers are done
    a gradient, where made     start of the first local consumer's   the send is done; or, within the rank, the end of
                               backward                              the producer's backward
    a gradient, where received the receive is posted                 end of the producer's backward
    made by the optimizer      start of its step                     its end
    beside tensors             always: the driver's context, communicators, what the allocator reserves

A consumer is done with a value at the end of its last backward half: autograd may have saved it. So ``saved_bytes``
must not count values between segments again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from runtime.program.crossings import consumers_by_group, crossings
from runtime.program.program import SegmentGraph, Value

Floats: TypeAlias = NDArray[np.float64]
Instant: TypeAlias = tuple[Floats, Floats]
"""(seconds, place in the program: settles what comes first at equal times), per micro-batch."""


class MemoryKind(IntEnum):
    """Kinds of memory: the rows of the table above, values and their gradients as one."""

    STATE = 0
    GRADIENTS = 1
    """Those of parameters, from the end of the first backward on."""
    SAVED = 2
    WITHIN_BACKWARD = 3
    VALUES = 4
    """Values between segments, and their gradients."""
    UPDATE = 5
    PROCESS = 6
    """Beside tensors: the driver's context, communicators."""


@dataclass(frozen=True)
class MemoryCurve:
    """A rank's memory: ``bytes_held[i]`` from ``seconds[i]`` until ``seconds[i + 1]``."""

    seconds: Floats
    bytes_held: Floats
    kinds: Floats
    """The kind of memory that each change is of, as its number in ``MemoryKind``."""

    @property
    def peak_bytes(self) -> int:
        return int(self.bytes_held.max(initial=0.0))

    def bytes_of(self, kind: MemoryKind) -> Floats:
        """Return what is held of one kind from each moment on."""
        changes = np.diff(self.bytes_held, prepend=0.0)
        return np.cumsum(np.where(self.kinds == kind, changes, 0.0))


@dataclass(frozen=True)
class MessageTimes:
    """One value's (or gradient's) way between two ranks, per micro-batch."""

    sent: Instant
    """Moments at which the send completes."""
    posted: Instant
    """Moments at which the receive is posted."""


@dataclass(frozen=True)
class StepTimes:
    """Times of a step; arrays of shape (3 planes of ``timing``, segments, micro-batches)."""

    start: Floats
    end: Floats
    place: Floats
    """Twice the index in the rank's program."""
    messages: Mapping[tuple[str, bool, int, int], MessageTimes]
    """Times by (value, gradient, source, target)."""
    updates: Sequence[tuple[float, float]] = ()
    """Start and end of each rank's optimizer step."""


class _Ledger:
    """Allocations and releases, per rank: columns of (kind, seconds, place, change)."""

    def __init__(self, world_size: int, scale: Floats) -> None:
        self._scale = scale
        self._entries: list[list[Floats]] = [[] for _ in range(world_size)]

    def hold(
        self, rank: int, kind: MemoryKind, size_bytes: float | Floats, since: Instant, until: Instant
    ) -> None:
        """Hold ``size_bytes`` (of a full micro-batch; an array where they differ) from ``since`` to ``until``."""
        held = size_bytes * self._scale
        if held.any():
            kinds = np.full(len(held), float(kind))
            self._entries[rank] += [np.stack((kinds, *since, held)), np.stack((kinds, *until, -held))]

    def change(self, rank: int, kind: MemoryKind, size_bytes: float, seconds: float, place: float) -> None:
        """Hold ``size_bytes`` more from one moment on, whatever the micro-batch's size."""
        self._entries[rank].append(np.array([[kind], [seconds], [place], [size_bytes]], dtype=np.float64))

    def curve(self, rank: int, state_bytes: float, process_bytes: float) -> MemoryCurve:
        self.change(rank, MemoryKind.STATE, state_bytes, 0.0, -2.0)
        if process_bytes:
            self.change(rank, MemoryKind.PROCESS, process_bytes, 0.0, -1.0)
        kinds, seconds, place, change = np.concatenate(self._entries[rank], axis=1)
        order = np.lexsort((place, seconds))
        return MemoryCurve(seconds[order], np.cumsum(change[order]), kinds[order])


def memory_curves(
    graph: SegmentGraph,
    times: StepTimes,
    state_bytes: Sequence[float],
    scale: Sequence[float],
    update_bytes: Sequence[float] = (),
    process_bytes: Sequence[float] = (),
) -> tuple[MemoryCurve, ...]:
    """Return one curve per rank; see the table above."""
    beside = process_bytes or [0.0] * graph.world_size
    ledger = _Ledger(graph.world_size, np.asarray(scale, dtype=np.float64))
    begun = [(times.start[0, s], times.place[0, s]) for s in range(len(graph.segments))]
    forward, backward, weight = ([_ends(times, p, s) for s in range(len(graph.segments))] for p in range(3))
    done = [_latest(f, b, w) for f, b, w in zip(forward, backward, weight, strict=True)]
    at_first = list(state_bytes)
    for s, segment in enumerate(graph.segments):
        cost, rank = segment.cost, segment.rank
        deferred = cost.weight_saved_bytes * (times.end[2, s] >= 0.0)
        ledger.hold(rank, MemoryKind.SAVED, cost.saved_bytes, begun[s], _latest(forward[s], backward[s]))
        if segment.has_backward and (times.end[1, s] >= 0.0).any():
            first = int(np.argmin(np.where(times.end[1, s] >= 0.0, times.place[1, s], np.inf)))
            within = np.full(len(scale), float(cost.transient_bytes))
            within[first] = cost.first_transient_bytes or cost.transient_bytes
            ledger.hold(
                rank, MemoryKind.WITHIN_BACKWARD, within, (times.start[1, s], times.place[1, s]), backward[s]
            )
            at_first[rank] -= cost.gradient_bytes
            ledger.change(
                rank, MemoryKind.GRADIENTS, cost.gradient_bytes, *(float(moment[first]) for moment in done[s])
            )
        ledger.hold(
            rank, MemoryKind.SAVED, deferred, backward[s], done[s]
        )  # after what ends at the same moment
    for value in graph.values:
        _hold_value(ledger, graph, times, value, done)
    for rank, size_bytes in enumerate(update_bytes):
        since, until = times.updates[rank]
        if size_bytes and since >= 0.0:
            for seconds, change in (
                (since, size_bytes),
                (until, -size_bytes),
            ):  # after all else of the moment
                ledger.change(rank, MemoryKind.UPDATE, change, seconds, np.inf)
    return tuple(ledger.curve(rank, at_first[rank], beside[rank]) for rank in range(graph.world_size))


def _hold_value(
    ledger: _Ledger, graph: SegmentGraph, times: StepTimes, value: Value, done: Sequence[Instant]
) -> None:
    """Charge a value and its gradient to the first rank of the groups that make and use it; others hold as much."""
    producer = value.producer
    ranks = graph.segments[producer].ranks
    home, begun = ranks[0], (times.start[0, producer], times.place[0, producer])
    returned = _ends(times, 1, producer)
    held_until = _latest(_ends(times, 0, producer), *([returned] if value.needs_grad else []))
    trained = value.needs_grad and bool((times.end[1, producer] >= 0.0).all())
    local = consumers_by_group(graph, value).get(ranks, ())
    if local:
        held_until = _latest(held_until, *(done[c] for c in local))
    for away, consumers, there, back in crossings(graph, value):
        finished = _latest(*(done[c] for c in consumers))
        sent = [times.messages[value.name, False, s, t].sent for s, t, _ in there if s == home]
        held_until = _latest(held_until, *sent)
        # Pieces are put together in one tensor, which is made when the first of them is posted.
        posted = [times.messages[value.name, False, s, t].posted for s, t, _ in there if t == away[0]]
        received_bytes = sum(size for _, t, size in there if t == away[0])
        ledger.hold(away[0], MemoryKind.VALUES, received_bytes, _earliest(*posted), finished)
        if not trained:
            continue
        made = _earliest(*((times.start[1, c], times.place[1, c]) for c in consumers))
        sent = [times.messages[value.name, True, s, t].sent for s, t, _ in back if s == away[0]]
        until = _latest(*(sent or [_ends(times, 1, c) for c in consumers]))
        ledger.hold(away[0], MemoryKind.VALUES, received_bytes, made, until)
        posted = [times.messages[value.name, True, s, t].posted for s, t, _ in back if t == home]
        ledger.hold(
            home,
            MemoryKind.VALUES,
            sum(size for _, t, size in back if t == home),
            _earliest(*posted),
            returned,
        )
    ledger.hold(home, MemoryKind.VALUES, value.size_bytes, begun, held_until)
    if local and trained:
        made = _earliest(*((times.start[1, c], times.place[1, c]) for c in local))
        ledger.hold(home, MemoryKind.VALUES, value.size_bytes, made, returned)


def _ends(times: StepTimes, plane: int, segment: int) -> Instant:
    return times.end[plane, segment], times.place[plane, segment] + 1.0


def _latest(*moments: Instant) -> Instant:
    """Return the last of several moments; computes that never ran have negative times and never win."""
    return np.max([m[0] for m in moments], axis=0), np.max([m[1] for m in moments], axis=0)


def _earliest(*moments: Instant) -> Instant:
    return np.min([m[0] for m in moments], axis=0), np.min([m[1] for m in moments], axis=0)
