"""The tensors that hooks on parameters read are found in their code, whichever way the code names them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cost_models.errors import ModelError
from passes.trace.hook_reads import reads_own, refuse_hooks_that_read_others


class Net(nn.Module):
    """A model whose ``first.weight`` has the hook."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.blocks = nn.Sequential(nn.Linear(2, 2))
        self.register_buffer("mask", torch.ones(2, 2))

    def decay(self, gradient: Tensor) -> Tensor:
        return gradient + self.first.weight

    def decay_by_another(self, gradient: Tensor) -> Tensor:
        return self.decay(gradient) + self.blocks[0].weight

    def masked(self, gradient: Tensor) -> Tensor:
        return gradient * self.mask


class Adds:
    """An object that is called."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __call__(self, gradient: Tensor) -> Tensor:
        return gradient + self.tensor


def add(tensor: Tensor, gradient: Tensor) -> Tensor:
    return gradient + tensor


NET = Net()


def add_global(gradient: Tensor) -> Tensor:
    return gradient + NET.second.weight


def hooks(net: Net) -> dict[str, tuple[Callable[..., Any], str]]:
    """Name hooks, with what they read of the model; "" if nothing but the parameter that they are on."""
    mask, own, calls, state = torch.ones(2, 2), net.first.weight, [0], dict(net.named_parameters())
    view = own.detach().t()
    return {
        "own": (lambda g: g + own.detach(), ""),
        "own by the module": (lambda g: g + net.first.weight.data, ""),
        "own by a method": (net.decay, ""),
        "own by an object": (Adds(own), ""),
        "own by a partial": (functools.partial(add, own), ""),
        "a mask": (lambda g: g * mask, ""),
        "a size": (lambda g: g / net.second.weight.numel(), ""),
        "a counter and a flag": (lambda g: g if calls.append(1) or net.training else g.clamp(0), ""),
        "another": (lambda g: g + net.second.weight, "net.second.weight"),
        "another in a method called": (net.decay_by_another, "self.blocks[0].weight"),
        "another in an inner function": (lambda g: (lambda: g + net.second.weight)(), "net.second.weight"),
        "another by an object": (Adds(net.second.weight), "self.tensor"),
        "another by a partial": (functools.partial(add, net.second.weight), "an argument of the hook"),
        "another by a default": (lambda g, w=net.second.weight: g + w, "w"),
        "another by a name": (lambda g: g + state["second.weight"], "state['second.weight']"),
        "a global": (add_global, "NET.second.weight"),
        "all": (lambda g: g / sum(p.norm() for p in net.parameters()), "net.parameters"),
        "a buffer": (net.masked, "self.mask"),
        "a view": (lambda g: g + view, "view"),
    }


@pytest.mark.parametrize("name", hooks(NET))
def test_reads(name: str) -> None:
    hook, read = hooks(NET)[name]
    handle = NET.first.weight.register_hook(hook)  # type: ignore[no-untyped-call]
    try:
        assert reads_own(NET.first.weight) == (name.startswith("own") or "method called" in name)
        if not read:
            refuse_hooks_that_read_others(NET, "Net")
            return
        with pytest.raises(ModelError) as refused:
            refuse_hooks_that_read_others(NET, "Net")
        assert f"a hook of first.weight reads {read}, " in str(refused.value)
        assert "test_hook_reads.py:" in str(refused.value)
    finally:
        handle.remove()
