"""Parameters, gradients and optimizer state, compared with what torch.optim really allocates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from cost_models.errors import UsageError
from cost_models.memory import OPTIMIZERS, StateBytes, state_bytes

REAL: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters),
    "adamw": lambda parameters: torch.optim.AdamW(parameters),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", sorted(REAL))
def test_equals_what_torch_allocates(name, dtype):
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)).to(dtype)
    model[0].weight.requires_grad_(False)
    optimizer = REAL[name]([p for p in model.parameters() if p.requires_grad])
    model(torch.zeros(1, 3, dtype=dtype)).sum().backward()
    optimizer.step()
    kept = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    counted = state_bytes([(p.numel(), p.dtype, p.requires_grad) for p in model.parameters()], name)
    assert counted == StateBytes(
        parameters=sum(p.numel() * p.itemsize for p in model.parameters()),
        gradients=sum(p.grad.numel() * p.grad.itemsize for p in model.parameters() if p.grad is not None),
        optimizer_state=sum(t.numel() * t.itemsize for t in kept),
    )


def test_master_copies_only_when_asked_for_and_only_for_narrow_types():
    narrow, wide = [(100, torch.bfloat16, True)], [(100, torch.float32, True)]
    assert state_bytes(narrow, "adamw").optimizer_state == 2 * 200 + 4
    assert state_bytes(narrow, "adamw", master=True).optimizer_state == 400 + 2 * 400 + 4
    assert state_bytes(wide, "adamw", master=True) == state_bytes(wide, "adamw")


def test_mixed_precision_adam_is_the_familiar_16_bytes_per_parameter():
    n = 1_000_000
    total = state_bytes([(n, torch.bfloat16, True)], "adam", master=True).total
    assert total / n == pytest.approx(16, abs=1e-4)


def test_frozen_parameters_cost_their_own_bytes_only():
    assert state_bytes([(10, torch.float32, False)], "adam", master=True) == StateBytes(parameters=40)


def test_no_optimizer_keeps_gradients_but_no_state():
    assert state_bytes([(10, torch.bfloat16, True)], "none", master=True) == StateBytes(20, 20, 0)


def test_an_unknown_optimizer_is_refused_with_the_known_ones():
    with pytest.raises(UsageError) as error:
        state_bytes([], "lion")
    assert all(name in str(error.value) for name in OPTIMIZERS)


def test_states_add():
    assert StateBytes(1, 2, 3) + StateBytes(10, 20, 30) == StateBytes(11, 22, 33)
    assert StateBytes(1, 2, 3).total == 6
