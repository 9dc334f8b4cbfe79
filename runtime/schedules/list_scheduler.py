"""List scheduling: an order for any segment DAG on any placement.

The step is played on a clock. Whenever a device group is free it starts, of the instructions whose inputs
have arrived, the one that ranks first:

    1. backwards before forwards (they free memory), weight halves last (nobody waits for them)
    2. the older micro-batch
    3. the longer critical path to the end of the micro-batch

A forward must wait while its rank already holds as many unfinished micro-batches as its limit. Limits cannot
lock: each segment runs its forwards in micro-batch order, so ranks admit micro-batches in that order too, and
the oldest unfinished one is always admitted everywhere.

Source: Graham 1969, "Bounds on Multiprocessing Timing Anomalies" (list scheduling); Little 1961, "A Proof for
the Queuing Formula L = λW" (the default limits). Deterministic. Time O(n log n) for n instructions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from runtime.program.program import (
    ComputeOrder,
    Segment,
    SegmentCost,
    SegmentGraph,
    TransferSeconds,
    Value,
)
from runtime.schedules.held import ComputeStep
from runtime.schedules.list_clock import play
from runtime.schedules.list_work import PassMode, Work, work_of
from runtime.schedules.schedule import Schedule

WORTH_TWICE_THE_MEMORY = 0.01
"""Part of the step that twice the micro-batches in flight must save to be chosen."""


def list_order(
    graph: SegmentGraph,
    microbatches: int,
    *,
    limits: Sequence[int],
    transfer_seconds: TransferSeconds | None = None,
    mode: PassMode = "whole",
) -> ComputeOrder:
    """Return each rank's instructions in order of their simulated start.

    limits  per rank, most unfinished micro-batches at once
    mode    forwards only, whole backwards, or backwards in halves
    """
    return play(graph, work_of(graph, transfer_seconds, mode), microbatches, limits).order()


def limits_within(graph: SegmentGraph, limits: Sequence[int], memory_bytes: Sequence[int]) -> tuple[int, ...]:
    """Lower ``limits`` to what fits: all saved bytes of one micro-batch on the rank, times the limit.

    Every rank keeps at least one micro-batch: less cannot run, and whether one fits is not for a schedule to say.
    """
    saved = [0] * graph.world_size
    for segment in graph.segments:
        if segment.has_backward:
            for rank in segment.ranks:
                saved[rank] += segment.cost.saved_bytes
    return tuple(
        limit if size == 0 else max(1, min(limit, memory // size))
        for limit, size, memory in zip(limits, saved, memory_bytes, strict=True)
    )


def inference_order(
    graph: SegmentGraph, microbatches: int, transfer_seconds: TransferSeconds | None = None
) -> ComputeOrder:
    """Order forwards only, on any placement: micro-batches follow each other as fast as the ranks allow."""
    return list_order(
        graph,
        microbatches,
        limits=[microbatches] * graph.world_size,
        transfer_seconds=transfer_seconds,
        mode="inference",
    )


@dataclass(frozen=True)
class ListSchedule(Schedule):
    """The list scheduler with its default limits, or twice those where that pays, within the memory given.

    Backwards are whole, or in halves: then weight halves fill what would be gaps.
    """

    @property
    def mode(self) -> PassMode:
        """Backwards whole, or in halves."""
        return "split" if self.splits_backward else "whole"

    def check(self, stages: int, ranks: int, microbatches: int) -> str | None:
        if min(stages, ranks, microbatches) < 1:
            return f"list needs stages, ranks and micro-batches, not {stages}, {ranks} and {microbatches}"
        return None

    def steps(self, position: int, ranks: int, chunks: int, microbatches: int) -> Sequence[ComputeStep]:
        """Return the steps on a chain of equal stages placed round and round; other graphs may be ordered otherwise."""
        return _chain_steps(self, ranks, chunks, microbatches)[position]

    def order(
        self,
        graph: SegmentGraph,
        microbatches: int,
        memory_bytes: Sequence[int] | None = None,
        transfer_seconds: TransferSeconds | None = None,
    ) -> ComputeOrder:
        work = work_of(graph, transfer_seconds, self.mode)
        alone = Alone.of(graph, work)
        once = alone.limits(microbatches)
        twice = tuple(min(microbatches, 2 * limit) for limit in once)
        if memory_bytes is not None:
            once = limits_within(graph, once, memory_bytes)
            twice = limits_within(graph, twice, memory_bytes)
        best = play(graph, work, microbatches, once)
        # The first micro-batch alone, then one per period: who comes near that has nothing to gain.
        smooth_seconds = alone.step_seconds + (microbatches - 1) * alone.period_seconds
        if twice != once and best.step_seconds > smooth_seconds * (1 + WORTH_TWICE_THE_MEMORY):
            # Little's law knows no queues. Where instructions of several segments queue for a rank, more
            # micro-batches help: on random graphs twice as many save 4 to 14%, more than that hardly anything.
            ahead = play(graph, work, microbatches, twice)
            if ahead.step_seconds < best.step_seconds * (1 - WORTH_TWICE_THE_MEMORY):
                best = ahead
        return best.order()


@lru_cache(maxsize=256)
def _chain_steps(
    schedule: Schedule, ranks: int, chunks: int, microbatches: int
) -> tuple[tuple[ComputeStep, ...], ...]:
    stages = ranks * chunks
    cost = SegmentCost(forward_seconds=1, backward_input_seconds=1, backward_weight_seconds=1)
    chain = SegmentGraph(
        tuple(Segment(s, (s % ranks,), cost) for s in range(stages)),
        tuple(Value(f"v{s}", s, (s + 1,), 0, True) for s in range(stages - 1)),
        ranks,
    )
    return tuple(
        tuple((i.letter, i.segment // ranks, i.microbatch) for i in instructions)
        for instructions in schedule.order(chain, microbatches)
    )


@dataclass(frozen=True)
class Alone:
    """Times of one micro-batch played alone."""

    step_seconds: float
    period_seconds: float
    """Seconds of work of the busiest rank."""
    span_seconds: Sequence[float]
    """Seconds of each rank from its first start to its last finish."""

    @staticmethod
    def of(graph: SegmentGraph, work: Work) -> Alone:
        """Play it."""
        clock = play(graph, work, 1, [1] * graph.world_size)
        busy_seconds = [0.0] * graph.world_size
        for node in work.nodes:
            for rank in node.segment.ranks:
                busy_seconds[rank] += node.seconds
        return Alone(clock.step_seconds, max(busy_seconds), clock.span_seconds())

    def limits(self, microbatches: int) -> tuple[int, ...]:
        """Return, for each rank, how many unfinished micro-batches keep the slowest rank busy (and no more).

        Little's law: L = λW. λ is one micro-batch per period, the work of the busiest rank; W is the time from a
        micro-batch's first forward to its last backward on the rank when it is alone. On p equal stages this is
        p-i on rank i, 1F1B's own bound.
        """
        if self.period_seconds <= 0:
            return (microbatches,) * len(self.span_seconds)
        # A little less than the quotient, so that rounding of equal times does not add a micro-batch.
        quotients = (math.ceil(span / self.period_seconds - 1e-6) for span in self.span_seconds)
        return tuple(min(microbatches, max(1, quotient)) for quotient in quotients)
