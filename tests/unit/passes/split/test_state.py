"""Which parameters become parts: those that train alike in all of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from passes.split.split import Split
from tests.unit.passes.split.harness import check, traced


class HalfDetached(nn.Module):
    """x [b, 6] -> 12; the second half of it passes no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 12), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        loss: Tensor = self.last(hidden[:, :6] + hidden[:, 6:].detach()).square().mean()
        return loss


def test_a_parameter_stays_whole_where_a_part_of_it_would_not_train() -> None:
    """Its gradient is zero there, and not none: weight decay and momentum change these elements too."""
    graph, state, leaves = traced(HalfDetached(), {"x": torch.randn(3, 6)})
    made = check(graph, [Split("linear", -1, (6, 6))], state, leaves)
    assert not made.parts
    assert made.trained == graph.trained


def test_parts_that_have_elements_with_a_gradient_train() -> None:
    graph, state, leaves = traced(HalfDetached(), {"x": torch.randn(3, 6)})
    made = check(graph, [Split("linear", -1, (4, 8))], state, leaves)
    assert {"first.weight#0", "first.weight#1"} <= made.trained
