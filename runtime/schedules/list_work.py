"""The DAG of one micro-batch, for the list scheduler: forwards and backwards of segments, with times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from cost_models.errors import UsageError
from runtime.program.program import Letter, Segment, SegmentGraph, TransferSeconds

PassMode: TypeAlias = Literal["inference", "whole", "split"]
"""Forwards only, whole backwards, or backwards in halves."""


@dataclass(frozen=True)
class WorkNode:
    """A piece of one segment's work on every micro-batch: its forward, backward, or a half of it."""

    kind: Letter
    segment: Segment
    seconds: float
    urgency: int  # 0 runs before 1 before 2


@dataclass(frozen=True)
class Work:
    """The DAG of one micro-batch. Node indices are a topological order."""

    nodes: tuple[WorkNode, ...]
    after: tuple[tuple[tuple[int, float], ...], ...]
    """Nodes that need each node's result, with the seconds until the result is there."""
    needs: tuple[int, ...]
    """Number of results that each node waits for."""
    place: tuple[int, ...]
    """Place of each node in the order of urgency, longest remaining path first among equals."""


def _transfers(
    graph: SegmentGraph, transfer_seconds: TransferSeconds | None
) -> dict[tuple[int, int], tuple[float, bool]]:
    """Return, by (producer, consumer), the seconds on the way and whether a gradient comes back."""
    size_bytes: dict[tuple[int, int], int] = {}
    gradient: dict[tuple[int, int], bool] = {}
    for value in graph.values:
        for consumer in value.consumers:
            edge = (value.producer, consumer)
            size_bytes[edge] = size_bytes.get(edge, 0) + value.size_bytes
            gradient[edge] = gradient.get(edge, False) or value.needs_grad
    found = {}
    for (producer, consumer), size in size_bytes.items():
        source = graph.segments[producer].ranks
        targets = [rank for rank in graph.segments[consumer].ranks if rank not in source]
        seconds = 0.0
        if transfer_seconds is not None and targets:
            seconds = max(transfer_seconds(source[0], target, size) for target in targets)
        found[producer, consumer] = (seconds, gradient[producer, consumer])
    return found


def work_of(graph: SegmentGraph, transfer_seconds: TransferSeconds | None, mode: PassMode) -> Work:
    """Make the DAG of one micro-batch."""
    count = len(graph.segments)
    nodes = [WorkNode("F", s, s.cost.forward_seconds, 1) for s in graph.segments]
    backward: dict[int, int] = {}
    weight: dict[int, int] = {}
    if mode != "inference":
        # Consumers first: node indices stay a topological order.
        for s in reversed(graph.segments):
            if s.has_backward:
                backward[s.index] = len(nodes)
                kind: Letter = "B" if mode == "whole" else "I"
                whole = s.cost.backward_seconds if mode == "whole" else s.cost.backward_input_seconds
                nodes.append(WorkNode(kind, s, whole, 0))
    if mode == "split":
        for index in backward:
            weight[index] = len(nodes)
            s = graph.segments[index]
            nodes.append(WorkNode("W", s, s.cost.backward_weight_seconds, 2))

    after: list[list[tuple[int, float]]] = [[] for _ in nodes]
    for (producer, consumer), (seconds, gradient) in _transfers(graph, transfer_seconds).items():
        after[producer].append((consumer, seconds))
        if gradient and producer in backward and consumer in backward:
            after[backward[consumer]].append((backward[producer], seconds))
    for index, node in backward.items():
        after[index].append((node, 0.0))
    for index, node in weight.items():
        after[backward[index]].append((node, 0.0))

    needs = [0] * len(nodes)
    remaining_seconds = [0.0] * len(nodes)
    for node in reversed(range(len(nodes))):
        longest = 0.0
        for successor, seconds in after[node]:
            needs[successor] += 1
            longest = max(longest, seconds + remaining_seconds[successor])
        remaining_seconds[node] = nodes[node].seconds + longest
    by_urgency = sorted(range(len(nodes)), key=lambda n: (nodes[n].urgency, -remaining_seconds[n], n))
    place = [0] * len(nodes)
    for rank, node in enumerate(by_urgency):
        place[node] = rank
    if count == 0:
        raise UsageError("there is nothing to schedule", ["the graph has no segments"])
    return Work(tuple(nodes), tuple(map(tuple, after)), tuple(needs), tuple(place))
