"""The fast timing pass: when each compute of a schedule would run if links were never shared.

Used twice: to rank candidates (``quick_makespan``) and to put communications into their one global order.
A compute starts when its rank has finished the one before and everything it needs has arrived; a transfer starts when
its tensor is made and the one before it from the same rank to the same rank is done:

    start(c)   = max( end(previous compute of the rank),  max over its needs n of  arrival(n) )
    arrival(n) = max( end(producer of n),  arrival(previous n between these two ranks) ) + transfer seconds

Everything that is left out (both directions of a pair in one queue, shared links, late receives, contention) only
delays, so the makespan is a lower bound on what ``simulate`` returns for the same orders (tested).

Nodes. Every compute has a number, so that times live in flat lists (S segments, m micro-batches):

    forward                     s * m + microbatch
    backward, or its input half S * m + s * m + microbatch
    weight half                 2 * S * m + s * m + microbatch

Behind them, m numbers per tensor that goes from one rank to another: its arrivals.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from cost_models.errors import DeadlockError, InternalError
from runtime.program.crossings import consumers_by_group, crossings
from runtime.program.groups import on_leaders
from runtime.program.program import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    ComputeOrder,
    Forward,
    SegmentGraph,
    TransferSeconds,
)

UNSET = -1.0
"""The time of a node that has not run."""

NODE_PLANE: dict[type, int] = {Forward: 0, Backward: 1, BackwardInput: 1, BackwardWeight: 2}
"""The one of the three planes of node numbers that an instruction type lives in."""

_Outgoing: TypeAlias = tuple[int, int, float, list[int] | None]
"""(arrival at micro-batch 0, pair of ranks, transfer seconds, contributions missing per micro-batch or None)."""
_TimedCompute: TypeAlias = tuple[int, int, float, list[int], list[_Outgoing]]
"""(node, micro-batch, duration in seconds, what it needs at micro-batch 0, what it sends)."""


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
    rank_starts: list[list[float]]
    """Start times of each rank's computes, in its order (never decreasing); none for ranks that follow a leader."""
    rank_ends: list[list[float]]
    """End times of the same."""


def quick_makespan(
    graph: SegmentGraph, orders: ComputeOrder, microbatches: int, transfer_seconds: TransferSeconds
) -> float:
    """Return the seconds from the first forward to the last backward; a lower bound, see above."""
    return time_orders(graph, orders, microbatches, transfer_seconds).makespan_seconds


def time_orders(
    graph: SegmentGraph, orders: ComputeOrder, microbatches: int, transfer_seconds: TransferSeconds
) -> Timing:
    """Time every compute of ``orders``; raise ``DeadlockError`` if they wait for each other in a circle.

    Segments of several ranks are timed on the leader of their group (``groups``).
    """
    orders = on_leaders(graph).orders(orders)
    dag = _dag(graph, microbatches, transfer_seconds)
    steps = _steps(graph, orders, microbatches, dag)
    nodes = 3 * len(graph.segments) * microbatches
    start, position, sequence = [UNSET] * nodes, [-1] * nodes, [-1] * nodes
    end = [UNSET] * (nodes + dag.tensors * microbatches)
    free_at = [0.0] * len(dag.pairs)
    clock, next_step = [0.0] * len(orders), [0] * len(orders)
    waiters: dict[int, int] = {}
    """The rank that waits for a node or an arrival; each is needed on one rank only."""
    done = 0
    ready = list(range(len(orders) - 1, -1, -1))
    while ready:
        rank = ready.pop()
        now, index, todo = clock[rank], next_step[rank], steps[rank]
        while index < len(todo):
            node, microbatch, duration, needs, sends = todo[index]
            begin = now
            for need in needs:
                arrival = end[need + microbatch]
                if arrival > begin:
                    begin = arrival
                elif arrival < 0.0:
                    waiters[need + microbatch] = rank
                    break
            else:
                now = begin + duration
                start[node], end[node] = begin, now
                position[node], sequence[node] = index, done
                done += 1
                index += 1
                for tensor, pair, seconds, missing in sends:
                    if missing is not None:
                        missing[microbatch] -= 1
                        if missing[microbatch]:
                            continue
                    free = free_at[pair]
                    free_at[pair] = end[tensor + microbatch] = (free if free > now else now) + seconds
                    if tensor + microbatch in waiters:
                        ready.append(waiters.pop(tensor + microbatch))
                continue
            break
        clock[rank], next_step[rank] = now, index
    if done < sum(map(len, orders)):
        raise _stuck(orders, next_step, waiters, dag, microbatches)
    rank_starts = [[start[step[0]] for step in todo] for todo in steps]
    rank_ends = [[end[step[0]] for step in todo] for todo in steps]
    return Timing(max(clock, default=0.0), start, end[:nodes], position, sequence, rank_starts, rank_ends)


