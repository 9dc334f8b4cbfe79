from __future__ import annotations

import torch

from passes.fidelity.agree import StepResult, compare


def step(gradient: torch.Tensor, loss: float | None = 1.0) -> StepResult:
    return StepResult(
        loss,
        {"w": gradient, "big": torch.full((4,), 1e3, dtype=torch.float64)},
        {"w": torch.ones(4, dtype=torch.float64)},
    )


def worst(a: StepResult, b: StepResult) -> dict[str, bool]:
    return {f"{c.kind} {c.name}": c.agrees for c in compare(a, b, learning_rate=0.1)}


def test_equal_steps_agree() -> None:
    assert all(
        worst(step(torch.ones(4, dtype=torch.float64)), step(torch.ones(4, dtype=torch.float64))).values()
    )


def test_a_relative_error_above_1e_9_differs() -> None:
    assert not worst(
        step(torch.ones(4, dtype=torch.float64)), step(torch.ones(4, dtype=torch.float64) * (1 + 3e-9))
    )["gradient w"]
    assert worst(
        step(torch.ones(4, dtype=torch.float64)), step(torch.ones(4, dtype=torch.float64) * (1 + 1e-10))
    )["gradient w"]


def test_a_gradient_that_is_zero_but_for_rounding_is_compared_with_the_whole() -> None:
    assert worst(step(torch.full((4,), 1e-16)), step(torch.full((4,), -1e-16)))["gradient w"]


def test_nan_missing_and_reshaped_differ() -> None:
    assert not worst(step(torch.ones(4, dtype=torch.float64)), step(torch.full((4,), float("nan"))))[
        "gradient w"
    ]
    assert not worst(step(torch.ones(4, dtype=torch.float64)), step(torch.ones(2, 2, dtype=torch.float64)))[
        "gradient w"
    ]
    missing = StepResult(
        1.0, {"big": torch.full((4,), 1e3, dtype=torch.float64)}, {"w": torch.ones(4, dtype=torch.float64)}
    )
    assert not worst(step(torch.ones(4, dtype=torch.float64)), missing)["gradient w"]
    assert not worst(
        step(torch.ones(4, dtype=torch.float64), loss=float("nan")), step(torch.ones(4, dtype=torch.float64))
    )["loss loss"]


def test_what_is_no_number_agrees_with_itself_in_its_place() -> None:
    odd = torch.tensor([1.0, float("nan"), float("inf"), -float("inf")], dtype=torch.float64)
    nan, inf = float("nan"), float("inf")
    assert all(worst(step(odd, loss=nan), step(odd.clone(), loss=nan)).values())
    assert all(worst(step(odd, loss=inf), step(odd, loss=inf)).values())
    assert not worst(step(odd), step(odd.flip(0)))["gradient w"]
    assert not worst(step(odd), step(odd.nan_to_num()))["gradient w"]
    assert not worst(step(odd), step(odd * torch.tensor([1 + 1e-8, 1, 1, 1], dtype=torch.float64)))[
        "gradient w"
    ]
    for other in (inf, -inf, 1.0, None):
        assert not worst(step(odd, loss=nan), step(odd, loss=other))["loss loss"]
    assert not worst(step(odd, loss=inf), step(odd, loss=-inf))["loss loss"]
