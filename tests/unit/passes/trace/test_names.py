"""Canonical names, aliases, persistence, frozen modules."""

from __future__ import annotations

import torch
from torch import nn

from passes.trace.names import frozen_modules, state_names


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.again = self.inner
        self.register_buffer("table", torch.zeros(2), persistent=False)
        self.register_buffer("twin", self.inner[1].running_mean)
        self.inner[0].bias.requires_grad_(False)


def test_canonical_names_are_the_models_own_and_others_are_aliases() -> None:
    model = Tied()
    names = state_names(model)
    assert list(names.parameters) == [n for n, _ in model.named_parameters()]
    assert set(names.buffers) == {n for n, _ in model.named_buffers()}
    assert names.aliases["head.weight"] == "embed.weight"
    assert names.aliases["again.0.weight"] == "inner.0.weight"
    assert names.canonical("again.1.running_var") == "inner.1.running_var"
    every = {n for n, _ in model.named_parameters(remove_duplicate=False)}
    every |= {n for n, _ in model.named_buffers(remove_duplicate=False)}
    assert every == names.parameters.keys() | names.buffers.keys() | names.aliases.keys()
    assert {names.canonical("twin"), names.canonical("inner.1.running_mean")} & names.buffers.keys() != set()
    assert names.canonical("twin") == names.canonical("inner.1.running_mean")


def test_specs() -> None:
    names = state_names(Tied())
    assert names.buffers["table"].persistent is False
    assert names.buffers["inner.1.running_var"].persistent is True
    assert names.parameters["inner.0.bias"].requires_grad is False
    assert names.parameters["embed.weight"].shape == (5, 3)
    assert names.parameters["embed.weight"].size_bytes == 60


def test_ties_on_meta() -> None:
    with torch.device("meta"):
        model = Tied()
    assert state_names(model).aliases["head.weight"] == "embed.weight"


def test_frozen_modules_have_parameters_and_train_none() -> None:
    model = Tied()
    assert frozen_modules(model) == frozenset()
    model.inner[1].requires_grad_(False)
    assert frozen_modules(model) == {"inner.1"}
    model.requires_grad_(False)
    assert "" in frozen_modules(model)
    assert "table" not in frozen_modules(model)
