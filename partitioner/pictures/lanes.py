"""Lanes: a simulated step as rows of spans, one row for all ranks that do the same at the same time.

    ranks 0-7    F0 F1 F2 … B0 …      spans (start, end, letter, stage, micro-batch), times in seconds

Letters: F forward, B backward, I and W its halves, R a sum of gradients, O the optimizer's step.
"""

from __future__ import annotations

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
        key = (
            message.value,
            message.gradient,
            message.microbatch,
            lane_of[message.source],
            lane_of[message.target],
        )
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
    arrivals = _arrivals(lanes)
    waits = {}
    for number, lane in enumerate(lanes.lanes):
        for index, span in enumerate(lane.spans):
            before = lane.spans[index - 1].end_seconds if index else 0.0
            if span.start_seconds - before > lanes.step_seconds * ROUNDING:
                if span.letter == "R":
                    waits[number, index] = _sum_text(lanes, span, (number, index))
                    continue
                transfer = _last_before(arrivals[number], span.start_seconds, lanes.step_seconds)
                if transfer is not None and transfer.end_seconds > before:
                    waits[number, index] = _wait_text(lanes, transfer)
    path = _path(lanes, arrivals)
    return path, waits


def _arrivals(lanes: Lanes) -> list[list[Transfer]]:
    """Return each lane's arriving messages in the order of their ends."""
    found: list[list[Transfer]] = [[] for _ in lanes.lanes]
    for transfer in lanes.transfers:
        found[lanes.lane_of[transfer.message.target]].append(transfer)
    for own in found:
        own.sort(key=lambda transfer: transfer.end_seconds)
    return found


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


def _sum_text(lanes: Lanes, span: Span, own: tuple[int, int]) -> str:
    lane, _ = _last_to_come(lanes, span, own)
    if lane == own[0]:
        return "waits until its part of the network, or the gradients that it sums, are ready"
    return f"waits for {lanes.lanes[lane].label}, the last that comes to this sum of gradients"


def _path(lanes: Lanes, arrivals: Sequence[Sequence[Transfer]]) -> list[tuple[int, int]]:
    ends = [
        (lane.spans[-1].end_seconds, number, len(lane.spans) - 1)
        for number, lane in enumerate(lanes.lanes)
        if lane.spans
    ]
    if not ends:
        return []
    _, lane, index = max(ends)
    found = [(lane, index)]
    while True:
        span = lanes.lanes[lane].spans[index]
        before = lanes.lanes[lane].spans[index - 1].end_seconds if index else -1.0
        transfer = _last_before(arrivals[lane], span.start_seconds, lanes.step_seconds)
        if span.letter == "R":  # begins when the last of its ranks has come
            lane, index = _last_to_come(lanes, span, (lane, index))
            index -= 1
        elif transfer is not None and transfer.end_seconds > before:
            lane = lanes.lane_of[transfer.message.source]
            index = _ended_by(lanes.lanes[lane].spans, transfer.start_seconds, lanes.step_seconds)
            if index >= 0 and lanes.lanes[lane].spans[index].start_seconds >= span.start_seconds:
                return found[::-1]  # never round in a circle
        else:
            index -= 1
        if index < 0:
            return found[::-1]
        found.append((lane, index))


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
    return lanes.lanes[lane].spans[index - 1].end_seconds if index else -1.0


def _ended_by(spans: Sequence[Span], seconds: float, step_seconds: float) -> int:
    """Return the number of the last span that had ended by then; -1 if none had."""
    return bisect_right(spans, seconds + step_seconds * ROUNDING, key=lambda span: span.end_seconds) - 1
