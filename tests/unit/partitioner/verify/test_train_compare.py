"""The errors that a training run in the plan's own types may have."""

from __future__ import annotations

import pytest

from partitioner.verify.plain_loop import PlainStep
from partitioner.verify.train_compare import Expected

SPACING = 1e-7


def steps(*losses: float) -> list[PlainStep]:
    return [PlainStep(loss, 1.0, (0.1,)) for loss in losses]


def test_a_loss_that_is_right_by_chance_allows_no_less_than_the_others() -> None:
    expected = Expected(steps(0.5, 0.25), [], 0.1, steps(0.5 + 2e-7, 0.25), SPACING)
    first, second = (expected.number(lambda plain: plain.loss, step) for step in (1, 2))
    assert first[1] == pytest.approx(second[1])
    assert second == (0.25, pytest.approx(first[1]))
    assert second[1] > SPACING


def test_in_float64_a_loss_agrees_or_it_does_not() -> None:
    value, allowed = Expected(steps(0.5), [], 0.1).number(lambda plain: plain.loss, 1)
    assert (value, allowed) == (0.5, 1e-9)
