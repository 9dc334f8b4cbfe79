"""The dynamic program, the integer program and exhaustive search agree."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from passes.search.layer.dp import solve_dp
from passes.search.layer.problem import LayerProblem
from tests.support.matrix import drawn
from tests.unit.passes.search.layer.ilp import solve_ilp
from tests.unit.passes.search.layer.samples import brute_force, random_problem, violations

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
        assert not result.splits
        assert math.isinf(result.bound_seconds)
        return
    assert result.splits[0].objective_seconds == pytest.approx(expected.objective_seconds, rel=1e-9)
    assert result.bound_seconds == pytest.approx(expected.objective_seconds, rel=1e-9)
    for split in result.splits:
        assert violations(problem, split) == []
    assert len({(s.stage_of, s.kinds) for s in result.splits}) == len(result.splits)


@drawn(100)
@given(problems)
def test_that_nothing_fits_below_the_cutoff_takes_one_program(problem: LayerProblem) -> None:
    free = replace(problem, pins={})
    if not solve_dp(free, keep=1).splits:
        assert solve_dp(free).thresholds <= 1
    cutoff = 0.5 * free.fill * float(free.seconds.min(axis=0).sum())
    assume(free.bottleneck_weight > 0)
    result = solve_dp(free, cutoff_seconds=cutoff)
    assert result.splits == ()
    assert result.optimal
    assert result.thresholds <= 1
    assert result.bound_seconds >= cutoff


@drawn(110)
@given(problems)
def test_ilp_equals_dp(problem: LayerProblem) -> None:
    dp, ilp = solve_dp(problem, keep=1), solve_ilp(problem, time_limit_seconds=20)
    if not dp.splits:
        assert ilp.status == "infeasible"
        return
    assert ilp.status == "optimal"
    assert ilp.split is not None
    assert violations(problem, ilp.split) == []
    assert ilp.split.objective_seconds == pytest.approx(dp.splits[0].objective_seconds, rel=1e-9)
