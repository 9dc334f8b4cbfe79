"""Ops that couple samples are found and named; a loss that is a mean of per-sample terms has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cost_models.cluster import ClusterSpec
from partitioner import Workload, partition, trace
from partitioner.models.load import load_workload
from passes.graph.graph import OpGraph
from passes.graph.nodes import op_name
from passes.shard.couplings import couplings, said, why_whole
from tests.support.matrix import thinned

Body = Callable[["Small", Tensor], Tensor]


class Small(nn.Module):
    """A linear layer, and whatever ``body`` makes of its output and itself: a loss."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.group, self.layer = nn.GroupNorm(2, 6), nn.LayerNorm(6)
        self.embedding, self.conv = nn.Embedding(6, 6), nn.Conv1d(1, 2, 3)
        self.attention = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.1, batch_first=True)
        self.register_buffer("running", torch.zeros(6))
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, self.linear(x))


def graph_of(body: Body) -> OpGraph:
    return trace(Small(body), (torch.randn(4, 6),))


def info_nce(m: Small, h: Tensor) -> Tensor:
    z = F.normalize(h, dim=-1)
    return F.cross_entropy(z @ z.T / 0.1, torch.arange(z.shape[0]))


def capacity_routing(m: Small, h: Tensor) -> Tensor:
    """Every expert takes the two samples that want it most."""
    scores = h.softmax(-1).T
    weights, rows = scores.topk(2, dim=-1)
    return (weights.unsqueeze(-1) * h[rows]).square().mean()


def variance(m: Small, h: Tensor) -> Tensor:
    return h.square().mean() + h.var(0).mean()


def batch_norm(m: Small, h: Tensor) -> Tensor:
    return m.norm(h).square().mean()


def mixup_by_roll(m: Small, h: Tensor) -> Tensor:
    return (0.7 * h + 0.3 * h.roll(1, 0)).square().mean()


def mixup_by_flip(m: Small, h: Tensor) -> Tensor:
    return (0.7 * h + 0.3 * h.flip(0)).square().mean()


def cumsum(m: Small, h: Tensor) -> Tensor:
    return h.cumsum(0).square().mean()


def softmax(m: Small, h: Tensor) -> Tensor:
    return (h.softmax(0) * h).square().mean()


def topk(m: Small, h: Tensor) -> Tensor:
    return h.square().mean(1).topk(2).values.mean()


def centred(m: Small, h: Tensor) -> Tensor:
    return (h - h.mean(0)).square().mean()


def root_of_mean(m: Small, h: Tensor) -> Tensor:
    return h.square().mean().sqrt()


def running_average(m: Small, h: Tensor) -> Tensor:
    m.running.mul_(0.9).add_(0.1 * h.detach().mean(0))
    return h.square().mean()


def load_balancing(m: Small, h: Tensor) -> Tensor:
    gates = h.softmax(-1)
    chosen = F.one_hot(gates.argmax(-1), 6).double()
    return (gates.mean(0) * chosen.mean(0)).sum()


def frequencies(m: Small, h: Tensor) -> Tensor:
    """The gradient of a row is divided by how often the batch has it."""
    return (F.embedding(h.argmax(-1), m.embedding.weight, scale_grad_by_freq=True) * h).sum(-1).mean()


def cross_entropy_of_own_labels(m: Small, h: Tensor) -> Tensor:
    """The labels that count are told by forward: each micro-batch has its own number of them."""
    return F.cross_entropy(h, h.argmax(-1), ignore_index=0)


COUPLED = {
    cross_entropy_of_own_labels: ("cross_entropy_loss", "samples"),
    frequencies: ("embedding", "samples"),
    info_nce: ("matmul", "samples"),
    capacity_routing: ("topk", "samples"),
    variance: ("var", "samples"),
    batch_norm: ("batch_norm", "batch statistics"),
    mixup_by_roll: ("roll", "samples"),
    mixup_by_flip: ("flip", "samples"),
    cumsum: ("cumsum", "samples"),
    softmax: ("softmax", "samples"),
    topk: ("topk", "samples"),
    centred: ("sub", "samples"),
    root_of_mean: ("sqrt", "samples"),
    running_average: ("add", "running state"),
    load_balancing: ("mul", "samples"),
}


@pytest.mark.parametrize("body", COUPLED, ids=lambda body: body.__name__)
def test_a_coupling_is_named_at_its_first_op(body: Body) -> None:
    graph = graph_of(body)
    op, kind = COUPLED[body]
    (found,) = couplings(graph)
    assert (op_name(graph.nodes[found.op]), found.kind) == (op, kind)
    assert kind == "batch statistics" or found.source.startswith("test_couplings.py:")


def mean_of_squares(m: Small, h: Tensor) -> Tensor:
    return F.relu(h).square().mean()


def layer_and_group_norm(m: Small, h: Tensor) -> Tensor:
    return (m.group(h) + m.layer(h)).square().sum(-1).mean()


