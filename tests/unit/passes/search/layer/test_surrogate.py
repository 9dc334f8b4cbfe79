"""The surrogate of 1F1B beside the simulation: what a cut that is not free costs unlike stages."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from dataclasses import replace

import numpy as np
import pytest

from cost_models.links import Link, Path
from passes.search.layer.problem import (
    DevicePool,
    LayerProblem,
    LayerStructure,
    StageSplit,
    Working,
    evaluate,
)
from passes.search.touches import Crossing
from runtime.program.program import Segment, SegmentCost, SegmentGraph, Value
from runtime.schedules import SCHEDULES
from tests.support.rank_programs import build_programs
from tests.support.simulate_ranks import simulate_ranks

MICROBATCHES = 256


class Wires:
    """A wire from each rank to each other, of one byte per second."""

    def __init__(self) -> None:
        self.links: dict[str, Link] = {}

    def path(self, a: int, b: int) -> Path:
        link = self.links.setdefault(f"{a}>{b}", Link(f"{a}>{b}", 1.0, 0.0))
        return Path.over([link])


def pipeline(stages: list[int], cuts: list[int]) -> LayerProblem:
    """A chain of one unit per stage: ``stages`` in seconds, a third of it forward; ``cuts`` in bytes each way."""
    p = len(stages)
    bytes_each = np.array(cuts, dtype=float)
    rate = np.ones((p, p))
    return LayerProblem(
        structure=LayerStructure(
            p,
            tuple(itertools.pairwise(range(p))),
            crossings=tuple(Crossing(u, (u + 1,)) for u in range(p - 1)),
        ),
        seconds=np.array([stages], dtype=float),
        storage_bytes=np.zeros(0),
        state_bytes=np.zeros(0),
        forward_bytes=bytes_each,
        gradient_bytes=bytes_each,
        working=Working.none(p),
        kinds=tuple(DevicePool(f"rank {r}", 0, math.inf) for r in range(p)),
        link_latency_seconds=np.zeros((p, p)),
        link_seconds_per_byte=rate,
        in_flight=tuple(range(1, p + 1)),
        microbatches=MICROBATCHES,
        alternating=True,
        assignment="sequence",
        sequence=tuple(range(p)),
    )


def surrogate(problem: LayerProblem) -> StageSplit:
    return evaluate(problem, range(problem.structure.units), problem.sequence)


def simulated_seconds(stages: list[int], cuts: list[int]) -> float:
    segments = tuple(Segment(i, (i,), SegmentCost(t / 3, 2 * t / 3, 0.0)) for i, t in enumerate(stages))
    values = tuple(Value(f"v{i}", i, (i + 1,), n, True) for i, n in enumerate(cuts))
    graph = SegmentGraph(segments, values, len(stages))
    orders = SCHEDULES["1f1b"].order(graph, MICROBATCHES)
    programs = build_programs(
        graph, orders, MICROBATCHES, transfer_seconds=lambda a, b, n: float(n), optimizer=False
    )
    return simulate_ranks(programs, graph, links=Wires()).step_seconds


def unequal(seed: int) -> tuple[list[int], list[int]]:
    """2 to 7 stages of 60 to 120 s, cuts of up to 15 s each way."""
    dice = random.Random(seed)
    p = dice.randint(2, 7)
    return [dice.randint(60, 120) for _ in range(p)], [dice.randint(0, 15) for _ in range(p - 1)]


@pytest.mark.parametrize("seed", range(20))
def test_the_charge_is_the_least_over_all_ways_to_charge(seed: int) -> None:
    stages, cuts = unequal(seed)
    least = math.inf
    for sides in itertools.product((0, 1), repeat=len(cuts)):
        load = list(map(float, stages))
        for cut, side in enumerate(sides):
            load[cut + side] += 2 * cuts[cut]
        least = min(least, max(load))
    # the round trip of q is never above what is charged: sums of loads over the stages between
    assert surrogate(pipeline(stages, cuts)).bottleneck_seconds == least


def test_a_cut_between_slow_stages_is_charged_to_the_faster() -> None:
    assert surrogate(pipeline([100, 90], [8])).bottleneck_seconds == 106
    assert surrogate(pipeline([100, 80], [8])).bottleneck_seconds == 100
    assert surrogate(pipeline([100, 90, 100], [4, 4])).bottleneck_seconds == 106
    assert surrogate(pipeline([100, 90, 100], [6, 6])).bottleneck_seconds == 112


def test_where_stages_do_not_alternate_nothing_is_charged() -> None:
    free = replace(pipeline([100, 90], [8]), alternating=False)
    assert surrogate(free).bottleneck_seconds == 103  # the round trip over both, for two micro-batches held
    all_at_once = replace(pipeline([100, 90], [8]), in_flight=(1, MICROBATCHES))
    assert surrogate(all_at_once).bottleneck_seconds == 100


def test_the_surrogate_of_unequal_stages_is_close_to_the_simulation() -> None:
    # cuts take up to half as long as a stage; the order of a queue may change from one micro-batch to the next,
    # so what q says of it is no bound
    ratios: dict[bool, list[float]] = {True: [], False: []}
    for seed in range(40):
        case = unequal(seed)
        seconds = simulated_seconds(*case)
        for charged, ratio in ratios.items():
            split = surrogate(replace(pipeline(*case), alternating=charged))
            ratio.append(split.objective_seconds / seconds)
    error = {charged: statistics.mean(abs(r - 1) for r in ratio) for charged, ratio in ratios.items()}
    assert error[True] <= 0.03
    assert error[False] >= 1.3 * error[True]
    assert 0.92 <= min(ratios[True]) <= max(ratios[True]) <= 1.15
