"""A batch whose samples are coupled stays in one piece, by every strategy, unless the user says otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cost_models.cluster import ClusterSpec
from cost_models.errors import InfeasibleError
from partitioner import Plan, partition, trace
from passes.graph.graph import OpGraph

OPTION = "micro_couplings=True (--micro-couplings)"


class Contrastive(nn.Module):
    """Every sample is told from all others of the batch."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8)
        )

    def forward(self, x: Tensor) -> Tensor:
        z = F.normalize(self.layers(x), dim=-1)
        return F.cross_entropy(z @ z.T, torch.arange(z.shape[0]))


class Normed(nn.Module):
    """Batch norm between two layers, and then each sample by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Linear(96, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


@cache
def graph_of(model: type[nn.Module], *sizes: int) -> OpGraph:
    return trace(model(*sizes), (torch.randn(8, 8),))


def slow(memory: str = "1GiB") -> ClusterSpec:
    """Two devices so slow that sending takes no time: a pipeline wants many micro-batches."""
    device = {"kind": "cpu", "name": "slow", "memory": memory, "flops": {"float32": "1M"}}
    device["memory_bandwidth"] = "10MB/s"
    node = {"name": "box", "count": 2, "device": device, "links": "Gloo-local"}
    return ClusterSpec.from_dict({"name": "slow", "nodes": [node]})


WAYS: Mapping[str, Mapping[str, Any]] = {
    "layer": {"strategy": "layer", "min_stages": 2},
    "feature": {"strategy": "feature"},
    "hybrid": {"strategy": "hybrid"},
    "fix": {"strategy": "hybrid", "fix": "pipeline=2"},
    "free": {"strategy": "free", "splits": {}},
}


def made(model: type[nn.Module], **options: Any) -> Plan:
    return partition(graph_of(model), slow(), batch_size=16, **{"strategy": "layer", **options})


@pytest.mark.parametrize("way", WAYS)
def test_every_strategy_keeps_it_whole_and_says_so(way: str) -> None:
    plan = made(Contrastive, **WAYS[way])
    assert plan.microbatches == 1
    (note,) = [note for note in plan.notes if "micro-batch" in note]
    assert note.startswith("one micro-batch, for loss couples samples at matmul (")
    assert "test_whole_batch.py:" in note
    assert OPTION in note
    assert plan.certificate.space.endswith(note.partition("for ")[2].partition(";")[0])


def test_the_note_has_what_several_would_take() -> None:
    allowed = made(Contrastive, **WAYS["layer"], micro_couplings=True)
    assert allowed.microbatches > 1
    (note,) = [note for note in allowed.notes if "micro-batch" in note]
    assert note.startswith(f"computed per micro-batch of {16 // allowed.microbatches}: loss couples samples")
    (note,) = [n for n in made(Contrastive, **WAYS["layer"]).notes if "micro-batch" in n]
    assert f"; {allowed.microbatches} micro-batches would take " in note
    assert "instead of" in note


@pytest.mark.parametrize(
    "options",
    [
        {**WAYS["layer"], "microbatches": 4},
        {"strategy": "hybrid", "fix": "pipeline=2 data=1 tensor=1 microbatch=4"},
    ],
    ids=["microbatches", "fix"],
)
def test_an_explicit_number_is_consent(options: Mapping[str, Any]) -> None:
    plan = made(Contrastive, **options)
    assert plan.microbatches == 4
    assert "one micro-batch only" not in plan.certificate.space
    assert any(note.startswith("computed per micro-batch of 4") for note in plan.notes)


def test_batch_norm_is_cut_with_a_note() -> None:
    plan = made(Normed, **WAYS["layer"])
    assert plan.microbatches > 1
    assert any("1 batch norm: statistics of one micro-batch at a time" in note for note in plan.notes)


@pytest.mark.parametrize("strategy", ["layer", "feature", "hybrid"])
def test_where_the_whole_does_not_fit_the_way_out_is_named(strategy: str) -> None:
    graph = graph_of(Contrastive, 512)
    # Pairs of all samples grow with the square of the batch: cut, it takes less time, not only less memory.
    wanted: dict[str, Any] = {"batch_size": 2048, "optimizer_memory": "sgd", "strategy": strategy}
    with pytest.raises(InfeasibleError) as caught:
        partition(graph, slow("28MiB"), **{"strategy": "layer", **wanted})
    error = caught.value
    assert error.because[-1].startswith("the batch stays in one micro-batch, for loss couples samples at mat")
    plan = partition(graph, slow("28MiB"), **{"strategy": "layer", **wanted}, micro_couplings=True)
    assert error.suggestions[0].startswith(f"{OPTION}: {plan.microbatches:,} micro-batches would take ")
