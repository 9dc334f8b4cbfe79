"""The errors that a training run in the plan's own types may have."""

from __future__ import annotations

import pytest
import torch

from partitioner.verify.train_compare import ExpectedRun, compare_run
from partitioner.verify.train_rank import RankRun, RankTensor
from passes.fidelity.agree import StepResult

SPACING = 1e-7


def steps(*losses: float) -> list[StepResult]:
    return [StepResult(loss, {}, {}) for loss in losses]


def test_a_loss_that_is_right_by_chance_allows_no_less_than_the_others() -> None:
    expected = ExpectedRun(steps(0.5, 0.25), [], steps(0.5 + 2e-7, 0.25), SPACING)
    first, second = (expected.number(lambda plain: plain.loss or 0.0, step) for step in (1, 2))
    assert first[1] == pytest.approx(second[1])
    assert second == (0.25, pytest.approx(first[1]))
    assert second[1] > SPACING


def test_in_float64_a_loss_agrees_or_it_does_not() -> None:
    value, allowed = ExpectedRun(steps(0.5), []).number(lambda plain: plain.loss or 0.0, 1)
    assert (value, allowed) == (0.5, 1e-9)


def shown(buffer: list[float]) -> RankRun:
    """One step of one rank, which holds a buffer at the end."""
    held = RankTensor("buffer", "mask", "", None, torch.tensor(buffer))
    step = StepResult(0.5, {}, {}, norm=1.0, rates=(0.1,))
    return RankRun(0, (step,), ((7,),), (), None, (held,), (), ())


def test_an_infinity_that_both_sides_have_agrees_and_no_other() -> None:
    """A causal mask of minus infinity is a buffer like others."""
    inf = float("inf")
    plain = StepResult(0.5, {}, {}, {"mask": torch.tensor([-inf, 0.0])}, norm=1.0, rates=(0.1,))
    expected = ExpectedRun([plain], [(7,)])
    assert all(c.agrees for c in compare_run("float64", [shown([-inf, 0.0])], expected, first=1))
    for other in ([inf, 0.0], [-inf, 1e-8], [0.0, 0.0]):
        (wrong,) = (c for c in compare_run("float64", [shown(other)], expected, first=1) if not c.agrees)
        assert str(wrong).startswith("float64, step 1, buffer mask on rank 0: off by ")
