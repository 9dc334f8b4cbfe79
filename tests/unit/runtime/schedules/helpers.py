"""Small graphs and the textbook orders, for tests of what happens after scheduling."""

from __future__ import annotations

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
    Value,
)

COST = SegmentCost(1.0, 1.0, 1.0, saved_bytes=100, weight_saved_bytes=40)


def chain(stages: int, cost: SegmentCost = COST, size_bytes: int = 10) -> SegmentGraph:
    """A plain pipeline: stage i on rank i sends ``x{i}`` to stage i + 1."""
    return SegmentGraph(
        tuple(Segment(i, (i,), cost) for i in range(stages)),
        tuple(Value(f"x{i}", i, (i + 1,), size_bytes, True) for i in range(stages - 1)),
        stages,
    )


def gpipe(stages: int, microbatches: int) -> ComputeOrder:
    """All forwards, then all backwards."""
    return tuple(
        (*(Forward(s, k) for k in range(microbatches)), *(Backward(s, k) for k in range(microbatches)))
        for s in range(stages)
    )


def one_f_one_b(stages: int, microbatches: int) -> ComputeOrder:
    """Warm-up of ``stages - s`` forwards, then alternating, then the remaining backwards."""
    orders = []
    for s in range(stages):
        warmup = min(stages - s, microbatches)
        order: list[Compute] = [Forward(s, k) for k in range(warmup)]
        for k in range(microbatches):
            order.append(Backward(s, k))
            if k + warmup < microbatches:
                order.append(Forward(s, k + warmup))
        orders.append(tuple(order))
    return tuple(orders)


def split_backward(orders: ComputeOrder) -> ComputeOrder:
    """Every backward as its input half; the weight half right behind it."""
    halves: list[tuple[Compute, ...]] = []
    for order in orders:
        computes: list[Compute] = []
        for c in order:
            if isinstance(c, Backward):
                computes += [BackwardInput(c.segment, c.microbatch), BackwardWeight(c.segment, c.microbatch)]
            else:
                computes.append(c)
        halves.append(tuple(computes))
    return tuple(halves)


def no_time(source: int, target: int, size_bytes: int) -> float:
    """Transfers that take no time."""
    return 0.0
