"""A forward that asks for gradients is refused at the line that asks, and only while a model is traced."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import nn

from passes.trace.opaque.mark import ACTIVE
from passes.trace.opaque.refused import PartError, refuse_inner_gradients
from runtime.ops.opaque_code import LOSS


class Asking(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(x.sum(), x)[0]


@pytest.fixture
def tracing() -> Iterator[None]:
    with mock.patch.object(ACTIVE, "cross", mock.Mock()):
        yield


def test_the_module_that_asks_is_named(tracing: None) -> None:
    model = nn.Sequential(nn.Identity(), Asking())
    with (
        pytest.raises(PartError, match="forward asks for gradients itself") as caught,
        refuse_inner_gradients(model),
    ):
        model(torch.ones(2, requires_grad=True))
    assert caught.value.modules == ("1",)
    assert "test_own_backwards.py:" in caught.value.because[0]


def test_outside_of_modules_the_loss_is_blamed(tracing: None) -> None:
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(PartError) as caught, refuse_inner_gradients(nn.Identity()):
        torch.autograd.grad(x.sum(), x)
    assert caught.value.modules == (LOSS,)


def test_what_runs_outside_of_the_trace_may_ask() -> None:
    with refuse_inner_gradients(nn.Identity()):
        assert Asking()(torch.ones(2, requires_grad=True)).tolist() == [1.0, 1.0]
