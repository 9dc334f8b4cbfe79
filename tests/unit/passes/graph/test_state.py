"""The order in which inputs' readers are listed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from passes.graph.state import state_readers
from passes.trace.trace import trace


class Norms(nn.Module):
    """Eight layers of a weight and a bias each."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.Sequential(*(nn.LayerNorm(2) for _ in range(8)))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.norms(x).square().mean()
        return loss


def test_state_is_listed_by_its_first_reader_and_by_name() -> None:
    """Not as a set has it, which differs from process to process: seconds are added up in this order."""
    graph = trace(Norms(), {"x": torch.zeros(3, 2)})
    index = {node.name: number for number, node in enumerate(graph.ops)}
    expected = [(f"norms.{layer}.{kind}", {layer}) for layer in range(8) for kind in ("bias", "weight")]
    assert list(state_readers(graph, index).items()) == expected
