"""Parameters, gradients and optimizer state, compared with what torch.optim really allocates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from cost_models.errors import UsageError
from cost_models.memory import OPTIMIZERS, StateBytes, state_bytes, update_bytes
from cost_models.precision import ParameterPrecision, Precision
from tests.support.alive import AliveBytes

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
    own = Precision(gradients=dtype)
    counted = state_bytes([(p.numel(), own.of(p.dtype), p.requires_grad) for p in model.parameters()], name)
    assert counted == StateBytes(
        parameters=sum(p.numel() * p.itemsize for p in model.parameters()),
        gradients=sum(p.grad.numel() * p.grad.itemsize for p in model.parameters() if p.grad is not None),
        optimizer_state=sum(t.numel() * t.itemsize for t in kept),
        trained=sum(p.numel() * p.itemsize for p in model.parameters() if p.requires_grad),
    )


def counted(
    elements: int, precision: Precision, own: torch.dtype, optimizer: str = "adamw", *, trains: bool = True
):
    return state_bytes([(elements, precision.of(own, trains=trains), trains)], optimizer)


def test_master_copies_only_when_asked_for_and_only_for_narrow_types():
    master = Precision(master=torch.float32)
    assert counted(100, Precision(), torch.bfloat16).optimizer_state == 2 * 200 + 4
    assert counted(100, Precision(), torch.bfloat16).owners == 0
    assert counted(100, master, torch.bfloat16).optimizer_state == 2 * 400 + 4
    assert counted(100, master, torch.bfloat16).owners == 400
    assert counted(100, master, torch.float32) == counted(100, Precision(), torch.float32)


@pytest.mark.parametrize(
    ("precision", "own", "expected"),
    [
        (Precision(), torch.float32, 4 + 4 + 8),
        (Precision(compute=torch.bfloat16), torch.float32, 2 + 4 + 4 + 8),
        (Precision(), torch.bfloat16, 2 + 4 + 4),  # sums of gradients are kept in 32 bits
        (Precision(gradients=torch.bfloat16), torch.bfloat16, 2 + 2 + 4),
        (Precision(master=torch.float32), torch.bfloat16, 2 + 4 + 4 + 8),
        (Precision(gradients=torch.bfloat16, master=torch.float32), torch.bfloat16, 2 + 4 + 4 + 8),
        (Precision(compute=torch.bfloat16), torch.float64, 2 + 8 + 8 + 16),
    ],
)
def test_bytes_per_parameter_under_adam(precision, own, expected):
    n = 1_000_000
    assert counted(n, precision, own).total / n == pytest.approx(expected, abs=1e-4)


def test_frozen_parameters_cost_their_own_bytes_only():
    master = Precision(master=torch.float32)
    assert counted(10, master, torch.float32, trains=False) == StateBytes(parameters=40)
    assert counted(10, master, torch.bfloat16, trains=False) == StateBytes(parameters=20)


def test_frozen_parameters_cast_for_compute_keep_their_stored_values_as_well():
    mixed = Precision(compute=torch.bfloat16)
    assert counted(10, mixed, torch.float32, trains=False) == StateBytes(parameters=20, owners=40)


def test_no_optimizer_keeps_gradients_but_no_state():
    found = counted(10, Precision(), torch.bfloat16, "none")
    assert (found.parameters, found.gradients, found.optimizer_state) == (20, 40, 0)


def test_casts_around_a_step_are_traffic_not_memory():
    master = counted(10, Precision(master=torch.float32), torch.bfloat16)
    assert master.cast == 40 + 20  # owners read, leaves written
    assert counted(10, Precision(), torch.bfloat16).cast == 40 + 20  # gradients read, written narrower
    assert counted(10, Precision(), torch.float32).cast == 0
    assert master.total == 20 + 40 + 40 + 84


def test_an_unknown_optimizer_is_refused_with_the_known_ones():
    with pytest.raises(UsageError) as error:
        state_bytes([], "lion")
    assert all(name in str(error.value) for name in OPTIMIZERS)


@pytest.mark.parametrize(
    ("optimizer", "copies"), [("sgd", 0), ("momentum", 0), ("adam", 1), ("amsgrad", 1), ("fused-adamw", 0)]
)
def test_what_an_optimizer_makes_while_it_steps(optimizer, copies):
    """On a GPU foreach is the default; here it is asked for."""
    parameters = [torch.nn.Parameter(torch.ones(1 << 16)) for _ in range(3)]
    kind = torch.optim.SGD if optimizer in ("sgd", "momentum") else torch.optim.AdamW
    options = {"momentum": {"momentum": 0.9}, "amsgrad": {"amsgrad": True}}.get(optimizer, {})
    fused = optimizer == "fused-adamw"
    step = kind(parameters, lr=0.1, foreach=not fused, fused=fused, **options)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    step.step()
    kept = [t for own in step.state.values() for t in own.values() if isinstance(t, torch.Tensor)]
    with AliveBytes([*parameters, *(p.grad for p in parameters), *kept]) as alive:
        before = alive.current_bytes
        step.step()
    precision = ParameterPrecision.plain(torch.float32)
    state = state_bytes([(p.numel(), precision, True) for p in parameters], optimizer)
    assert update_bytes(state, "cuda", optimizer) == copies * 3 * 4 * (1 << 16)
    assert alive.peak_bytes - before == pytest.approx(update_bytes(state, "cuda", optimizer), abs=1000)
    assert update_bytes(state, "cpu", optimizer) == 0


def test_states_add():
    assert StateBytes(1, 2, 3) + StateBytes(10, 20, 30) == StateBytes(11, 22, 33)
    assert StateBytes(1, 2, 3).total == 6
