"""Draws of the eager model, given to the ops of the graph that draw."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from partitioner.verify.draws import RecordedDraws
from passes.trace.trace import trace


class Noisy(nn.Module):
    """Two kinds of noise, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x + torch.rand_like(x))
        return y + torch.randn_like(y)


def test_an_op_that_nothing_was_drawn_for_leaves_the_others_their_draws() -> None:
    x = torch.randn(8, 6)
    graph = trace(Noisy(), x, loss_fn=lambda y, batch: y.sum())
    uniform, normal = (node.name for node in graph.ops if "rand" in str(node.target))
    recorded = RecordedDraws(graph)
    with recorded.recording():
        drawn = torch.randn_like(x)
    assert list(recorded.draws) == [normal]
    torch.testing.assert_close(recorded.draws[normal][0], drawn)

    both = RecordedDraws(graph)
    with both.recording():
        first, _, second = torch.rand_like(x), torch.rand(3), torch.randn_like(x)
    assert list(both.draws) == [uniform, normal]
    torch.testing.assert_close([both.draws[uniform][0], both.draws[normal][0]], [first, second])
