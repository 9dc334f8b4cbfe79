"""Differences below rounding of the model's types, and those that another batch shows: float64 and a second batch tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partitioner import ModelError
from partitioner.models.as_graph import as_graph
from passes.fidelity import check
from passes.fidelity.agree import StepResult
from passes.fidelity.check import check_fidelity
from passes.fidelity.steps import EagerSubject, eager_step
from passes.trace.trace import trace


class Model(nn.Module):
    """Two layers around what a test computes between them, and attributes that it may change."""

    def __init__(self, middle: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)
        self.middle = middle
        self.steps = 0
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.middle(self, self.a(x)).tanh())  # type: ignore[no-any-return]


def squared(output: Tensor, batch: object) -> Tensor:
    return output.square().mean()


def annealed(m: Any, h: Tensor) -> Tensor:
    m.steps += 1
    return h * (1 + min(1.0, m.steps / 200_000))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_slow_counter_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ModelError, match="steps: 0 -> 1"):
        as_graph(Model(annealed).to(dtype), example_inputs=torch.randn(8, 6, dtype=dtype), loss_fn=squared)


def test_a_counter_that_changes_nothing_is_let_through_in_16_bits() -> None:
    def counted(m: Any, h: Tensor) -> Tensor:
        m.steps += 1
        return h * 2

    model, x = Model(counted).bfloat16(), torch.randn(8, 6, dtype=torch.bfloat16)
    assert any("steps: 0 -> 1" in note for note in as_graph(model, example_inputs=x, loss_fn=squared).notes)
    assert model.a.weight.dtype == torch.bfloat16


def test_a_trace_that_is_two_percent_off_is_refused_in_16_bits() -> None:
    model, x = Model(lambda m, h: h).bfloat16(), torch.randn(8, 6, dtype=torch.bfloat16)
    graph = trace(model, x, loss_fn=lambda output, batch: output.square().mean() * 1.02)
    with pytest.raises(ModelError, match="computes something else"):
        check_fidelity(graph, model, x, squared)


def test_a_model_that_writes_to_its_batch_is_let_through() -> None:
    class InPlace(Model):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(2))

    x = torch.randn(8, 6)
    before = x.clone()
    assert as_graph(InPlace(lambda m, h: h), example_inputs=x, loss_fn=squared).notes == ()
    assert torch.equal(x, before)


def test_an_attribute_made_of_the_first_batch_is_refused() -> None:
    def masked(m: Any, h: Tensor) -> Tensor:
        if m.kept is None:
            m.kept = h.detach().abs().mean()
        return h * m.kept

    model = Model(masked)
    with pytest.raises(ModelError, match="kept: None -> tensor"):
        as_graph(model, example_inputs=torch.randn(8, 6), loss_fn=squared)
    assert model.kept is None


@pytest.mark.parametrize(
    ("most_seconds", "steps", "said"), [(0.0, 1, "a later one was not tried"), (1e9, 3, "in 16 bits alone")]
)
def test_a_slow_model_runs_few_steps_and_the_plan_says_what_was_not_tried(
    most_seconds: float, steps: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step where it is slow; none in float64 where that would be."""
    ran: list[torch.dtype] = []

    def step(subject: EagerSubject) -> StepResult:
        ran.append(next(subject.model.parameters()).dtype)
        return eager_step(subject)

    monkeypatch.setattr(check, "eager_step", step)
    monkeypatch.setattr(check, "MOST_SECONDS", most_seconds)
    monkeypatch.setattr(check, "WIDER", 1e18)
    model, x = Model(annealed).bfloat16(), torch.randn(8, 6, dtype=torch.bfloat16)
    notes = check_fidelity(trace(model, x, loss_fn=squared), model, x, squared).notes
    assert ran == [torch.bfloat16] * steps
    assert any(said in note for note in notes)
    off = trace(model, x, loss_fn=lambda output, batch: output.square().mean() * 1.2)
    with pytest.raises(ModelError, match="computes something else"):
        check_fidelity(off, model, x, squared)
