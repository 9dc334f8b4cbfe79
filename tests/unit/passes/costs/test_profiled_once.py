"""Profiles that are kept: equal to fresh ones, whichever graph asked first, and told apart by all they depend on."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from partitioner.models.as_graph import as_graph
from partitioner.models.workload import Workload
from passes.costs import profiled_once
from passes.costs.profiled_once import profile_once
from passes.costs.saved import profile
from passes.graph.graph import OpGraph
from passes.graph.signatures import group_by_signature


class Small(nn.Module):
    """A matrix product, a normalization over the batch and a dropout, as wide as asked."""

    def __init__(self, width: int, frozen: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, width).requires_grad_(not frozen)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.Tensor(self.drop(self.norm(self.first(x))).square().mean())


def traced(width: int, frozen: bool = False) -> OpGraph:
    return as_graph(Workload(Small(width, frozen), {"x": torch.randn(4, 8)}, name="small"))


@pytest.mark.parametrize("device_kind", ["cpu", "cuda"])
def test_equal_to_fresh_ones(device_kind: str) -> None:
    for graph in (traced(16), traced(16), traced(24), traced(16, frozen=True)):
        for signature in group_by_signature(graph).signatures:
            for samples in (1, 2, 4):
                sizes = {**graph.example_sizes, graph.batch.batch_symbol: samples}
                kept = profile_once(signature, sizes, device_kind=device_kind)
                assert kept == profile(signature, sizes, device_kind=device_kind), signature.exemplar


def test_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiled_once, "_profiles", {})
    ran: list[str] = []

    def counted(signature, symbols, **options):  # type: ignore[no-untyped-def]
        ran.append(str(signature.target))
        return profile(signature, symbols, **options)

    monkeypatch.setattr(profiled_once, "profile", counted)

    def ask(graph: OpGraph) -> int:
        before = len(ran)
        for signature in group_by_signature(graph).signatures:
            profile_once(signature, {**graph.example_sizes, graph.batch.batch_symbol: 4})
        return len(ran) - before

    assert ask(traced(16)) > 0
    assert ask(traced(16)) == 0
    assert 0 < ask(traced(16, frozen=True)) < len(ran)
