"""The dynamic program over cuts, and the search over bottlenecks around it, against every way to cut."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest

from cost_models.arrays import FloatArray
from passes.search.bisect import Bisection
from passes.search.hybrid.options import GroupOption
from passes.search.hybrid.pools import Pool, Run
from passes.search.hybrid.program import Pipeline, PipelineProgram, least_sum
from tests.support.matrix import thinned


def random_program(seed: int) -> PipelineProgram:
    draw = random.Random(seed)
    chunks = draw.choice([1, 1, 2])
    groups = draw.choice([2, 3]) if chunks > 1 else draw.choice([1, 2, 3, 4])
    schedule = "interleaved" if chunks > 1 else draw.choice(["1f1b", "gpipe"])
    m = groups * draw.choice([1, 2, 4]) if chunks > 1 else draw.choice([1, 2, 3, 8])
    runs = (Run(Pool(tuple(range(0, 2 * groups, 2)), 2, 0), 2, 1, groups),)
    option = GroupOption(runs, 2, m, schedule, chunks)
    pieces = option.stages + draw.choice([0, 1, 2, 3])
    work = [draw.choice([0.5, 1.0, 1.0, 2.0, draw.random()]) for _ in range(pieces)]

    def plane(k: int) -> FloatArray:
        found = np.full((pieces + 1, pieces + 1), np.inf)
        for a, b in itertools.combinations(range(pieces + 1), 2):
            if draw.random() < 0.85:  # the others do not fit
                found[a, b] = sum(work[a:b]) * draw.choice([1.0, 1.0, 1.3]) * (1 + 0.1 * k)
        return found

    planes = [plane(k) for k in range(option.stages)]
    links = [np.array([draw.choice([0.0, 0.1, 0.7]) for _ in range(pieces + 1)]) for _ in planes]
    return PipelineProgram(option, planes, links)


def every_pipeline(program: PipelineProgram) -> list[Pipeline]:
    count = program.option.stages
    cuts = itertools.combinations(range(1, program.pieces), count - 1)
    found = [program.valued([0, *cut]) for cut in cuts if fits(program, [0, *cut])]
    return sorted(found, key=lambda pipeline: pipeline.objective_seconds)


def fits(program: PipelineProgram, starts: Sequence[int]) -> bool:
    ends = [*starts[1:], program.pieces]
    stages = zip(program.seconds[::-1], starts, ends, strict=True)
    return all(np.isfinite(plane[a, b]) for plane, a, b in stages)


def solved(program: PipelineProgram) -> Bisection[Pipeline]:
    return Bisection(program, keep=1, relative_gap=1e-10)


@pytest.mark.parametrize("seeds", thinned([range(0, 60), range(60, 500)], [range(0, 60)]), ids=str)
def test_no_way_to_cut_is_better(seeds: range) -> None:
    feasible = 0
    for seed in seeds:
        program = random_program(seed)
        expected = every_pipeline(program)
        found = solved(program).run()
        if not expected:
            assert not found.pipelines
            continue
        feasible += 1
        best = expected[0].objective_seconds
        assert found.pipelines[0].objective_seconds == pytest.approx(best, rel=1e-9)
        assert found.bound_seconds <= best * (1 + 1e-9)
        assert found.bound_seconds >= best * (1 - 1e-9)
    assert feasible > len(seeds) // 3


def test_a_program_over_less_bounds_it() -> None:
    for seed in range(40):
        program = random_program(seed)
        least = np.minimum.reduce(program.seconds)
        below = PipelineProgram(program.option, [least * 0.9] * program.option.stages, program.links)
        expected = every_pipeline(program)
        if expected:
            assert solved(below).run().bound_seconds <= expected[0].objective_seconds


def test_the_least_sum_is_over_exactly_so_many_stages_and_the_cuts_between() -> None:
    for seed in range(40):
        program = random_program(seed)
        count, ends = program.option.stages, range(1, program.pieces)
        sums = []
        for cut in itertools.combinations(ends, count - 1):
            starts = [0, *cut]
            stages = zip(program.seconds[::-1], starts, [*cut, program.pieces], strict=True)
            cuts = zip(program.links[:0:-1], cut, strict=True)
            sums.append(sum(float(plane[a, b]) for plane, a, b in stages) + sum(float(x[b]) for x, b in cuts))
        assert least_sum(program.seconds, program.links) == pytest.approx(min(sums))


def test_the_bound_at_once_is_below_every_pipeline() -> None:
    for seed in range(200):
        program = random_program(seed)
        if expected := every_pipeline(program):
            assert program.quick_seconds() <= expected[0].objective_seconds * (1 + 1e-9)
