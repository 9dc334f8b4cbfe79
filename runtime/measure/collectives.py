"""Times of the executor's own collectives between two local processes, for a calibration of CPU workers.

    calibrate(2, count_case, measure_collectives)

Each is called as a bridge calls it (``runtime.mesh.axis``), its copies included, between products that both ranks compute:
a rank that computes answers later than one that sleeps, and its neighbour's thread wakes up beside it. A collective takes
what it adds to these products. Sizes are those of the whole tensor.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.mesh.axis import Axis

SIZES_BYTES = (2**12, 2**16, 2**19, 2**22, 2**24)
TURNS, ROUNDS, CALLS = 3, 5, 8
"""The least of TURNS medians of ROUNDS counts: a machine is slower for seconds, and another program that takes a core
shows in a few rounds. Each is of CALLS calls, so that a call that waited long counts as often as it happens."""
PRODUCTS = 2
"""Products of 256 x 256 before each call: about as long as what a sharded block computes between two of them."""


def measure_collectives(rank: int, group: Any) -> Mapping[str, Sequence[tuple[float, float]]]:
    """Measure with the other rank of ``group``, which calls this too; what the slower rank takes.

    A smaller tensor is not believed to take longer than a larger one.
    """
    axis = Axis("pair", 2, rank, group)
    turns = [_turn(axis) for _ in range(TURNS)]
    found = {}
    for kind in turns[0]:
        least = [min(times) for times in zip(*(turn[kind] for turn in turns), strict=True)]
        rising = [*itertools.accumulate(reversed(least), min)]
        found[kind] = tuple(zip(map(float, SIZES_BYTES), reversed(rising), strict=True))
    return found


def _turn(axis: Axis) -> Mapping[str, Sequence[float]]:
    """Measure every kind at every size."""
    found = {}
    for kind, (rows, columns, call) in _calls(axis).items():
        sides = [torch.ones(rows, size // 4 // rows // columns, columns) for size in SIZES_BYTES]
        found[kind] = [_added_seconds(axis.group, call, side) for side in sides]
    return found


def _calls(axis: Axis) -> Mapping[str, tuple[int, int, Callable[[Tensor], Tensor]]]:
    """Return by kind the parts into which the first and last dimension of a rank's shard divide, and the call."""
    return {
        "all_reduce": (1, 1, axis.sum),
        "all_gather": (2, 1, lambda x: axis.gather(x[:1], 0)),
        "reduce_scatter": (2, 1, lambda x: axis.sum_part(x, 0)),
        "all_to_all": (2, 2, lambda x: axis.exchange(x[:1], 2, 0)),
    }


def _added_seconds(group: Any, call: Callable[[Tensor], Tensor], operand: Tensor) -> float:
    product, added = torch.ones(256, 256), []

    def run(calls: bool) -> float:
        dist.barrier(group=group)
        started = time.perf_counter()
        for _ in range(CALLS):
            for _ in range(PRODUCTS):
                product.mm(product)
            if calls:
                call(operand)
        return time.perf_counter() - started

    run(True)
    for _ in range(ROUNDS):
        quiet = run(False)
        added.append(max(1e-6, run(True) - quiet) / CALLS)
    slower = torch.tensor(statistics.median(added), dtype=torch.float64)
    dist.all_reduce(slower, dist.ReduceOp.MAX, group=group)
    return float(slower)
