"""Verification of models that draw random numbers, or whose loss is NaN: nothing differs, and what is wrong still does."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cost_models.cluster import ClusterSpec
from cost_models.errors import ModelError
from partitioner import Workload, partition, trace
from partitioner.verify.verify import verify_plan
from runtime.ops.random import mix, seeded
from runtime.ranks.launch import WorkerPool
from tests.distributed.planted import nothing, plant
from tests.odd_models.case import odd
from tests.support.matrix import thinned


def noisy(m: Any, x: Tensor) -> Tensor:
    """Draws of every kind: like a tensor, of a shape, in place, by numbers, by chance, at two places."""
    h = m.a(x) + 0.1 * torch.randn_like(x)
    h = h * torch.rand(6) + torch.empty_like(h).normal_(0.0, 0.1)
    h = m.b(h.tanh()) * torch.bernoulli(h.detach().sigmoid())
    h = h * F.gumbel_softmax(m.c(h), tau=0.5) + torch.rand_like(h)
    return h[:, torch.randperm(6)] * torch.randint(1, 4, (6,)) + torch.empty(x.shape[0], 1).bernoulli_(0.5)


def multinomial(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).tanh()
    which = torch.multinomial(m.b(h).detach().softmax(-1), 2)
    return m.c(h).gather(1, which) * torch.normal(h.detach(), torch.ones_like(h))[:, :2]


def dropped_path(m: Any, x: Tensor) -> Tensor:
    keep = (torch.rand(x.shape[0], 1) < 0.7).to(x.dtype)
    unused = torch.rand(3)  # the graph does not have it
    h = m.b(m.a(x).tanh()) * keep
    return m.c(F.dropout(h, 0.4)) + x + 0 * unused.mean().detach()


def workload(
    run: Callable[..., Tensor], loss: Callable[..., Tensor] = lambda y, b: (y**2).mean(), width: int = 6
) -> Workload:
    """``width``: features between a and b."""
    torch.manual_seed(0)
    layers = {"a": nn.Linear(6, width), "b": nn.Linear(width, 6), "c": nn.Linear(6, 6)}
    return Workload(odd(run, **layers), torch.randn(8, 6), loss, "random")


WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "pipeline": (2, {"microbatches": 2, "min_stages": 2}),
    "recomputed": (2, {"microbatches": 2, "recompute": "full", "min_stages": 2}),
    "samples": (2, {"microbatches": 2, "strategy": "feature", "mesh": (2,), "pins": {"*": "data"}}),
    "both axes": (4, {"strategy": "feature", "mesh": (2, 2), "pins": {"*": "data column_row"}}),
    "free": (3, {"microbatches": 2, "strategy": "free"}),
}


@pytest.mark.parametrize(
    ("run", "way"),
    thinned(
        itertools.product([noisy, multinomial, dropped_path], WAYS),
        [
            (noisy, "pipeline"),
            (noisy, "both axes"),
            (multinomial, "samples"),
            (multinomial, "free"),
            (dropped_path, "recomputed"),
        ],
    ),
)
def test_draws_are_the_same_in_both_worlds(run: Callable[..., Tensor], way: str, pool: WorkerPool) -> None:
    ranks, options = WAYS[way]
    given = workload(run)
    graph = trace(given.model, given.example_inputs, loss_fn=given.loss_fn)
    plan = partition(graph, ClusterSpec.local(ranks), batch_size=8, **{"strategy": "layer", **options})
    report = verify_plan(plan, given, pool=pool, graph=graph)
    report.raise_if_different()
    assert not any("may differ" in note for note in report.notes)


def test_the_sum_of_a_batch_is_compared_by_micro_batches(pool: WorkerPool) -> None:
    given = workload(noisy, lambda y, b: (y**2).sum())
    plan = partition(
        given, ClusterSpec.local(2), batch_size=8, microbatches=2, loss_reduction="sum", strategy="layer"
    )
    plan.verify(given, pool=pool).raise_if_different()


def shards_draw_alike() -> Any:
    return mock.patch.dict(
        "runtime.ops.local.LOCAL", random=lambda op, axes, *args, **kwargs: op(*args, **kwargs)
    )


def copies_draw_apart() -> Any:
    def run(self: Any, step: int, segment: int, microbatch: int, function: Callable[[], Any]) -> Any:
        with seeded(self._generators, mix(step, segment, microbatch, torch.distributed.get_rank())):
            return function()

    return mock.patch("runtime.ops.random.Seeded.run", run)


def micro_batches_draw_alike() -> Any:
    def run(self: Any, step: int, segment: int, microbatch: int, function: Callable[[], Any]) -> Any:
        with seeded(self._generators, mix(step, segment)):
            return function()

    return mock.patch("runtime.ops.random.Seeded.run", run)


@pytest.mark.parametrize("fault", [nothing, shards_draw_alike, copies_draw_apart, micro_batches_draw_alike])
def test_what_ranks_draw_by_themselves_is_compared(fault: Callable[[], Any], mended: WorkerPool) -> None:
    """Dropout is off while numbers are compared: what it would draw is compared by itself."""

    def run(m: Any, x: Tensor) -> Tensor:
        return m.b(F.dropout(m.a(x), 0.5)) + F.dropout(m.c(x), 0.5)

    given = workload(run, width=2048)  # of which no rank gathers the weights
    ways = {"strategy": "feature", "mesh": (2,), "pins": {"a.weight": "S0"}, "microbatches": 2}
    plan = partition(given, ClusterSpec.local(2), batch_size=8, **{"strategy": "layer", **ways})
    mended.run(plant, fault, world_size=2)
    report = plan.verify(given, pool=mended)
    assert report.compared["random draws"] == 2, "on shards, and whole"
    assert report.passed == (fault is nothing)
    if fault is not nothing:
        assert {d.kind for d in report.differences} == {"random draws"}
        assert "random numbers" in str(report.first_difference)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_agrees_with_nothing(value: float, pool: WorkerPool) -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.c(m.b(m.a(x).tanh()))

    def loss(y: Tensor, batch: Tensor) -> Tensor:
        return torch.where(y > 0, y * value, y**2).sum(1).mean()

    ranks, options = WAYS["pipeline"]
    given = workload(run, loss)
    plan = partition(given, ClusterSpec.local(ranks), batch_size=8, **{"strategy": "layer", **options})
    with pytest.raises(ModelError, match="the unpartitioned model computes no number"):
        plan.verify(given, pool=pool)
