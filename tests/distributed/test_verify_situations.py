"""Situations in which a comparison, not the plan, was what failed: each model is verified, or trained, as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cost_models.cluster import ClusterSpec
from partitioner import Workload, partition
from partitioner.models.as_graph import as_graph
from passes.graph.least_samples import least_samples
from runtime.execute.execute import Executor
from runtime.ranks.launch import WorkerPool
from tests.distributed.planted import plant


class Packed(nn.Parameter):
    """Two codes in a byte, as a subclass of Parameter with attributes of its own."""

    group: int

    def __new__(cls, data: Tensor, group: int) -> Packed:
        self: Packed = torch.Tensor._make_subclass(cls, data, False)
        self.group = group
        return self


class Quantized(nn.Module):
    """A table with sparse gradients, a frozen layer of 4-bit codes with scales in a buffer, an adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(20, 8, mode="sum", sparse=True)
        self.codes = Packed(torch.randint(0, 256, (32,), dtype=torch.uint8), 4)
        self.register_buffer("scale", torch.rand(16, 1))
        self.scale: Tensor
        self.down, self.up = nn.Linear(8, 2), nn.Linear(2, 8)

    def forward(self, items: Tensor) -> Tensor:
        x = self.table(items)
        codes = torch.stack([self.codes >> 4, self.codes & 15], 1).view(-1, 4)
        y: Tensor = F.linear(x, (codes * self.scale).view(8, 8)) + self.up(self.down(x))
        return y


class Network(nn.Module):
    """Features of nodes, summed along an edge list that is whole: dimension 0 of the features counts nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        h = h + torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])
        y: Tensor = self.last(h)
        return y


def squared(output: Tensor, batch: Any) -> Tensor:
    return output.square().mean()


def quantized() -> Workload:
    torch.manual_seed(0)
    return Workload(Quantized(), {"items": torch.randint(0, 20, (8, 3))}, squared)


def network() -> Workload:
    torch.manual_seed(0)
    batch = {"x": torch.randn(12, 4), "edges": torch.randint(0, 12, (2, 30))}
    return Workload(Network(), batch, squared)


def test_sparse_gradients_and_quantized_weights_train_as_in_a_plain_loop(pool: WorkerPool) -> None:
    plan = partition(quantized(), ClusterSpec.local(2), batch_size=8, microbatches=2, min_stages=2)
    report = plan.verify(quantized(), train=True, pool=pool)
    report.raise_if_different()
    assert "dense for adamw" in " ".join(report.notes)


@pytest.mark.parametrize("train", [False, True])
def test_indices_into_the_batch_are_verified_on_the_examples_own_samples(
    train: bool, pool: WorkerPool
) -> None:
    workload = network()
    graph = as_graph(workload, batch_dims={"edges": None})
    plan = partition(graph, ClusterSpec.local(2), batch_size=12, microbatches=1, min_stages=2)
    report = plan.verify(workload, pool=pool, batch_dims={"edges": None}, train=train)
    report.raise_if_different()
    assert report.samples == 12
    assert any(
        note.startswith("verified on the 12 samples of the example: on 2 of them, Index")
        for note in report.notes
    )


class Noisy(nn.Module):
    """Drops features at random, with probability 1 - ``kept``: nothing is dropped with 1, though numbers are drawn."""

    def __init__(self, kept: float) -> None:
        super().__init__()
        self.kept = kept
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        y: Tensor = self.last(h * torch.bernoulli(torch.full_like(h, self.kept)))
        return y.square().mean()


def noisy(kept: float) -> Workload:
    torch.manual_seed(0)
    return Workload(Noisy(kept), {"x": torch.randn(8, 8)})


def test_a_model_that_draws_is_compared_until_its_draws_tell(pool: WorkerPool) -> None:
    """With fixed draws all is compared; with others what is no consequence of them: samples, rates, placement, files."""
    plan = partition(noisy(1.0), ClusterSpec.local(2), batch_size=8, microbatches=2, min_stages=2)
    alike = plan.verify(noisy(1.0), train=True, pool=pool)
    alike.raise_if_different()
    assert alike.comparable is None
    assert str(alike).startswith("trained alike")
    plan = partition(noisy(0.5), ClusterSpec.local(2), batch_size=8, microbatches=2, min_stages=2)
    report = plan.verify(noisy(0.5), train=True, pool=pool)
    report.raise_if_different()
    assert report.comparable == 0
    assert str(report).startswith("not comparable beyond step 0, the rest alike: Noisy")
    assert alike.compared.keys() - report.compared.keys() == {
        "loss", "gradient norm", "parameter", "optimizer state"
    }  # fmt: skip
    assert all(report.compared[kind] == alike.compared[kind] for kind in report.compared)
    assert any("1 op draws random numbers (bernoulli" in note for note in report.notes)


class Mirrored(nn.Module):
    """Buffers that are a parameter, all of its memory, and some rows of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        weight = self.first.weight
        for name, view in (("itself", weight), ("whole", weight.data), ("rows", weight.detach()[1:4])):
            self.register_buffer(name, view)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(torch.tanh(self.first(x)))
        return y.square().mean() + self.get_buffer("rows").square().mean()


