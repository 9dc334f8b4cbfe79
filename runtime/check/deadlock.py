"""The search for deadlocks: one graph of everything that waits, and a shortest circle in it.

A send completes only when its receive runs, so a matched pair is ONE node; so is a collective over all its
ranks, and a compute of a segment that several ranks run together. Every edge says that the right one cannot
start before the left one is done:

    program   compute -> next compute of the rank; collectives and the optimizer step are links of this chain
    issue     compute -> every send and receive that the rank issues after it
    wait      message -> the computes on its target that consume it
    queue     point-to-point operation -> the next one of the same rank on the same queue

``blocking=True`` also makes every send and receive a link of the program's chain.

Queues follow one of three rules:

    pair         one per unordered pair of ranks, for their point-to-point operations
    device       one per rank, for all of its point-to-point operations
    everything   one per rank, for the collectives inside of shared computes and the sums of gradients as well: these
                 wait for whatever the rank issued before

The edges of each imply those of the rules above it (a pair's operations are a subsequence of the device's): programs
without a circle under ``everything`` have none under ``device``, and those have none under ``pair``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from runtime.program.program import (
    BackwardWeight,
    Forward,
    Instruction,
    Message,
    OptimizerStep,
    Program,
    Recv,
    ReduceGradients,
    SegmentGraph,
    Send,
)

QueueRule: TypeAlias = Literal["pair", "device", "everything"]
ProgramPlace: TypeAlias = tuple[int, int]
"""The (rank, index of the instruction in its program)."""

_TRANSFER = (Send, Recv)
_DEVICE = -1
"""The number of a rank's own queue, among those of its peers."""
_SEARCHES = 64
"""Number of starting points when looking for a short circle; each costs one sweep over what is stuck."""


@dataclass
class WaitGraph:
    """The graph of waits. Nodes are numbered; ``places[node]`` says where the instructions of a node stand."""

    programs: Sequence[Program]
    places: list[list[ProgramPlace]] = field(default_factory=list)
    after: list[list[int]] = field(default_factory=list)
    shared: dict[object, int] = field(default_factory=dict)
    """Node of each message and collective, which several programs contain."""

    def private_node(self, place: ProgramPlace) -> int:
        self.places.append([place])
        self.after.append([])
        return len(self.places) - 1

    def shared_node(self, key: object, place: ProgramPlace) -> int:
        node = self.shared.get(key)
        if node is None:
            node = self.shared[key] = self.private_node(place)
        else:
            self.places[node].append(place)
        return node

    def instruction(self, place: ProgramPlace) -> Instruction:
        return self.programs[place[0]].instructions[place[1]]


def find_deadlock(
    programs: Sequence[Program], graph: SegmentGraph, *, rule: QueueRule = "device", blocking: bool = False
) -> list[str]:
    """Describe a circle of waits in lines; none if there is no circle. ``programs[r].rank`` must be ``r``.

    Messages that lack a counterpart are left out: a checker reports them as what they are.
    """
    waits = _wait_graph(programs, graph, rule, blocking)
    stuck = _stuck(waits)
    if not stuck:
        return []
    circle = _short_circle(waits, stuck)
    return [_explain(waits, a, b) for a, b in zip(circle, circle[1:] + circle[:1], strict=True)]


def _wait_graph(
    programs: Sequence[Program], graph: SegmentGraph, rule: QueueRule, blocking: bool
) -> WaitGraph:
    waits = WaitGraph(programs)
    matched = _matched(programs)
    consumers = {value.name: value.consumers for value in graph.values}
    producers = {value.name: (value.producer,) for value in graph.values}
    after, places, shared = waits.after, waits.places, waits.shared
    together = {segment.index for segment in graph.segments if len(segment.ranks) > 1}
    queued = {segment.index for segment in graph.segments if segment.shared and rule == "everything"}
    for rank, program in enumerate(programs):
        before = -1
        last_on: dict[int, int] = {}
        awaited: dict[tuple[bool, int, int], list[int]] = {}
        reductions: dict[ReduceGradients, int] = {}
        for index, instruction in enumerate(program.instructions):
            if isinstance(instruction, Send) or isinstance(instruction, Recv):  # noqa: SIM101 (a third faster)
                message = instruction.message
                node = shared.get(message, -1)
                if node < 0:
                    if message not in matched:
                        continue
                    node = shared[message] = len(after)
                    after.append([])
                    places.append([(rank, index)])
                else:
                    places[node].append((rank, index))
                if before >= 0:
                    after[before].append(node)
                queue = message.source + message.target - rank if rule == "pair" else _DEVICE
                if queue in last_on:
                    after[last_on[queue]].append(node)
                last_on[queue] = node
                if isinstance(instruction, Recv):
                    users = (producers if message.gradient else consumers).get(message.value, ())
                    for segment in users:
                        awaited.setdefault((message.gradient, segment, message.microbatch), []).append(node)
                if blocking:
                    before = node
                continue
            if isinstance(instruction, ReduceGradients):
                nth = reductions[instruction] = reductions.get(instruction, 0) + 1
                node = waits.shared_node((instruction, nth), (rank, index))
                on_queue = rule == "everything"
            else:
                on_queue = getattr(instruction, "segment", -1) in queued
                if getattr(instruction, "segment", -1) in together:
                    node = waits.shared_node(instruction, (rank, index))
                else:
                    node = waits.private_node((rank, index))
                if not isinstance(instruction, OptimizerStep | BackwardWeight):
                    gradient = not isinstance(instruction, Forward)
                    for message_node in awaited.pop(
                        (gradient, instruction.segment, instruction.microbatch), ()
                    ):
                        after[message_node].append(node)
            if before >= 0:
                after[before].append(node)
            if on_queue and _DEVICE in last_on:
                after[last_on.pop(_DEVICE)].append(node)  # what is issued later waits for this node anyway
            before = node
    return waits


