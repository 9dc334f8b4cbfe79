"""Lanes: a simulated step as rows of spans, one row for all ranks that do the same at the same time.

    ranks 0-7    F0 F1 F2 … B0 …      spans (start, end, letter, stage, micro-batch), times in seconds

Letters: F forward, B backward, I and W its halves, R a sum of gradients, O the optimizer's step.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from partitioner.report.sharding import devices_text
from runtime.program.program import Compute, ReduceGradients
from runtime.simulate.simulation import Occupied, Simulation, Transfer, equal_ranks

ROUNDING = 1e-6
"""Moments that differ by less than this share of the step are one: the sums that made them are rounded."""


class Span(NamedTuple):
    """A piece of work of a lane; stage and micro-batch are -1 for sums and updates."""

    start_seconds: float
    end_seconds: float
    letter: str
    stage: int
    microbatch: int


@dataclass(frozen=True)
class Lane:
    """Ranks that do the same at the same time, and what they do."""

    ranks: tuple[int, ...]
    spans: tuple[Span, ...]

    @property
    def label(self) -> str:
        return devices_text(self.ranks)

    @property
    def stages(self) -> list[int]:
        return sorted({span.stage for span in self.spans if span.stage >= 0})


@dataclass(frozen=True)
class Lanes:
    """The lanes of a step, and the messages between their first ranks."""

    step_seconds: float
    lanes: tuple[Lane, ...]
    transfers: tuple[Transfer, ...] = field(repr=False)

    @cached_property
    def lane_of(self) -> dict[int, int]:
        """The lane of each rank that does something."""
        return {rank: number for number, lane in enumerate(self.lanes) for rank in lane.ranks}


def lanes_of(simulation: Simulation) -> Lanes:
    """Put ranks with equal spans and equal memory into one lane."""
    lanes = tuple(
        Lane(ranks, tuple(map(span_of, simulation.timeline[ranks[0]]))) for ranks in equal_ranks(simulation)
    )
    silent = Lanes(simulation.step_seconds, lanes, ())
    return replace(silent, transfers=_representatives(simulation.transfers, silent.lane_of))


def span_of(occupied: Occupied) -> Span:
    """Return a piece of work of a lane."""
    instruction = occupied.instruction
    start, end = occupied.start_seconds, occupied.end_seconds
    if isinstance(instruction, Compute):
        return Span(start, end, instruction.letter, instruction.segment, instruction.microbatch)
    return Span(start, end, "R" if isinstance(instruction, ReduceGradients) else "O", -1, -1)


def _representatives(transfers: Sequence[Transfer], lane_of: dict[int, int]) -> tuple[Transfer, ...]:
    """Return one of the messages that carry the same value's pieces between two lanes: the last that arrives."""
    found: dict[tuple[object, ...], Transfer] = {}
    for transfer in transfers:
        message = transfer.message
        if message.source not in lane_of or message.target not in lane_of:
            continue
        ends = lane_of[message.source], lane_of[message.target]
        key = message.value, message.gradient, message.microbatch, *ends
        known = found.get(key)
        if known is None or known.end_seconds < transfer.end_seconds:
            found[key] = transfer
    return tuple(sorted(found.values(), key=lambda transfer: transfer.start_seconds))


def critical_path(lanes: Lanes) -> tuple[list[tuple[int, int]], dict[tuple[int, int], str]]:
    """Return the chain of spans that the step's end waits for, first to last, and what spans after a gap wait for.

    Backwards from the span that ends last: the span before it on its lane, or the work of another lane whose message
    arrived as it began, whichever ended last; for a sum of gradients, the work of the lane that came last. Gaps that
    nothing of these explains end at the last thing known to be done.
    """
    arrivals: list[list[Transfer]] = [[] for _ in lanes.lanes]
    for transfer in sorted(lanes.transfers, key=lambda transfer: transfer.end_seconds):
        arrivals[lanes.lane_of[transfer.message.target]].append(transfer)
    waits = {}
    for number, lane in enumerate(lanes.lanes):
        for index, span in enumerate(lane.spans):
            if span.start_seconds - _end_before(lanes, number, index) > lanes.step_seconds * ROUNDING:
                cause, _, waited_for = _cause(lanes, arrivals, number, index)
                if span.letter == "R":
                    waits[number, index] = _sum_text(lanes, number, cause)
                elif waited_for is not None:
                    waits[number, index] = _wait_text(lanes, waited_for)
    return _path(lanes, arrivals), waits


