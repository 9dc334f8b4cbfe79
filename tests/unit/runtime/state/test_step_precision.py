"""The loss scale: what torch.amp.GradScaler does, decided on all ranks together."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cost_models.errors import CheckpointError
from runtime.state.step_precision import GROWTH_INTERVAL, INITIAL_SCALE, LARGEST, SMALLEST, LossScale

CPU = torch.device("cpu")


def parameters(*gradients: torch.Tensor | None) -> list[nn.Parameter]:
    made = []
    for gradient in gradients:
        parameter = nn.Parameter(torch.zeros(3 if gradient is None else gradient.shape))
        parameter.grad = gradient
        made.append(parameter)
    return made


def alone(flag: torch.Tensor) -> torch.Tensor:
    return flag


def test_gradients_are_divided_by_the_scale():
    scale, (first, none) = LossScale(1024.0), parameters(torch.tensor([1024.0, -2048.0]), None)
    assert not scale.unscale_or_drop([first, none], CPU, alone)
    assert torch.equal(first.grad, torch.tensor([1.0, -2.0]))
    assert none.grad is None


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_one_value_that_is_not_finite_drops_everything(value):
    scale, (good, bad) = LossScale(), parameters(torch.ones(3), torch.tensor([1.0, value]))
    assert scale.unscale_or_drop([good, bad], CPU, alone)
    assert good.grad is None
    assert bad.grad is None
    assert scale.scale == INITIAL_SCALE / 2


def test_another_rank_s_overflow_drops_these_too():
    scale, (good,) = LossScale(), parameters(torch.ones(3))
    asked = []

    def worse(flag: torch.Tensor) -> torch.Tensor:
        asked.append(float(flag))
        return torch.ones_like(flag)

    assert scale.unscale_or_drop([good], CPU, worse)
    assert asked == [0.0]
    assert good.grad is None


def test_a_rank_without_gradients_asks_the_others_all_the_same():
    asked = []
    LossScale().unscale_or_drop([], CPU, lambda flag: asked.append(float(flag)) or flag)
    assert asked == [0.0]


def test_the_optimizer_does_nothing_in_a_dropped_step():
    scale, (weight,) = LossScale(), parameters(torch.tensor([1.0, float("inf")]))
    optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.1)
    with torch.no_grad():
        weight.fill_(1.0)
    scale.unscale_or_drop([weight], CPU, alone)
    optimizer.step()
    assert torch.equal(weight.detach(), torch.ones(2))
    assert not optimizer.state


def test_sparse_complex_and_empty_gradients():
    sparse = torch.sparse_coo_tensor([[1, 1]], torch.tensor([[4.0], [4.0]]), (3, 1))
    scale, held = LossScale(4.0), parameters(sparse, torch.empty(0))
    held.append(nn.Parameter(torch.zeros(1, dtype=torch.complex64)))
    held[2].grad = torch.tensor([4 + 8j])
    assert not scale.unscale_or_drop(held, CPU, alone)
    assert held[0].grad.to_dense()[1] == 2.0
    assert held[2].grad == 1 + 2j
    held[2].grad = torch.tensor([complex(0, float("inf"))])
    assert scale.unscale_or_drop(held, CPU, alone)


def test_large_sums_are_no_overflow():
    scale, held = LossScale(1.0), parameters(torch.full((4,), 3e38))
    assert not scale.unscale_or_drop(held, CPU, alone)


def test_the_scale_grows_after_a_run_of_good_steps_as_torch_does_it():
    ours, torchs = LossScale(), torch.amp.GradScaler("cpu", init_scale=INITIAL_SCALE)
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    bad_at = {3, 4, 7}
    for step in range(GROWTH_INTERVAL + 20):
        gradient = torch.full((2,), float("inf") if step in bad_at else 1.0)
        torchs.scale(torch.ones(()))
        weight.grad = gradient.clone()
        torchs.step(optimizer)
        torchs.update()
        weight.grad = gradient.clone()
        ours.unscale_or_drop([weight], CPU, alone)
        assert ours.scale == torchs.get_scale(), step
    assert ours.scale == INITIAL_SCALE / 8 * 2


def test_the_scale_stays_a_power_of_two_within_bounds():
    scale = LossScale(SMALLEST)
    scale.unscale_or_drop(parameters(torch.tensor([float("nan")])), CPU, alone)
    assert scale.scale == SMALLEST
    scale = LossScale(LARGEST)
    scale.good_steps = GROWTH_INTERVAL - 1
    scale.unscale_or_drop([], CPU, alone)
    assert (scale.scale, scale.good_steps) == (LARGEST, 0)


def test_a_checkpoint_goes_on_where_it_was():
    scale = LossScale()
    scale.scale, scale.good_steps = 512.0, 77
    again = LossScale()
    again.load_state_dict(scale.state_dict())
    assert (again.scale, again.good_steps) == (512.0, 77)


@pytest.mark.parametrize("state", [{}, {"scale": 0.0, "good_steps": 1}, {"scale": "big", "good_steps": 1}])
def test_a_damaged_scale_is_refused(state):
    with pytest.raises(CheckpointError, match="loss scale"):
        LossScale().load_state_dict(state)
