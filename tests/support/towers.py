"""A model of two towers between which nothing goes: what stages can do that share no value.

x ─ left ─ loss with y
x ─ right ─ metric
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from passes.graph.graph import OpGraph
from passes.trace.trace import trace


class Towers(nn.Module):
    """x [b, 8] -> left, right [b, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Tower(), Tower()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"left": self.left(x), "right": self.right(x)}


class Tower(nn.Module):
    """[b, 8] -> [b, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.relu(self.up(x)))
        return y


def loss_fn(output: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Of the left tower; the right one makes a metric."""
    return ((output["left"] - batch["y"]) ** 2).mean(), {"right": output["right"].abs().mean()}


def batch(samples: int) -> dict[str, Tensor]:
    return {name: torch.randn(samples, 8, dtype=torch.float64) for name in ("x", "y")}


def traced(model: nn.Module) -> OpGraph:
    return trace(model, batch(4), loss_fn=loss_fn)


def tower_of(graph: OpGraph) -> dict[str, int]:
    """0 for the ops of the loss, 1 for those of the metric."""
    metric = next(output.node for output in graph.outputs if output.kind == "metric")
    right = {metric}
    for node in reversed(graph.ops):
        if any(user.name in right for user in node.users):
            right.add(node.name)
    return {node.name: int(node.name in right) for node in graph.ops}