def convolution(m: Small, h: Tensor) -> Tensor:
    return F.max_pool1d(m.conv(h.unsqueeze(1)), 2).flatten(1).mean()


def transformer(m: Small, h: Tensor) -> Tensor:
    return m.attention(h.unsqueeze(1) * torch.ones(3, 1)).square().mean()


def dropout(m: Small, h: Tensor) -> Tensor:
    return (F.dropout(h, 0.5) + 0.1 * torch.randn_like(h)).square().mean()


def weight_decay(m: Small, h: Tensor) -> Tensor:
    return h.square().mean() + 0.01 * m.linear.weight.square().sum()


def own_rows(m: Small, h: Tensor) -> Tensor:
    return -h.log_softmax(-1)[torch.arange(h.shape[0]), h.argmax(-1)].mean()


def two_views_together(m: Small, h: Tensor) -> Tensor:
    one, two = m.layer(torch.cat([h, h * 2])).chunk(2)
    return (one * two).sum(-1).mean()


def sum_over_count(m: Small, h: Tensor) -> Tensor:
    return h.square().sum() / h.shape[0]


def smooth_l1(m: Small, h: Tensor) -> Tensor:
    return F.smooth_l1_loss(h, torch.zeros_like(h)) + F.mse_loss(h, torch.ones_like(h))


def cross_entropy(m: Small, h: Tensor) -> Tensor:
    return F.cross_entropy(h, h.argmax(-1))


def pairs_within_a_sample(m: Small, h: Tensor) -> Tensor:
    return torch.bmm(h.unsqueeze(2), h.unsqueeze(1)).softmax(-1).logsumexp(-1).mean()


def sparse_embedding(m: Small, h: Tensor) -> Tensor:
    return (F.embedding(h.argmax(-1), m.embedding.weight, sparse=True) * h).sum(-1).mean()


@pytest.mark.parametrize(
    "body",
    [
        mean_of_squares,
        layer_and_group_norm,
        convolution,
        transformer,
        dropout,
        weight_decay,
        own_rows,
        two_views_together,
        sum_over_count,
        smooth_l1,
        cross_entropy,
        pairs_within_a_sample,
        sparse_embedding,
    ],
    ids=lambda body: body.__name__,
)
def test_a_mean_of_what_samples_give_has_no_coupling(body: Body) -> None:
    assert couplings(graph_of(body)) == ()


@pytest.mark.parametrize("name", thinned(["gpt2", "bert", "vit", "t5", "llama-1b"], ["gpt2", "vit"]))
def test_bundled_models_have_no_coupling(name: str) -> None:
    settings: dict[str, Any] = {"layers": "1", "seq": "16"} if name == "llama-1b" else {"size": "tiny"}
    made = load_workload(name, settings=settings)
    graph = trace(made.model, made.example_inputs, loss_fn=made.loss_fn)
    assert couplings(graph) == ()


def test_a_plan_says_it_once_and_only_with_micro_batches() -> None:
    workload = Workload(Small(info_nce), (torch.randn(4, 6),))
    cluster = ClusterSpec.local(2)
    plans = [
        partition(workload, cluster, batch_size=8, microbatches=count, strategy="layer") for count in (1, 2)
    ]
    found = [[note for note in plan.notes if "micro-batch" in note] for plan in plans]
    assert found[0] == []
    (note,) = found[1]
    assert note.startswith("computed per micro-batch of 4: loss couples samples at matmul")
    assert "test_couplings.py:" in note
    assert "microbatches=1" in note


def normed_then_compared(m: Small, h: Tensor) -> Tensor:
    return info_nce(m, m.norm(h))


def test_batch_norm_hides_no_coupling_behind_it_and_keeps_no_batch_whole() -> None:
    graph = graph_of(normed_then_compared)
    assert [(op_name(graph.nodes[c.op]), c.kind) for c in couplings(graph)] == [
        ("batch_norm", "batch statistics"),
        ("matmul", "samples"),
    ]
    assert why_whole(graph).startswith("loss couples samples at matmul")
    assert why_whole(graph_of(batch_norm)) == ""


def test_a_synchronized_norm_keeps_the_batch_whole_and_a_plain_one_does_not() -> None:
    plain = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU())
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(plain)
    found = {}
    for name, model in (
        ("plain", nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))),
        ("converted", converted),
    ):
        graph = trace(model, torch.randn(4, 6), loss_fn=lambda y, _: y.square().mean())
        found[name] = why_whole(graph), said(couplings(graph), 2)
    assert found["plain"][0] == ""
    assert found["converted"][0].startswith(
        "statistics that 1 synchronized batch norm would have of all samples, at batch_norm in module 1 ("
    )
    assert "1 synchronized batch norm" in found["converted"][1][0]


def test_several_couplings_are_said_by_kind() -> None:
    (text,) = said(couplings(graph_of(lambda m, h: m.norm(h).square().mean() + h.var(0).mean())), 3)
    assert text.startswith("computed per micro-batch of 3")
    assert "1 batch norm: statistics of one micro-batch at a time" in text
    assert "loss couples samples at var" in text