def _matched(programs: Sequence[Program]) -> set[Message]:
    """Return the messages that are issued on both sides, on the right ranks."""
    sent: list[Message] = []
    received: list[Message] = []
    for rank, program in enumerate(programs):
        for i in program.instructions:
            if isinstance(i, Send) and i.message.source == rank:
                sent.append(i.message)
            elif isinstance(i, Recv) and i.message.target == rank:
                received.append(i.message)
    return set(sent) & set(received)


def _stuck(waits: WaitGraph) -> set[int]:
    """Return the nodes that can never start (Kahn's algorithm: take what waits for nothing until none is left)."""
    waiting_for = [0] * len(waits.after)
    for targets in waits.after:
        for target in targets:
            waiting_for[target] += 1
    free = [node for node, count in enumerate(waiting_for) if count == 0]
    for node in free:
        for target in waits.after[node]:
            waiting_for[target] -= 1
            if waiting_for[target] == 0:
                free.append(target)
    return {node for node, count in enumerate(waiting_for) if count > 0}


def _short_circle(waits: WaitGraph, stuck: set[int]) -> list[int]:
    """Return a circle among ``stuck``: the shortest through any of the first nodes of some circle.

    Every stuck node waits for a stuck node, so walking back must come round; breadth-first sweeps from the
    nodes of that circle then find the shortest way from each to itself.
    """
    waited: dict[int, int] = {}
    for node in sorted(stuck, reverse=True):
        for target in waits.after[node]:
            waited[target] = node
    node, trail = min(stuck), dict[int, None]()
    while node not in trail:
        trail[node] = None
        node = waited[node]
    walked = list(trail)
    circle = walked[walked.index(node) :][::-1]
    for start in circle[:_SEARCHES]:
        shorter = _way_round(waits, start, stuck, len(circle))
        if shorter is not None:
            circle = shorter
    return circle


def _way_round(waits: WaitGraph, start: int, stuck: set[int], limit: int) -> list[int] | None:
    """Return the shortest circle through ``start`` with fewer than ``limit`` nodes."""
    reached_from: dict[int, int] = {}
    depth = {start: 1}
    todo = deque([start])
    while todo:
        node = todo.popleft()
        if depth[node] >= limit:
            return None
        for target in waits.after[node]:
            if target == start:
                back = [node]
                while back[-1] != start:
                    back.append(reached_from[back[-1]])
                return back[::-1]
            if target in stuck and target not in depth:
                depth[target] = depth[node] + 1
                reached_from[target] = node
                todo.append(target)
    return None


def _explain(waits: WaitGraph, first: int, then: int) -> str:
    """Explain in one line why ``then`` waits for ``first``."""
    common = [(a, b) for a in waits.places[first] for b in waits.places[then] if a[0] == b[0] and a[1] < b[1]]
    a, b = common[0]
    earlier, later = waits.instruction(a), waits.instruction(b)
    if isinstance(earlier, _TRANSFER):
        how = "is queued behind" if isinstance(later, _TRANSFER) else "waits for"
    else:
        how = "comes after"
    partner = [place for place in waits.places[then] if place[0] != b[0]]
    with_whom = f" (its other side is on rank {', '.join(str(p[0]) for p in partner)})" if partner else ""
    return f"rank {b[0]}: {later}{with_whom} {how} {earlier}"
