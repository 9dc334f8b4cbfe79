"""A deep locally connected network: five layers, no shared weights (as in figure 1 of Dean et al. 2012, DistBelief).

    partitioner plan examples/locally_connected.py:locally_connected --cluster local:4 --strategy free --batch-size 32

Each output location sees a small window of the layer below, with weights of its own. With columns cut into stripes over
machines, only locations at the border of a stripe read from the neighbour: traffic grows with the border, not the area.

Shapes: a tuple (images (batch, 3, size, size), labels (batch,)). Windows do not reach over the border, so every layer
is ``window - 1`` rows and columns smaller than the one below.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partitioner.models.workload import Workload

LAYERS = 5


class LocallyConnected(nn.Module):
    """y[b, o, i, j] = relu(Σ_{c, u, v} weight[i, j, o, c, u, v] · x[b, c, i + u, j + v] + bias[o, i, j])."""

    def __init__(self, inputs: int, outputs: int, size: int, window: int) -> None:
        super().__init__()
        side = size - window + 1
        scale = (inputs * window * window) ** -0.5
        self.window = window
        self.weight = nn.Parameter(scale * torch.randn(side, side, outputs, inputs, window, window))
        self.bias = nn.Parameter(torch.zeros(outputs, side, side))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inputs, size, size) -> (batch, outputs, size - window + 1, the same).

        Columns are unfolded first: blocks of columns then exchange columns, not rows of windows.
        """
        windows = x.unfold(3, self.window, 1).unfold(2, self.window, 1)
        return torch.relu(torch.einsum("bcijvu,ijocuv->boij", windows, self.weight) + self.bias)


class LocallyConnectedNet(nn.Module):
    """``LAYERS`` locally connected layers, then a linear classifier."""

    def __init__(self, channels: int, size: int, window: int, classes: int) -> None:
        super().__init__()
        sides = [size - layer * (window - 1) for layer in range(LAYERS)]
        self.layers = nn.ModuleList(
            LocallyConnected(3 if layer == 0 else channels, channels, side, window)
            for layer, side in enumerate(sides)
        )
        last = sides[-1] - window + 1
        self.classify = nn.Linear(channels * last * last, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = images
        for layer in self.layers:
            x = layer(x)
        return self.classify(x.flatten(1))  # type: ignore[no-any-return]


def label_loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross-entropy over the images."""
    return F.cross_entropy(output, batch[1])


def locally_connected(
    channels: int = 8, size: int = 42, window: int = 3, classes: int = 10, batch: int = 2, seed: int = 0
) -> Workload:
    """``size``: pixels per side, more than 5 · (``window`` - 1)."""
    torch.manual_seed(seed)
    model = LocallyConnectedNet(channels, size, window, classes)
    example = (torch.randn(batch, 3, size, size), torch.randint(classes, (batch,)))
    return Workload(model, example, label_loss, name="locally_connected")