@dataclass
class _Dag:
    """The needs and sends of each row; a row is a segment in one of the three planes."""

    rows: int
    microbatches: int
    needs: list[list[int]] = field(default_factory=list)
    sends: list[list[_Outgoing]] = field(default_factory=list)
    pairs: dict[tuple[int, int], int] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    """Description of each tensor, for errors."""

    @property
    def tensors(self) -> int:
        return len(self.texts)

    def carry(
        self, text: str, producers: list[int], users: list[int], ends: tuple[int, int], seconds: float
    ) -> None:
        """Carry a tensor from rank to rank when all ``producers`` (rows) have run; ``users`` (rows) need it."""
        tensor = (self.rows + self.tensors) * self.microbatches
        self.texts.append(text)
        pair = self.pairs.setdefault(ends, len(self.pairs))
        missing = [len(producers)] * self.microbatches if len(producers) > 1 else None
        for row in producers:
            self.sends[row].append((tensor, pair, seconds, missing))
        for row in users:
            self.needs[row].append(tensor)


def _dag(graph: SegmentGraph, microbatches: int, transfer_seconds: TransferSeconds) -> _Dag:
    count = len(graph.segments)
    rows = 3 * count
    dag = _Dag(rows, microbatches, [[] for _ in range(rows)], [[] for _ in range(rows)])
    bundles: list[tuple[str, list[int], list[int], dict[tuple[int, int], float]]] = []
    """(text, rows that make it, rows that need it, seconds of each of its pieces)."""
    for value in graph.values:
        home = graph.segments[value.producer].ranks
        for consumer in consumers_by_group(graph, value).get(home, ()):
            dag.needs[consumer].append(value.producer * microbatches)
            if value.needs_grad:
                dag.needs[count + value.producer].append((count + consumer) * microbatches)
        for _, consumers, there, back in crossings(graph, value):
            backwards = [count + consumer for consumer in consumers]
            for text, made, used, pieces in (
                (value.name, [value.producer], consumers, there),
                (f"d({value.name})", backwards, [count + value.producer], back),
            ):
                bundles.append((text, made, used, {p[:2]: transfer_seconds(*p) for p in pieces}))
    timed = _unlike_pairs([seconds for *_, seconds in bundles])
    for text, made, used, seconds in bundles:
        for ends in seconds:
            if ends in timed:
                dag.carry(text, made, used, ends, seconds[ends])
    return dag


def _unlike_pairs(bundles: Sequence[Mapping[tuple[int, int], float]]) -> set[tuple[int, int]]:
    """Return the pairs of ranks to time: of those whose pieces, bundle by bundle, take the same seconds, one."""
    carried: defaultdict[tuple[int, int], list[tuple[int, float]]] = defaultdict(list)
    for number, seconds_of in enumerate(bundles):
        for ends, seconds in seconds_of.items():
            carried[ends].append((number, seconds))
    return set({tuple(pieces): ends for ends, pieces in carried.items()}.values())


def _steps(
    graph: SegmentGraph, orders: ComputeOrder, microbatches: int, dag: _Dag
) -> list[list[_TimedCompute]]:
    """Return the orders as flat tuples, one per compute."""
    duration = compute_seconds(graph)
    base = [row * microbatches for row in range(dag.rows)]
    offset = {kind: plane * len(graph.segments) for kind, plane in NODE_PLANE.items()}
    try:
        return [
            [
                (base[row] + mb, mb, duration[type(c)][c.segment], dag.needs[row], dag.sends[row])
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
    """Return the seconds of one micro-batch by instruction type, then by segment."""
    costs = [segment.cost for segment in graph.segments]
    return {
        Forward: [c.forward_seconds for c in costs],
        Backward: [c.backward_seconds for c in costs],
        BackwardInput: [c.backward_input_seconds for c in costs],
        BackwardWeight: [c.backward_weight_seconds for c in costs],
    }


def _stuck(
    orders: ComputeOrder, next_step: Sequence[int], waiters: dict[int, int], dag: _Dag, microbatches: int
) -> DeadlockError:
    """Return the error for orders whose ranks wait for each other, or for computes that nobody runs."""
    reasons = []
    for waited, rank in sorted(waiters.items(), key=lambda item: item[1]):
        compute: Compute = orders[rank][next_step[rank]]
        row, mb = divmod(waited, microbatches)
        segments = dag.rows // 3
        if row < dag.rows:
            text = f"{row % segments}{'FBW'[row // segments]}{mb}, which comes later on the same rank"
        else:
            text = f"{dag.texts[row - dag.rows]}:{mb}"
        reasons.append(f"rank {rank}: {compute} waits for {text}")
    return DeadlockError("time a schedule: its computes wait for each other forever", reasons)
