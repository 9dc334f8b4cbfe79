"""Times of the executor's own collectives between two local processes, for a calibration of CPU workers.

    calibrate(2, count_case, measure_collectives)

Each is called as a bridge calls it (``runtime.mesh.axis``), its copies included. Sizes are those of the whole tensor.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cost_models.calibration_run import Curve
from runtime.mesh.axis import Axis

SIZES_BYTES = (2**10, 2**14, 2**17, 2**20, 2**22, 2**24)
ROUNDS, TURNS = 15, 3
"""Each time is the least of TURNS medians of ROUNDS: another program takes a core for longer than one of them takes."""
WARM_UPS = 2
PRODUCTS = 4
"""Products of 256 x 256 before each, a millisecond or less."""


def measure_collectives(rank: int, group: Any) -> Mapping[str, Curve]:
    """Measure with the other rank of ``group``, which calls this too: from when the later rank is there.

    Both compute before, as they do in a step: a core that slept takes longer to answer. A smaller tensor is not believed
    to take longer than a larger one.
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
        found[kind] = [_seconds(axis.group, call, side) for side in sides]
    return found


def _calls(axis: Axis) -> Mapping[str, tuple[int, int, Callable[[Tensor], Tensor]]]:
    """Return by kind how many parts the first and last dimension of what a rank has of a tensor need, and the call."""
    return {
        "all_reduce": (1, 1, axis.sum),
        "all_gather": (2, 1, lambda x: axis.gather(x[:1], 0)),
        "reduce_scatter": (2, 1, lambda x: axis.sum_part(x, 0)),
        "all_to_all": (2, 2, lambda x: axis.exchange(x[:1], 2, 0)),
    }


def _seconds(group: Any, call: Callable[[Tensor], Tensor], operand: Tensor) -> float:
    spent, product = [], torch.ones(256, 256)
    for _ in range(WARM_UPS + ROUNDS):
        dist.barrier(group=group)
        for _ in range(PRODUCTS):
            product.mm(product)
        started = time.perf_counter()
        call(operand)
        spent.append(time.perf_counter() - started)
    later = torch.tensor(spent[WARM_UPS:], dtype=torch.float64)
    dist.all_reduce(later, dist.ReduceOp.MIN, group=group)
    return float(later.median())
