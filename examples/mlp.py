"""A multilayer perceptron: pairs of linear layers, whose hidden neurons can be shared out unevenly over unlike devices.

    partitioner plan examples/mlp.py:mlp --cluster local:2 --strategy free --batch-size 64

Shapes: a tuple (features (batch, inputs), labels (batch,)).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partitioner.models.workload import Workload


class Pair(nn.Module):
    """``up`` makes ``hidden`` neurons, ``down`` reads them: a device with a part of them makes a part of the sum."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """``pairs`` pairs, then a linear classifier."""

    def __init__(self, inputs: int, hidden: int, pairs: int, classes: int) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(Pair(inputs, hidden) for _ in range(pairs))
        self.classify = nn.Linear(inputs, classes)

    def forward(self, features: Tensor) -> Tensor:
        x = features
        for pair in self.pairs:
            x = pair(x)
        return self.classify(x)  # type: ignore[no-any-return]


def label_loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross-entropy over the samples."""
    return F.cross_entropy(output, batch[1])


def mlp(
    inputs: int = 512, hidden: int = 4000, pairs: int = 2, classes: int = 10, batch: int = 2, seed: int = 0
) -> Workload:
    """``hidden`` neurons in each pair."""
    torch.manual_seed(seed)
    model = MLP(inputs, hidden, pairs, classes)
    example = (torch.randn(batch, inputs), torch.randint(classes, (batch,)))
    return Workload(model, example, label_loss, name="mlp")
