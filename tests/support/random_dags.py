"""Hypothesis strategies: random segment DAGs, placed at random, with a random valid order of computes."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hypothesis import strategies as st

from runtime.program.program import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    ComputeOrder,
    Forward,
    Segment,
    SegmentCost,
    SegmentGraph,
    TiedGroup,
    Value,
)


@dataclass(frozen=True)
class Case:
    """Everything that ``build_programs`` takes."""

    graph: SegmentGraph
    orders: ComputeOrder
    microbatches: int
    tied: tuple[TiedGroup, ...]
    transfer: float

    def transfer_seconds(self, source: int, target: int, size_bytes: int) -> float:
        return self.transfer * size_bytes * (1 + (source * 7 + target * 3) % 4)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Skips, branches, idle ranks, zero durations, frozen segments, values without gradient, tied parameters."""
    dice = random.Random(draw(st.integers(0, 2**32)))
    world, count = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    microbatches = draw(st.integers(1, 4))
    graph = _graph(dice, world, count)
    tied = tuple(
        TiedGroup((f"tied{i}",), tuple(sorted(dice.sample(range(world), dice.randint(2, world)))))
        for i in range(draw(st.integers(0, 2)))
        if world > 1
    )
    orders = random_orders(dice, graph, microbatches)
    return Case(graph, orders, microbatches, tied, draw(st.sampled_from([0.0, 0.001, 0.05, 1.0])))


def _graph(dice: random.Random, world: int, count: int) -> SegmentGraph:
    def seconds() -> float:
        return dice.choice([0.0, 1.0, 1.0, dice.random() * 3])

    backward = [dice.random() < 0.9 for _ in range(count)]
    segments = tuple(
        Segment(
            i,
            (dice.randrange(world),),
            SegmentCost(seconds(), seconds(), seconds(), dice.randint(0, 50), dice.randint(0, 50)),
            backward[i],
        )
        for i in range(count)
    )
    values = []
    for producer in range(count - 1):
        for k in range(dice.randint(0, 2)):
            later = range(producer + 1, count)
            consumers = tuple(sorted(dice.sample(later, dice.randint(1, min(3, len(later))))))
            grad = backward[producer] and all(backward[c] for c in consumers) and dice.random() < 0.8
            values.append(Value(f"v{producer}.{k}", producer, consumers, dice.randint(0, 20), grad))
    return SegmentGraph(segments, tuple(values), world)


def random_orders(dice: random.Random, graph: SegmentGraph, microbatches: int) -> ComputeOrder:
    """One random topological order of all computes, and each rank's part of it."""
    before: dict[Compute, set[Compute]] = {}
    for segment in graph.segments:
        for mb in range(microbatches):
            forward = Forward(segment.index, mb)
            before[forward] = set()
            if not segment.has_backward:
                continue
            halves: list[Compute] = [Backward(segment.index, mb)]
            if segment.index % 2:
                halves = [BackwardInput(segment.index, mb), BackwardWeight(segment.index, mb)]
            for previous, then in zip([forward, *halves], halves, strict=False):
                before[then] = {previous}
    gradients = {(c.segment, c.microbatch): c for c in before if isinstance(c, Backward | BackwardInput)}
    for value in graph.values:
        for consumer in value.consumers:
            for mb in range(microbatches):
                before[Forward(consumer, mb)].add(Forward(value.producer, mb))
                if value.needs_grad:
                    before[gradients[value.producer, mb]].add(gradients[consumer, mb])
    orders: list[list[Compute]] = [[] for _ in range(graph.world_size)]
    done: set[Compute] = set()
    while len(done) < len(before):
        compute = dice.choice([c for c, needs in before.items() if c not in done and needs <= done])
        done.add(compute)
        orders[graph.segments[compute.segment].rank].append(compute)
    return tuple(tuple(order) for order in orders)
