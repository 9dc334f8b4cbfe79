"""Differences that are rounding of the model itself are told from those that are not."""

from __future__ import annotations

import torch

from partitioner.verify.rounding import RoundedOnceMore, allowed_by_rounding, rounding_only
from passes.fidelity.agree import StepResult, compare

RATE = 1e-3


def step(gradient: float, moved: float) -> StepResult:
    """A bias whose gradient is rounding, beside a weight that has one."""
    big = torch.full((4,), 1e3, dtype=torch.float64)
    bias = {"bias": torch.full((4,), gradient, dtype=torch.float64), "weight": big}
    return StepResult(1.0, bias, {"bias": torch.full((4,), moved, dtype=torch.float64), "weight": big})


def left_out(expected: StepResult, actual: StepResult, again: StepResult) -> set[str]:
    found = [c for c in compare(expected, actual, RATE) if not c.agrees]
    assert found
    return {f"{c.kind} {c.name}" for c in rounding_only(found, expected, lambda: again, RATE)}


def test_what_another_order_changes_as_much_is_rounding() -> None:
    assert left_out(step(1e-12, 1e-8), step(-9e-12, -1e-8), step(5e-12, -2e-8)) == {
        "gradient bias",
        "parameter bias",
    }


def test_what_another_order_does_not_change_is_a_difference() -> None:
    assert left_out(step(1e-13, 1e-8), step(1e-5, -1e-3), step(5e-13, -2e-8)) == set()


def test_a_parameter_whose_small_gradient_agrees_may_differ_by_rounding() -> None:
    assert left_out(step(1e-3, 1e-8), step(1e-3, 3e-8), step(1e-3, -1e-8)) == {"parameter bias"}
    assert left_out(step(1e-3, 1e-8), step(1e-3, 3e-6), step(1e-3, 2e-8)) == set()


def test_a_tensor_with_a_gradient_is_never_rounding() -> None:
    assert left_out(step(1.0, 1e-8), step(1.1, 1e-8), step(1.1, 1e-8)) == set()


def test_another_order_explains_nothing_where_the_loss_depends_on_it() -> None:
    again = step(5e-12, -2e-8)
    other = StepResult(1.5, again.gradients, again.parameters)
    assert left_out(step(1e-12, 1e-8), step(-9e-12, -1e-8), other) == set()


def test_rounding_once_more_moves_what_is_computed_and_nothing_exact() -> None:
    x = torch.linspace(0.1, 0.9, 64).requires_grad_()
    positions, mask = torch.arange(64.0), x.detach() > 0.5

    def computed() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y = torch.tanh(x) * x
        (gradient,) = torch.autograd.grad(y.sum(), x)
        return y.detach(), gradient, positions * mask

    plain = computed()
    with RoundedOnceMore(0):
        moved = computed()
    eps = torch.finfo(torch.float32).eps
    for number in range(2):
        off = (moved[number] - plain[number]).abs()
        assert 0 < float((off / plain[number].abs()).max()) < 8 * eps
    assert torch.equal(moved[2], plain[2])


def test_own_types_allow_what_rounding_does_and_no_more() -> None:
    expected = step(0.5, 0.1)
    rounded = [step(0.5, 0.1 + 1e-7), step(0.5, 0.1 - 3e-7)]
    eps = torch.finfo(torch.float32).eps

    def differs(moved: float) -> set[str]:
        found = compare(expected, step(0.5, moved), RATE, tolerance=eps)
        allowed = allowed_by_rounding(found, expected, rounded, RATE)
        return {f"{c.kind} {c.name}" for c in allowed if not c.agrees}

    assert differs(0.1 + 40e-7) == set()
    assert differs(0.1 + 60e-7) == {"parameter bias"}
