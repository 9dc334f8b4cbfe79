"""The dynamic program, the integer program and exhaustive search agree."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from passes.search.layer.problem import (
    DevicePool,
    LayerProblem,
    LayerStructure,
    Recompute,
    StageSplit,
    Working,
    evaluate,
)
from passes.search.layer.search import device_overflow, solve_dp
from passes.search.layer.table import Geometry, StageTable
from passes.search.layer.together import together
from passes.search.touches import Touch
from tests.support.matrix import drawn
from tests.unit.passes.search.layer.ilp import solve_ilp
from tests.unit.passes.search.layer.samples import brute_force, monotone, random_problem, violations

problems = st.builds(
    random_problem,
    st.integers(0, 1 << 30),
    chain=st.booleans(),
    assignment=st.sampled_from(["unordered", "ordered", "sequence"]),
    tight=st.booleans(),
    pinned=st.booleans(),
    recompute=st.sampled_from(["none", "none", "auto", "auto", "full"]),
)


@drawn(250)
@given(problems)
def test_dp_equals_exhaustive_search(problem: LayerProblem) -> None:
    result, expected = solve_dp(problem, keep=4), brute_force(problem)
    assert result.optimal
    if expected is None:
        assert not result.pipelines
        assert math.isinf(result.bound_seconds)
        return
    assert result.pipelines[0].objective_seconds == pytest.approx(expected.objective_seconds, rel=1e-9)
    assert result.bound_seconds == pytest.approx(expected.objective_seconds, rel=1e-9)
    for split in result.pipelines:
        assert violations(problem, split) == []
    assert len({(s.stage_of, s.kinds) for s in result.pipelines}) == len(result.pipelines)


@drawn(100)
@given(problems)
def test_that_nothing_fits_below_the_cutoff_takes_one_program(problem: LayerProblem) -> None:
    free = replace(problem, pins={})
    if not solve_dp(free, keep=1).pipelines:
        assert solve_dp(free).thresholds <= 1
    cutoff = 0.5 * free.fill * float(free.seconds.min(axis=0).sum())
    assume(free.bottleneck_weight > 0)
    result = solve_dp(free, cutoff_seconds=cutoff)
    assert result.pipelines == ()
    assert result.optimal
    assert result.thresholds <= 1
    assert result.bound_seconds >= cutoff


@drawn(110)
@given(problems)
def test_ilp_equals_dp(problem: LayerProblem) -> None:
    dp, ilp = solve_dp(problem, keep=1), solve_ilp(problem, time_limit_seconds=20)
    if not dp.pipelines:
        assert ilp.status == "infeasible"
        return
    assert ilp.status == "optimal"
    assert ilp.split is not None
    assert violations(problem, ilp.split) == []
    assert ilp.split.objective_seconds == pytest.approx(dp.pipelines[0].objective_seconds, rel=1e-9)


@drawn(200)
@given(
    st.builds(
        random_problem,
        st.integers(0, 1 << 30),
        chain=st.booleans(),
        assignment=st.just("sequence"),
        tight=st.just(True),
        pinned=st.just(False),
        recompute=st.sampled_from(["none", "auto", "full"]),
    )
)
def test_no_split_whose_stages_fit_their_devices_together_is_below_their_bound(problem: LayerProblem) -> None:
    sequence = (1, 0, 0) if len(problem.kinds) > 1 else (0, 0)
    problem = replace(problem, chunks=2, alternating=False, sequence=sequence)
    least = min((split.objective_seconds for split in fitting_together(problem)), default=1e6)
    table = StageTable(problem, Geometry(problem.structure))
    bound, met = together(problem, table, 2 * least, math.inf)
    assert bound <= least * (1 + 1e-9) or least == 1e6
    assert all(
        split.objective_seconds >= least * (1 - 1e-9) or device_overflow(problem, split) > 0 for split in met
    )


def fitting_together(problem: LayerProblem) -> Iterator[StageSplit]:
    """Yield every split whose stages fit the devices of the sequence, whichever compute their blocks again."""
    first, n = problem.stage_counts[0], problem.structure.units
    for p in range(first, problem.max_stages + 1):
        kinds, recompute = problem.sequence[-p:], problem.recompute
        ways = [(False,) * p] if recompute is None else list(product((False, True), repeat=p))
        for stage_of in monotone(problem, n, p):
            for again in [(True,) * p] if recompute is not None and recompute.always else ways:
                split = evaluate(problem, stage_of, kinds, again)
                if device_overflow(problem, split) <= 0:
                    yield split


def test_a_price_proves_that_a_bottleneck_is_too_short_for_what_fits() -> None:
    """Two stages of one device: each fits alone, whatever the cut; together only where the second runs again."""
    structure = LayerStructure(
        2, ((0, 1),), (Touch((0,)), Touch((1,))), recomputed=(Touch((0,)), Touch((1,)))
    )
    problem = LayerProblem(
        structure=structure,
        seconds=np.array([[1.0, 1.0]]),
        storage_bytes=np.array([6.0, 6.0]),
        state_bytes=np.zeros(0),
        forward_bytes=np.zeros(0),
        gradient_bytes=np.zeros(0),
        working=Working.none(2),
        kinds=(DevicePool("one", 0, 10.0),),
        link_latency_seconds=np.zeros((1, 1)),
        link_seconds_per_byte=np.zeros((1, 1)),
        in_flight=(1, 1),
        microbatches=8,
        fill=0.5,
        chunks=2,
        assignment="sequence",
        sequence=(0, 0),
        stage_counts=(2, 2),
        recompute=Recompute(np.array([[0.5, 0.5]]), np.array([1.0, 1.0]), Working.none(2)),
    )
    alone = solve_dp(problem)
    assert alone.bound_seconds == pytest.approx(0.5 * 2 + 15 * 1.0)
    bound, _ = together(problem, StageTable(problem, Geometry(structure)), 100.0, math.inf)
    best = min(split.objective_seconds for split in fitting_together(problem))
    assert best == pytest.approx(0.5 * 2.5 + 15 * 1.5)
    assert best * 0.99 <= bound <= best