def _cause(
    lanes: Lanes, arrivals: Sequence[Sequence[Transfer]], lane: int, index: int
) -> tuple[int, int, Transfer | None]:
    """Return lane and number of the span that one began after, and the message that it waited for.

    A number of -1: nothing that is known was before it.
    """
    span = lanes.lanes[lane].spans[index]
    if span.letter == "R":  # begins when the last of its ranks has come
        last, place = _last_to_come(lanes, span, (lane, index))
        return last, place - 1, None
    transfer = _last_before(arrivals[lane], span.start_seconds, lanes.step_seconds)
    if transfer is None or transfer.end_seconds <= _end_before(lanes, lane, index):
        return lane, index - 1, None
    source = lanes.lane_of[transfer.message.source]
    place = _ended_by(lanes.lanes[source].spans, transfer.start_seconds, lanes.step_seconds)
    return source, place, transfer


def _last_before(arrived: Sequence[Transfer], seconds: float, step_seconds: float) -> Transfer | None:
    """Return the last message that was there at ``seconds``."""
    count = bisect_right(
        arrived, seconds + step_seconds * ROUNDING, key=lambda transfer: transfer.end_seconds
    )
    return arrived[count - 1] if count else None


def _wait_text(lanes: Lanes, transfer: Transfer) -> str:
    message = transfer.message
    what = f"the gradient of {message.value}" if message.gradient else message.value
    source = lanes.lanes[lanes.lane_of[message.source]].label
    return f"waits for {what} of micro-batch {message.microbatch} from {source}"


def _sum_text(lanes: Lanes, lane: int, last: int) -> str:
    if lane == last:
        return "waits until its part of the network, or the gradients that it sums, are ready"
    return f"waits for {lanes.lanes[last].label}, the last that comes to this sum of gradients"


def _path(lanes: Lanes, arrivals: Sequence[Sequence[Transfer]]) -> list[tuple[int, int]]:
    _, lane, index = max(
        (
            (lane.spans[-1].end_seconds, n, len(lane.spans) - 1)
            for n, lane in enumerate(lanes.lanes)
            if lane.spans
        ),
        default=(0.0, -1, -1),
    )
    path = []
    start = math.inf
    while index >= 0:
        span = lanes.lanes[lane].spans[index]
        if span.start_seconds >= start:
            break  # never round in a circle
        path.append((lane, index))
        lane, index, transfer = _cause(lanes, arrivals, lane, index)
        start = math.inf if transfer is None else span.start_seconds
    return path[::-1]


def _last_to_come(lanes: Lanes, span: Span, own: tuple[int, int]) -> tuple[int, int]:
    """Return the lane with the same sum of gradients whose work before it ended last, and the sum's number there."""
    if span.end_seconds - span.start_seconds <= lanes.step_seconds * ROUNDING:
        return own
    found, latest = own, _end_before(lanes, *own)
    for number, lane in enumerate(lanes.lanes):
        index = bisect_left(lane.spans, span.start_seconds, key=lambda other: other.start_seconds)
        while index < len(lane.spans) and lane.spans[index].start_seconds == span.start_seconds:
            same = lane.spans[index].letter == "R" and lane.spans[index].end_seconds == span.end_seconds
            if same and _end_before(lanes, number, index) > latest:
                found, latest = (number, index), _end_before(lanes, number, index)
            index += 1
    return found


def _end_before(lanes: Lanes, lane: int, index: int) -> float:
    return lanes.lanes[lane].spans[index - 1].end_seconds if index else 0.0


def _ended_by(spans: Sequence[Span], seconds: float, step_seconds: float) -> int:
    """Return the number of the last span that had ended by then; -1 if none had."""
    return bisect_right(spans, seconds + step_seconds * ROUNDING, key=lambda span: span.end_seconds) - 1
