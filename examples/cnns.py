"""Large convolutional networks that people ask a card to hold: VGG-16, GoogLeNet, three ResNets, Inception-ResNet-v2.

    partitioner fit examples/cnns.py:vgg16 examples/cnns.py:resnet50 --cluster TitanX-12GB:1,2,4 --strategy layer

The published architectures of plain torch modules, with as many parameters as torchvision's (Inception-ResNet-v2: timm's),
without the auxiliary classifiers of two of them. ``width`` scales the channels of all layers, ``size`` the images' sides:
a tiny one of the same shape is quickly verified.

Shapes: a tuple (images (batch, 3, size, size), labels (batch,)).
"""

from __future__ import annotations

from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partitioner.models.workload import Workload

Kernel = int | tuple[int, int]


class ConvNorm(nn.Sequential):
    """A convolution without bias, batch norm, and a ReLU unless told otherwise."""

    def __init__(
        self, inputs: int, outputs: int, kernel: Kernel, stride: int, padding: Kernel, relu: bool
    ) -> None:
        convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
        super().__init__(convolution, nn.BatchNorm2d(outputs), *([nn.ReLU(inplace=True)] if relu else []))


class Beside(nn.ModuleList):
    """Branches that read the same; what they make side by side, as channels."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self], dim=1)


class Residual(nn.Module):
    """``shortcut(x) + scale * body(x)``, and a ReLU unless told otherwise."""

    def __init__(self, body: nn.Module, shortcut: nn.Module, scale: float, relu: bool) -> None:
        super().__init__()
        self.body, self.shortcut, self.scale, self.relu = body, shortcut, scale, relu

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        y = self.shortcut(x) + (y if self.scale == 1 else self.scale * y)
        return F.relu(y, inplace=True) if self.relu else y


class Tower(nn.Sequential):
    """Layers behind each other, ``width`` times as wide as published; ``channels`` are those that the last one makes."""

    def __init__(self, channels: int, width: float) -> None:
        super().__init__()
        self.channels, self.width = channels, width

    def branch(self) -> Tower:
        """Begin a tower of its own that reads what this one makes."""
        return Tower(self.channels, self.width)

    def scaled(self, channels: int) -> int:
        """Return so many published channels at this width."""
        return max(2, round(self.width * channels))

    def put(self, *layers: nn.Module, channels: int = 0) -> Self:
        """Append layers; ``channels``: those that they make, where these are others."""
        self.extend(layers)
        self.channels = channels or self.channels
        return self

    def conv(
        self,
        channels: int,
        kernel: Kernel,
        stride: int = 1,
        padding: Kernel | None = None,
        *,
        relu: bool = True,
    ) -> Self:
        """Append a ``ConvNorm``, padded by half its kernel unless told otherwise."""
        high, wide = (kernel, kernel) if isinstance(kernel, int) else kernel
        pad = (high // 2, wide // 2) if padding is None else padding
        outputs = self.scaled(channels)
        return self.put(ConvNorm(self.channels, outputs, kernel, stride, pad, relu), channels=outputs)

    def beside(self, *branches: Tower) -> Self:
        """Append branches that read the same."""
        return self.put(Beside(branches), channels=sum(branch.channels for branch in branches))

    def plus(
        self, body: Tower, shortcut: Tower | None = None, scale: float = 1, *, relu: bool = True
    ) -> Self:
        """Append a body and its shortcut: what comes in, unless given."""
        return self.put(Residual(body, shortcut or nn.Identity(), scale, relu), channels=body.channels)

    def classify(self, classes: int, dropout: float = 0.0) -> Self:
        """Append the mean of every channel, and a linear classifier."""
        drop = [nn.Dropout(dropout)] if dropout else []
        return self.put(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), *drop, nn.Linear(self.channels, classes), channels=classes
        )


def vgg16(
    classes: int = 1000,
    width: float = 1.0,
    size: int = 224,
    dropout: float = 0.5,
    batch: int = 2,
    seed: int = 0,
) -> Workload:
    """Simonyan and Zisserman 2014: 138,357,544 parameters. ``size``: a multiple of 32."""
    torch.manual_seed(seed)
    tower = Tower(3, width)
    for channels, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(depth):
            inputs, outputs = tower.channels, tower.scaled(channels)
            tower.put(nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(inplace=True), channels=outputs)
        tower.put(nn.MaxPool2d(2))
    tower.put(nn.Flatten(), channels=tower.channels * (size // 32) ** 2)
    hidden = tower.scaled(4096)
    for _ in range(2):
        linear = nn.Linear(tower.channels, hidden)
        tower.put(linear, nn.ReLU(inplace=True), nn.Dropout(dropout), channels=hidden)
    return _workload(tower.put(nn.Linear(hidden, classes)), classes, size, batch, "vgg16")


INCEPTIONS = (
    (64, 96, 128, 16, 32, 32),
    (128, 128, 192, 32, 96, 64),
    (192, 96, 208, 16, 48, 64),
    (160, 112, 224, 24, 64, 64),
    (128, 128, 256, 24, 64, 64),
    (112, 144, 288, 32, 64, 64),
    (256, 160, 320, 32, 128, 128),
    (256, 160, 320, 32, 128, 128),
    (384, 192, 384, 48, 128, 128),
)
"""Channels in GoogLeNet's modules (table 1 of the paper): first branch, two of the second, two of the third, the pool's."""


def googlenet(
    classes: int = 1000,
    width: float = 1.0,
    size: int = 224,
    dropout: float = 0.2,
    batch: int = 2,
    seed: int = 0,
) -> Workload:
    """Szegedy et al. 2014: 6,624,904 parameters, with batch norm and 3x3 in the third branches, as torchvision has it."""
    torch.manual_seed(seed)
    tower = Tower(3, width).conv(64, 7, 2).put(_halving()).conv(64, 1).conv(192, 3).put(_halving())
    for number, (one, narrow, second, narrower, third, pooled) in enumerate(INCEPTIONS):
        tower.beside(
            tower.branch().conv(one, 1),
            tower.branch().conv(narrow, 1).conv(second, 3),
            tower.branch().conv(narrower, 1).conv(third, 3),
            tower.branch().put(nn.MaxPool2d(3, 1, 1)).conv(pooled, 1),
        )
        if number in (1, 6):
            tower.put(_halving())
    return _workload(tower.classify(classes, dropout), classes, size, batch, "googlenet")


def _halving() -> nn.Module:
    return nn.MaxPool2d(3, 2, ceil_mode=True)


def resnet50(
    classes: int = 1000, width: float = 1.0, size: int = 224, batch: int = 2, seed: int = 0
) -> Workload:
    """He et al. 2015: 25,557,032 parameters."""
    return _resnet((3, 4, 6, 3), classes, width, size, batch, seed)


def resnet101(
    classes: int = 1000, width: float = 1.0, size: int = 224, batch: int = 2, seed: int = 0
) -> Workload:
    """He et al. 2015: 44,549,160 parameters."""
    return _resnet((3, 4, 23, 3), classes, width, size, batch, seed)


def resnet152(
    classes: int = 1000, width: float = 1.0, size: int = 224, batch: int = 2, seed: int = 0
) -> Workload:
    """He et al. 2015: 60,192,808 parameters."""
    return _resnet((3, 8, 36, 3), classes, width, size, batch, seed)


def _resnet(
    depths: tuple[int, ...], classes: int, width: float, size: int, batch: int, seed: int
) -> Workload:
    """Make a ResNet of bottlenecks that stride in their 3x3 convolution, as torchvision has it."""
    torch.manual_seed(seed)
    tower = Tower(3, width).conv(64, 7, 2).put(nn.MaxPool2d(3, 2, 1))
    for level, depth in enumerate(depths):
        inner, outputs = 64 << level, 256 << level
        for number in range(depth):
            stride = 2 if level and not number else 1
            body = tower.branch().conv(inner, 1).conv(inner, 3, stride).conv(outputs, 1, relu=False)
            tower.plus(body, None if number else tower.branch().conv(outputs, 1, stride, relu=False))
    name = f"resnet{3 * sum(depths) + 2}"
    return _workload(tower.classify(classes), classes, size, batch, name)


def inception_resnet_v2(
    classes: int = 1000,
    width: float = 1.0,
    size: int = 299,
    dropout: float = 0.2,
    batch: int = 2,
    seed: int = 0,
) -> Workload:
    """Szegedy et al. 2016: 55,843,464 parameters. ``size``: 75 or more."""
    torch.manual_seed(seed)
    tower = Tower(3, width).conv(32, 3, 2, 0).conv(32, 3, 1, 0).conv(64, 3).put(nn.MaxPool2d(3, 2))
    tower.conv(80, 1).conv(192, 3, 1, 0).put(nn.MaxPool2d(3, 2))
    new = tower.branch
    average = nn.AvgPool2d(3, 1, 1, count_include_pad=False)
    tower.beside(
        new().conv(96, 1),
        new().conv(48, 1).conv(64, 5),
        new().conv(64, 1).conv(96, 3).conv(96, 3),
        new().put(average).conv(64, 1),
    )
    for _ in range(10):
        _mixed(
            tower,
            0.17,
            new().conv(32, 1),
            new().conv(32, 1).conv(32, 3),
            new().conv(32, 1).conv(48, 3).conv(64, 3),
        )
    tower.beside(
        new().conv(384, 3, 2, 0),
        new().conv(256, 1).conv(256, 3).conv(384, 3, 2, 0),
        new().put(nn.MaxPool2d(3, 2)),
    )
    for _ in range(20):
        _mixed(tower, 0.1, new().conv(192, 1), new().conv(128, 1).conv(160, (1, 7)).conv(192, (7, 1)))
    tower.beside(
        new().conv(256, 1).conv(384, 3, 2, 0),
        new().conv(256, 1).conv(288, 3, 2, 0),
        new().conv(256, 1).conv(288, 3).conv(320, 3, 2, 0),
        new().put(nn.MaxPool2d(3, 2)),
    )
    for number in range(10):
        branches = new().conv(192, 1), new().conv(192, 1).conv(224, (1, 3)).conv(256, (3, 1))
        _mixed(tower, 0.2 if number < 9 else 1.0, *branches, relu=number < 9)
    return _workload(
        tower.conv(1536, 1).classify(classes, dropout), classes, size, batch, "inception_resnet_v2"
    )


def _mixed(tower: Tower, scale: float, *branches: Tower, relu: bool = True) -> None:
    """Append branches, widened to what they read and added to it."""
    body = tower.branch().beside(*branches)
    tower.plus(
        body.put(nn.Conv2d(body.channels, tower.channels, 1), channels=tower.channels), None, scale, relu=relu
    )


def label_loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross-entropy over the images."""
    return F.cross_entropy(output, batch[1])


def _workload(model: nn.Module, classes: int, size: int, batch: int, name: str) -> Workload:
    example = (torch.randn(batch, 3, size, size), torch.randint(classes, (batch,)))
    return Workload(model, example, label_loss, name=name)
