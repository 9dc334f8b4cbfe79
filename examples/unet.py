"""A U-Net: an encoder and a decoder joined by skips (Ronneberger, Fischer and Brox 2015).

    partitioner plan examples/unet.py:unet --cluster local:3 --batch-size 16

Every skip crosses all the stages between its encoder level and its decoder level: what a pipeline cut costs
here depends on which tensors it separates, not on depth alone.

Shapes: images (batch, 3, size, size), labels (batch, size, size) with a class per pixel.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partitioner.models.workload import Workload


class DoubleConv(nn.Module):
    """Two 3×3 convolutions, each normalized over groups of channels."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.first_norm = nn.GroupNorm(4, outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.second_norm = nn.GroupNorm(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(x)))


class UNet(nn.Module):
    """Levels of ``channels``, ``2·channels``, ... down to the bottom and back up, a skip per level."""

    def __init__(self, channels: int, depth: int, classes: int) -> None:
        super().__init__()
        widths = [channels * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(DoubleConv(a, b) for a, b in pairwise([3, *widths[:-1]]))
        self.bottom = DoubleConv(widths[-2], widths[-1])
        upward = list(reversed(widths))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in pairwise(upward))
        self.up = nn.ModuleList(DoubleConv(2 * b, b) for b in upward[1:])
        self.head = nn.Conv2d(channels, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        skips = []
        x = images
        for level in self.down:
            x = level(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for grow, level, skip in zip(self.grow, self.up, reversed(skips), strict=True):
            x = level(torch.cat([grow(x), skip], dim=1))
        return self.head(x)  # type: ignore[no-any-return]


def pixel_loss(output: Tensor, batch: dict[str, Any]) -> Tensor:
    """Mean cross-entropy over all pixels."""
    return F.cross_entropy(output, batch["labels"])


def unet(
    channels: int = 32, depth: int = 4, size: int = 128, classes: int = 4, batch: int = 2, seed: int = 0
) -> Workload:
    """``size`` must be divisible by 2**depth."""
    torch.manual_seed(seed)
    model = UNet(channels, depth, classes)
    example = {
        "images": torch.randn(batch, 3, size, size),
        "labels": torch.randint(classes, (batch, size, size)),
    }
    return Workload(model, example, pixel_loss, name="unet")
