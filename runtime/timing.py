"""When each compute of a schedule would run, if links were never shared: the fast timing pass.

Used twice: to rank candidates (``quick_makespan``) and to put communications into their one global order.
A compute starts when its rank has finished the one before and everything it needs has arrived:

    start(c) = max( end(previous compute of the rank),  max over needs n of  end(n) + transfer(n -> c) )

That is the longest path through the schedule. Queues and shared links only delay, so the makespan is a lower
bound on what ``simulate`` returns for the same orders (tested).

Nodes. Every compute has a number, so that times live in flat lists (S segments, m micro-batches):

    forward                     s * m + microbatch
    backward, or its input half S * m + s * m + microbatch
    weight half                 2 * S * m + s * m + microbatch
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from cost_models.errors import DeadlockError, InternalError
from runtime.program import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    ComputeOrder,
    Forward,
    SegmentGraph,
)

TransferSeconds: TypeAlias = Callable[[int, int, int], float]
"""(source rank, target rank, bytes) -> seconds of the transfer alone on its links."""

UNSET = -1.0
"""The time of a node that has not run."""

NODE_PLANE: dict[type, int] = {Forward: 0, Backward: 1, BackwardInput: 1, BackwardWeight: 2}
"""Which of the three planes of node numbers an instruction type lives in."""

_Need: TypeAlias = tuple[int, float]
"""(node number at micro-batch 0, transfer seconds)."""
_Step: TypeAlias = tuple[int, int, float, tuple[_Need, ...]]
"""(node, micro-batch, duration in seconds, needs)."""


@dataclass(frozen=True)
class Timing:
    """Start and end of every node, in seconds; ``UNSET`` where the orders do not contain it."""

    makespan_seconds: float
    start: list[float]
    end: list[float]
    position: list[int]
    """Index of the node within its rank's order; -1 if absent."""
    sequence: list[int]
    """A topological number of the node: causes before effects, even at equal times."""
    rank_ends: list[list[float]]
    """End times of each rank's computes, in its order (never decreasing)."""


def require_single_ranks(graph: SegmentGraph) -> None:
    """Messages are derived for segments that run on one rank each; device groups have bridges instead."""
    wide = [s for s in graph.segments if len(s.ranks) != 1]
    if wide:
        raise InternalError(
            "derive messages between segments",
            [f"segment {s.index} runs on the device group {s.ranks}, not on one rank" for s in wide],
        )


def time_orders(
    graph: SegmentGraph, orders: ComputeOrder, microbatches: int, transfer_seconds: TransferSeconds
) -> Timing:
    """Times every compute of ``orders``; raises ``DeadlockError`` if they wait for each other in a circle."""
    require_single_ranks(graph)
    steps = _steps(graph, orders, microbatches, transfer_seconds)
    nodes = 3 * len(graph.segments) * microbatches
    start, end = [UNSET] * nodes, [UNSET] * nodes
    position, sequence = [-1] * nodes, [-1] * nodes
    clock, next_step = [0.0] * len(orders), [0] * len(orders)
    waiters: dict[int, list[int]] = {}
    done = 0
    ready = list(range(len(orders) - 1, -1, -1))
    while ready:
        rank = ready.pop()
        now, index, todo = clock[rank], next_step[rank], steps[rank]
        while index < len(todo):
            node, microbatch, duration, needs = todo[index]
            begin = now
            for first, delay in needs:
                arrival = end[first + microbatch]
                if arrival < 0.0:
                    waiters.setdefault(first + microbatch, []).append(rank)
                    break
                arrival += delay
                if arrival > begin:
                    begin = arrival
            else:
                now = begin + duration
                start[node], end[node] = begin, now
                position[node], sequence[node] = index, done
                done += 1
                index += 1
                if node in waiters:
                    ready += waiters.pop(node)
                continue
            break
        clock[rank], next_step[rank] = now, index
    if done < sum(map(len, orders)):
        raise _stuck(orders, next_step, waiters, len(graph.segments), microbatches)
    rank_ends = [[end[step[0]] for step in todo] for todo in steps]
    return Timing(max(clock, default=0.0), start, end, position, sequence, rank_ends)


def quick_makespan(
    graph: SegmentGraph, orders: ComputeOrder, microbatches: int, transfer_seconds: TransferSeconds
) -> float:
    """Seconds from the first forward to the last backward, with unshared links and no queues."""
    return time_orders(graph, orders, microbatches, transfer_seconds).makespan_seconds


def _steps(
    graph: SegmentGraph, orders: ComputeOrder, microbatches: int, transfer_seconds: TransferSeconds
) -> list[list[_Step]]:
    """The orders as flat tuples, one per compute."""
    duration = compute_seconds(graph)
    needs = _needs(graph, microbatches, transfer_seconds)
    planes = 3 * len(graph.segments)
    base = [plane_segment * microbatches for plane_segment in range(planes)]
    offset = {kind: plane * len(graph.segments) for kind, plane in NODE_PLANE.items()}
    try:
        return [
            [
                (base[row] + mb, mb, duration[type(c)][c.segment], needs[row])
                for c in order
                for row, mb in ((offset[type(c)] + c.segment, c.microbatch),)
            ]
            for order in orders
        ]
    except (IndexError, KeyError) as error:
        raise InternalError(
            "time a schedule", [f"it has a compute the segment graph lacks: {error}"]
        ) from error


def compute_seconds(graph: SegmentGraph) -> dict[type, list[float]]:
    """Seconds of one micro-batch: by instruction type, then by segment."""
    costs = [segment.cost for segment in graph.segments]
    return {
        Forward: [c.forward_seconds for c in costs],
        Backward: [c.backward_seconds for c in costs],
        BackwardInput: [c.backward_input_seconds for c in costs],
        BackwardWeight: [c.backward_weight_seconds for c in costs],
    }


def _needs(
    graph: SegmentGraph, microbatches: int, transfer_seconds: TransferSeconds
) -> list[tuple[_Need, ...]]:
    """What each row (plane and segment) waits for: activations forward, gradients back."""
    count = len(graph.segments)
    slowest: list[dict[int, float]] = [{} for _ in range(3 * count)]

    def need(row: int, cause: int, delay: float) -> None:
        slowest[row][cause] = max(slowest[row].get(cause, 0.0), delay)

    for value in graph.values:
        producer_rank = graph.segments[value.producer].rank
        for consumer in value.consumers:
            rank = graph.segments[consumer].rank
            away = rank != producer_rank
            delay = transfer_seconds(producer_rank, rank, value.size_bytes) if away else 0.0
            need(consumer, value.producer, delay)
            if value.needs_grad:
                back = transfer_seconds(rank, producer_rank, value.size_bytes) if away else 0.0
                need(count + value.producer, count + consumer, back)
    return [tuple((cause * microbatches, delay) for cause, delay in row.items()) for row in slowest]


def _stuck(
    orders: ComputeOrder,
    next_step: Sequence[int],
    waiters: dict[int, list[int]],
    segments: int,
    microbatches: int,
) -> DeadlockError:
    """The error for orders whose ranks wait for each other, or for computes that nobody runs."""
    reasons = []
    for node, ranks in sorted(waiters.items()):
        plane, rest = divmod(node, segments * microbatches)
        waited = f"{rest // microbatches}{'FB'[plane]}{rest % microbatches}"
        for rank in ranks:
            compute: Compute = orders[rank][next_step[rank]]
            reasons.append(f"rank {rank}: {compute} waits for {waited}")
    return DeadlockError("time a schedule: its computes wait for each other forever", reasons)
