"""Caches that forward fills: traced and checked, and afterwards no tensor of a trace is in them."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partitioner import ModelError
from partitioner.models.as_graph import as_graph


@functools.lru_cache
def sines(size: int) -> Tensor:
    return torch.arange(size).float().sin()


@functools.cache
def first_mean() -> list[Tensor]:
    return []


class Times(nn.Module):
    """Two layers, times what a function that the module holds, or names, makes of the first one's output."""

    def __init__(self, factor: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh()
        return self.b(h) * self.factor(h)  # type: ignore[no-any-return]


HIDDEN: Any = types.ModuleType("hidden")
"""A module without a file, as a C extension is: nobody looks into it."""


def squared(output: Tensor, batch: object) -> Tensor:
    return output.square().mean()


def test_a_cached_function_is_traced_and_its_cache_holds_no_tensor_of_the_trace() -> None:
    sines.cache_clear()
    model, x = Times(lambda h: sines(h.shape[1])), torch.randn(8, 6)
    assert as_graph(model, example_inputs=x, loss_fn=squared).notes == ()
    assert sines.cache_info().currsize == 0
    assert type(sines(6)) is Tensor
    model(x).sum().item()


def test_what_a_user_has_cached_stays() -> None:
    sines.cache_clear()
    kept = sines(6)
    as_graph(Times(lambda h: sines(h.shape[1])), example_inputs=torch.randn(8, 6), loss_fn=squared)
    assert sines(6) is kept


def test_a_cached_mean_of_the_first_batch_is_refused() -> None:
    def factor(h: Tensor) -> Tensor:
        kept = first_mean()
        if not kept:
            kept.append(h.detach().mean())
        return kept[0]

    first_mean.cache_clear()
    with pytest.raises(ModelError, match="the cache of first_mean"):
        as_graph(Times(factor), example_inputs=torch.randn(8, 6), loss_fn=squared)
    assert first_mean() == []


def test_a_tensor_of_the_trace_that_is_kept_out_of_sight_is_refused_with_its_line() -> None:
    def factor(h: Tensor) -> Tensor:
        if not hasattr(HIDDEN, "kept"):
            HIDDEN.kept = torch.arange(6.0).sin()
        return h * HIDDEN.kept

    with pytest.raises(ModelError, match="remembers a tensor of its trace") as caught:
        as_graph(Times(factor), example_inputs=torch.randn(8, 6), loss_fn=squared)
    line = factor.__code__.co_firstlineno + 3
    assert f"test_caches.py:{line} computes" in caught.value.because[0]
