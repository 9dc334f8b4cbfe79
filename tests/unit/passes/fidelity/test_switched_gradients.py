"""Code in forward that decides what gets gradients is refused with its lines, and the way out that is named is one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from partitioner import ModelError
from partitioner.models.as_graph import as_graph


def by_method(module: nn.Module, trained: bool) -> None:
    module.requires_grad_(trained)


def by_attribute(module: nn.Module, trained: bool) -> None:
    for parameter in module.parameters():
        parameter.requires_grad = trained


class Adversarial(nn.Module):
    """The second layer learns from its second call alone. ``switch``: None for detached parameters instead."""

    def __init__(self, switch: Callable[[nn.Module, bool], None] | None) -> None:
        super().__init__()
        self.g, self.d = nn.Linear(6, 6), nn.Linear(6, 3)
        self.switch = switch

    def forward(self, x: Tensor) -> Tensor:
        made = torch.tanh(self.g(x))
        if self.switch is None:
            detached = {name: p.detach() for name, p in self.d.named_parameters()}
            judged = torch.func.functional_call(self.d, detached, made)
        else:
            self.switch(self.d, False)
            judged = self.d(made)
            self.switch(self.d, True)
        return torch.relu(judged) + self.d(made.detach())


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.frozen, self.inside, self.head = (
            nn.Linear(6, 6).requires_grad_(False),
            nn.Linear(6, 6),
            nn.Linear(6, 3),
        )
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.inside, self.frozen(x), use_reentrant=self.reentrant))  # type: ignore[no-any-return]


def traced(model: nn.Module) -> None:
    as_graph(model, example_inputs=torch.randn(8, 6), loss_fn=lambda y, x: F.mse_loss(y, x[:, :3]))


@pytest.mark.parametrize("switch", [by_method, by_attribute])
def test_switches_of_requires_grad_are_named(switch: Callable[[nn.Module, bool], None]) -> None:
    with pytest.raises(ModelError, match="computes something else than the model") as caught:
        traced(Adversarial(switch))
    lines = [line for line in caught.value.because if "forward sets requires_grad to" in line]
    assert all(line.startswith("test_switched_gradients.py:") for line in lines)
    assert len(lines) == 2
    assert "functional_call" in caught.value.suggestions[0]
    assert not any("verify" in way for way in caught.value.suggestions)
    traced(Adversarial(None))


def test_a_reentrant_checkpoint_is_named() -> None:
    with pytest.raises(ModelError) as caught:
        traced(Checkpointed(True))
    assert any(
        line.startswith("test_switched_gradients.py:") and "use_reentrant=True" in line
        for line in caught.value.because
    )
    assert caught.value.suggestions[0].startswith("use_reentrant=False")
    traced(Checkpointed(False))
