"""A loss that reads the model reads the copy of it, wherever it holds it; one that does not stays itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from passes.copies.copied_module import copied_with

Loss = Callable[[Tensor], Tensor]


def decay(model: nn.Module, output: Tensor) -> Tensor:
    return output.sum() + sum(p.square().sum() for p in model.parameters())


class Method:
    def __init__(self, held: Any) -> None:
        self.held = held

    def loss(self, output: Tensor) -> Tensor:
        return decay(self.held["model"], output)

    __call__ = loss


def in_closure(model: nn.Module) -> Loss:
    def inner() -> nn.Module:
        return model

    return lambda output: decay(inner(), output)


def in_default(model: nn.Module) -> Loss:
    def loss(output: Tensor, *, weight: Tensor = model.weight) -> Tensor:  # type: ignore[assignment]
        return output.sum() + weight.square().sum()

    return loss


def in_globals(model: nn.Module) -> Loss:
    names: dict[str, Any] = {"model": model, "decay": decay}
    exec("def loss(output): return decay(model, output)", names)
    found: Loss = names["loss"]
    return found


WAYS: dict[str, Callable[[nn.Module], Loss]] = {
    "closure": in_closure,
    "default": in_default,
    "globals": in_globals,
    "partial": lambda model: functools.partial(decay, model),
    "method": lambda model: Method({"model": model}).loss,
    "object": lambda model: Method({"model": model}),
}


@pytest.mark.parametrize("way", WAYS)
def test_it_reads_the_copy(way: str) -> None:
    model = nn.Linear(3, 3)
    loss = WAYS[way](model)
    before = loss(torch.zeros(1)).item()
    copied, own = copied_with(model, loss)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
    assert own(torch.zeros(1)).item() == before
    assert loss(torch.zeros(1)).item() == 0.0
    own(torch.zeros(1)).backward()  # type: ignore[no-untyped-call]
    assert copied.weight.grad is not None
    assert model.weight.grad is None


def test_one_that_reads_no_model_stays_itself() -> None:
    loss = functools.partial(lambda scale, output: output.sum() * scale, 2.0)
    assert copied_with(nn.Linear(2, 2), loss)[1] is loss
    assert copied_with(nn.Linear(2, 2), None)[1] is None
