"""The fit of intervals: against numbers by hand, against errors whose distribution is known, and the files made of it."""

from __future__ import annotations

import math
import random
import statistics
from pathlib import Path

import pytest

from benchmarks.intervals import (
    PAGE,
    TABLE,
    Error,
    fit,
    left_out,
    log_density,
    memory_errors,
    publisher,
    step_errors,
    table_text,
    written_page,
)
from benchmarks.residuals import Residual, read_residuals, replace_residuals, write_residuals
from cost_models.intervals import Spread

A, B, NONE = ("a",), ("b",), ("c",)


def test_the_table_and_the_page_are_those_of_the_residuals() -> None:
    rows = read_residuals()
    assert TABLE.read_text() == table_text(rows), "python -m benchmarks.intervals"
    assert PAGE.read_text() == written_page(PAGE.read_text(), rows), "python -m benchmarks.intervals"


def test_a_fit_is_as_by_hand() -> None:
    """Kind a has source means 0.1 and 0.3, kind b 0 and 0.4: the whole is at 0.2, its kinds are not apart.

    a: mean squares around 0.2 are 0.01 (0.2 and 0.0) + 0.01, and 0.01: mean (0.02 + 0.01) / 2 = 0.015, variance 0.03.
    b: 0.04 and 0.04, variance 0.08. V = sqrt(0.03 * 0.08).
    """
    errors = [
        Error("1", A, 0.2),
        Error("1", A, 0.0),
        Error("2", A, 0.3),
        Error("3", B, 0.0),
        Error("4", B, 0.4),
    ]
    spreads = fit(errors, [A, B, NONE], prior=1.0)
    within = math.sqrt(0.03 * 0.08)
    assert [spread.center for spread in spreads.values()] == pytest.approx([0.2, 0.2, 0.2])
    assert spreads[A].scale ** 2 == pytest.approx((2 * 0.015 + within) / 3 * (1 + 1 / 4))
    assert spreads[B].scale ** 2 == pytest.approx((2 * 0.04 + within) / 3 * (1 + 1 / 4))
    assert spreads[NONE].scale ** 2 == pytest.approx(within * (1 + 1 / 2))
    assert [(s.freedom, s.runs, s.sources) for s in spreads.values()] == [(3, 3, 2), (3, 2, 2), (1, 0, 0)]


def test_rows_more_of_a_source_do_not_make_it_count_more() -> None:
    few = [Error("1", A, 0.1), Error("2", A, 0.3), Error("3", B, 0.0), Error("4", B, 0.1)]
    many = [*few, *[Error("1", A, 0.1)] * 50]
    assert fit(few, [A])[A].center == pytest.approx(fit(many, [A])[A].center)
    assert fit(few, [A])[A].scale == pytest.approx(fit(many, [A])[A].scale)


def test_a_kind_of_few_sources_is_drawn_to_the_whole() -> None:
    """An own mean of 0.6 beside kinds at 0: with one source half the way, with nine a tenth."""
    others = [Error(f"{kind}{i}", (kind,), x) for kind in "xyz" for i, x in enumerate((-0.1, 0.1))]
    own = [Error(f"a{i}", A, x) for i, x in enumerate((0.6, 0.5, 0.7) * 3)]
    centers = [fit([*others, *own[:count]], [A])[A].center for count in (1, 9)]
    assert centers == pytest.approx([(0.6 + 0.15) / 2, (9 * 0.6 + 0.15) / 10])


def drawn(seed: int, factor: float = 1.0) -> list[Error]:
    """Draw errors of three kinds with centers and spreads of their own; sources differ, rows of a source somewhat."""
    draw = random.Random(seed)
    errors = []
    for number, (center, between, within) in enumerate(
        [(0.0, 0.05, 0.05), (0.1, 0.1, 0.05), (0.2, 0.1, 0.1)]
    ):
        for source in range(6):
            shift = draw.gauss(center, factor * between)
            errors += [
                Error(f"{number}-{source}", (str(number),), shift + draw.gauss(0, factor * within))
                for _ in range(4)
            ]
    return errors


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_intervals_hold_what_they_should_of_sources_left_out(share: float) -> None:
    """60 sets of 18 sources of 4 rows: the mean coverage is known to about a hundredth."""
    groups = [group for seed in range(60) for group in left_out(drawn(seed), share=share)]
    coverage = statistics.fmean(group.inside / group.rows for group in groups)
    assert share - 0.03 < coverage < share + 0.05


def test_coverage_counts_the_rows_inside() -> None:
    """A source far off all others is outside, and does not widen the interval that it is held against."""
    errors = [*drawn(1), *(Error("far", ("0",), 3.0) for _ in range(5)), Error("far", ("0",), 0.0)]
    (far,) = [group for group in left_out(errors) if group.name == "far"]
    assert (far.rows, far.inside) == (6, 1)
    assert far.density < statistics.fmean(group.density for group in left_out(drawn(1)))


def test_whole_publishers_are_left_out_together() -> None:
    errors = [
        Error(f"{who}, {card}", A, x) for who, x in (("p", 0.5), ("q", 0.0), ("r", 0.1)) for card in "ab"
    ]
    errors += [Error("s, a", B, 0.1), Error("s, b", B, 0.2)]
    assert [(group.name, group.rows) for group in left_out(errors, publisher)] == [(n, 2) for n in "pqrs"]


def test_the_density_integrates_to_one() -> None:
    spread = Spread(0.3, 0.2, 4, 1, 1)
    total = sum(math.exp(log_density(spread, 0.3 + 0.001 * i)) * 0.001 for i in range(-20_000, 20_000))
    assert total == pytest.approx(1.0, abs=1e-4)


def row(
    benchmark: str, plan: str, step: float | None, memory: float | None, rates: str = "presets"
) -> Residual:
    return Residual(benchmark, "s, x", plan, "pipeline", rates, "cuda", step, memory)


def test_a_benchmark_replaces_its_own_rows(tmp_path: Path) -> None:
    path = tmp_path / "residuals.csv"
    write_residuals([row("a", "1", 1.1, None), row("b", "2", 0.9, 1.2)], path)
    replace_residuals("a", [row("a", "3", None, 1.25)], path)
    assert read_residuals(path) == [row("a", "3", None, 1.25), row("b", "2", 0.9, 1.2)]


def test_what_was_not_measured_is_no_error() -> None:
    rows = [row("a", "1", None, 1.5), row("a", "2", 2.0, None), row("a", "3", 2.0, None, rates="")]
    assert step_errors(rows) == [Error("s, x", ("pipeline", "presets"), math.log(2.0))]
    assert memory_errors(rows) == [Error("s, x", ("cuda",), math.log(1.5))]
