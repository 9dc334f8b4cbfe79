"""Buffers that forward writes: those that a batch writes once are told from those that depend on its samples."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from partitioner import trace
from passes.shard.couplings import couplings, why_whole


class Writing(nn.Module):
    """One buffer of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
        self.norm = nn.BatchNorm1d(6)
        for name in ("steps", "weight", "seen", "mean", "drawn", "of_norm", "of_seen"):
            self.register_buffer(name, torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.weight.lerp_(self.norm.weight.detach(), 0.1)
        self.seen += x.shape[0]
        self.of_seen += self.seen
        self.drawn.copy_(torch.rand(6))
        h = self.linear(x)
        self.mean.lerp_(h.detach().mean(0), 0.1)
        h = self.norm(h)
        self.of_norm.copy_(self.norm.running_mean)
        return h.square().mean()


def test_once_a_batch_is_what_reads_nothing_of_it() -> None:
    graph = trace(Writing(), (torch.randn(4, 6),))
    written = {output.name: output.once for output in graph.outputs if output.kind == "buffer"}
    once = {name for name, is_once in written.items() if is_once}
    vectors = {f"linear.parametrizations.weight.0.{name}" for name in ("_u", "_v")}
    assert once == {"steps", "weight", "norm.num_batches_tracked", *vectors}
    assert written.keys() - once == {"seen", "of_seen", "drawn", "mean", "of_norm"}


def test_what_the_batch_advances_keeps_it_whole_and_a_counter_does_not() -> None:
    graph = trace(Writing(), (torch.randn(4, 6),))
    state = [coupling for coupling in couplings(graph) if coupling.kind == "running state"]
    assert len(state) == 5
    assert why_whole(graph).startswith("a buffer kept of the batch advances with each micro-batch at ")

    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 6)
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.steps += 1
            return (super().forward(x) * self.steps).square().mean()

    assert couplings(trace(Counting(), (torch.randn(4, 6),))) == ()
