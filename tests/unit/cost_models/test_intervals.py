"""Student's t against tables and closed forms, and the intervals and chances that follow from it."""

from __future__ import annotations

import math

import pytest

from cost_models.intervals import KINDS, RATES, Spread, student_cdf, student_quantile
from cost_models.spreads import PEAK_BYTES, STEP_SECONDS

CLOSED = {
    1: lambda t: 0.5 + math.atan(t) / math.pi,
    2: lambda t: 0.5 + t / (2 * math.sqrt(2 + t * t)),
    3: lambda t: 0.5 + (t / math.sqrt(3) / (1 + t * t / 3) + math.atan(t / math.sqrt(3))) / math.pi,
    4: lambda t: 0.5 + 3 / 8 * (t / math.sqrt(1 + t * t / 4)) * (1 - (t * t / (1 + t * t / 4)) / 12),
}


@pytest.mark.parametrize("freedom", CLOSED)
@pytest.mark.parametrize("t", [-50.0, -2.5, -0.1, 0.0, 0.7, 3.0, 1e6])
def test_the_distribution_is_as_in_closed_form(freedom: int, t: float) -> None:
    assert student_cdf(t, freedom) == pytest.approx(CLOSED[freedom](t), abs=1e-12)


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [
        (1, 6.313752),
        (2, 2.919986),
        (3, 2.353363),
        (5, 2.015048),
        (9, 1.833113),
        (30, 1.697261),
        (100, 1.660234),
    ],
)
def test_quantiles_are_as_in_the_tables(freedom: float, quantile: float) -> None:
    assert student_quantile(0.95, freedom) == pytest.approx(quantile, abs=1e-6)
    assert student_quantile(0.05, freedom) == pytest.approx(-quantile, abs=1e-6)


def test_with_many_degrees_of_freedom_it_is_the_normal_distribution() -> None:
    assert student_quantile(0.975, 1e6) == pytest.approx(1.959966, abs=1e-5)


@pytest.mark.parametrize("freedom", [0.5, math.nan])
def test_too_few_degrees_of_freedom_are_refused(freedom: float) -> None:
    with pytest.raises(ValueError, match="1 degree of freedom or more"):
        student_cdf(1.0, freedom)


@pytest.mark.parametrize("probability", [0.0, 1.0, math.nan])
def test_a_probability_without_a_quantile_is_refused(probability: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        student_quantile(probability, 3)


def test_an_interval_leaves_out_as_many_runs_above_as_below() -> None:
    spread = Spread(center=0.1, scale=0.05, freedom=5, runs=12, sources=3)
    low, high = spread.interval(200.0)
    assert math.log(high / 200) == pytest.approx(0.1 + 2.015048 * 0.05, abs=1e-6)
    assert low * high == pytest.approx((200 * math.exp(0.1)) ** 2)
    assert spread.chance_above(200.0, high) == pytest.approx(0.05)
    assert spread.chance_above(200.0, low) == pytest.approx(0.95)
    assert spread.chance_above(200.0, 200.0 * math.exp(0.1)) == pytest.approx(0.5)
    assert spread.interval(200.0, 0.5)[1] < high


def test_nothing_fits_everywhere() -> None:
    spread = PEAK_BYTES["cuda"]
    assert (spread.chance_above(0, 5), spread.chance_above(5, 0)) == (0.0, 1.0)


def test_every_kind_of_plan_has_a_spread() -> None:
    assert set(STEP_SECONDS) == {(kind, rates) for kind in KINDS for rates in RATES}
    assert all(
        spread.scale > 0 and spread.freedom >= 1 for spread in [*STEP_SECONDS.values(), *PEAK_BYTES.values()]
    )