@pytest.mark.parametrize(
    "options",
    [{"min_stages": 2}, {"strategy": "feature", "mesh": (2,), "pins": {"*": "zero3"}}],
    ids=["stages", "shards"],
)
def test_buffers_that_are_views_of_parameters_follow_them(options: dict[str, Any], pool: WorkerPool) -> None:
    torch.manual_seed(0)
    workload = Workload(Mirrored(), {"x": torch.randn(8, 8)})
    plan = partition(
        workload, ClusterSpec.local(2), batch_size=8, microbatches=2, **{"strategy": "layer", **options}
    )
    report = plan.verify(workload, train=True, pool=pool)
    report.raise_if_different()
    assert report.compared["buffer"] > 0


class Float32Only(nn.Module):
    """Code that another type is another model for: it is refused, or takes another way."""

    def __init__(self, refused: bool) -> None:
        super().__init__()
        self.refused = refused
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32 and self.refused:
            raise TypeError("float32 wanted")
        h = self.first(x) * x.element_size()
        y: Tensor = self.last(torch.tanh(h))
        return y.square().mean()


@pytest.mark.parametrize("train", [False, True])
def test_what_float64_refuses_is_verified_in_its_own_type(train: bool, pool: WorkerPool) -> None:
    torch.manual_seed(0)
    workload = Workload(Float32Only(refused=True), {"x": torch.randn(8, 8)})
    plan = partition(workload, ClusterSpec.local(2), batch_size=8, microbatches=2, min_stages=2)
    report = plan.verify(workload, train=train, pool=pool)
    report.raise_if_different()
    assert report.worst is not None
    assert report.worst.allowed < 1e-4
    assert "float32 wanted" in str(report)
    assert ("in float32" in str(report).splitlines()[0]) != train


def slightly_more() -> Any:
    """Losses that weigh more by what 32 bits just hold."""
    step = Executor.train_step

    def train_step(self: Executor, *args: Any, weights: tuple[float, ...], **options: Any) -> Any:
        return step(self, *args, weights=tuple(weight * (1 + 1e-5) for weight in weights), **options)

    return mock.patch.object(Executor, "train_step", train_step)


def test_another_way_in_float64_is_verified_in_its_own_type(mended: WorkerPool) -> None:
    """There, too, a wrong rank is seen, though its error is no more than single numbers hold."""
    torch.manual_seed(0)
    workload = Workload(Float32Only(refused=False), {"x": torch.randn(8, 8)})
    graph = as_graph(workload)
    options: dict[str, Any] = {"batch_size": 8, "microbatches": 2, "min_stages": 2}
    plan = partition(graph, ClusterSpec.local(2), **{"strategy": "layer", **options})
    report = plan.verify(workload, graph=graph, pool=mended)
    report.raise_if_different()
    assert report.types == "float32"
    assert report.why_own_types.startswith("in float64 it computes something else than its graph (gradient")
    mended.run(plant, slightly_more)
    wrong = plan.verify(workload, graph=graph, pool=mended)
    assert not wrong.passed
    assert "in float32 it differs too: " in str(wrong).replace("\n    ", " ")  # loss or gradient: by the plan


class Picking(nn.Module):
    """A layer on some of the samples: how many is reckoned from the batch."""

    def __init__(self, pick: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.pick = pick
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(torch.tanh(self.pick(self.first(x))))
        return y.square().mean()


def even(h: Tensor) -> Tensor:
    return h[: h.shape[0] - h.shape[0] % 2]


def in_pairs(h: Tensor) -> Tensor:
    return even(h).reshape(-1, 2, h.shape[-1]).sum(1)


def every_second(h: Tensor) -> Tensor:
    return h[::2]


DATA = {"strategy": "feature", "pins": {"*": "data"}}


@pytest.mark.parametrize(
    ("pick", "options"),
    [
        (even, DATA),
        (in_pairs, DATA),
        (every_second, {"strategy": "hybrid", "fix": "pipeline=2 data=2 microbatch=8"}),
    ],
    ids=["even", "pairs", "every second, between stages"],
)
def test_parts_of_the_batch_are_shared_where_they_divide(
    pick: Callable[[Tensor], Tensor], options: dict[str, Any], pool: WorkerPool
) -> None:
    torch.manual_seed(0)
    workload = Workload(Picking(pick), {"x": torch.randn(16, 8)})
    graph = as_graph(workload)
    plan = partition(graph, ClusterSpec.local(4), batch_size=16, **{"strategy": "layer", **options})
    plan.verify(workload, graph=graph, pool=pool).raise_if_different()


def test_a_batch_needs_as_many_samples_that_nothing_is_empty() -> None:
    graph = as_graph(Workload(Picking(lambda h: h[: h.shape[0] // 3]), {"x": torch.randn(16, 8)}))
    assert least_samples(graph) == (3, "slice_1 in module (root)")
