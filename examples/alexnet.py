"""AlexNet (Krizhevsky, Sutskever and Hinton 2012), in the single-tower form and in the published one of two towers.

    partitioner plan examples/alexnet.py:alexnet --cluster local:2 --batch-size 32
    partitioner plan examples/alexnet.py:two_towers --cluster local:2 --strategy free --batch-size 32

Most of its time is in the convolutions and most of its parameters are in the fully connected layers, so that
balancing one of them unbalances the other. The two towers were made for two GPUs: half of each convolution's kernels
are in each, and they read from each other in the third convolution and in the fully connected layers only.

Shapes: a tuple (images (batch, 3, size, size), labels (batch,)).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partitioner.models.workload import Workload


class AlexNet(nn.Module):
    """Five convolutions, three fully connected layers; ``width`` 1.0 is the published size."""

    def __init__(self, classes: int, width: float, size: int, dropout: float) -> None:
        super().__init__()
        a, b, c, d, e = (max(4, int(width * n)) for n in (96, 256, 384, 384, 256))
        hidden = max(8, int(width * 4096))
        self.features = nn.Sequential(
            nn.Conv2d(3, a, 11, stride=4, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(a, b, 5, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(b, c, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(c, d, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(d, e, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2),
        )
        self.classifier = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(e * _side(size) ** 2, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images).flatten(1))  # type: ignore[no-any-return]


class LowerTower(nn.Sequential):
    """Half of the kernels of convolutions 1 and 2, which see their own tower only."""

    def __init__(self, width: float) -> None:
        a, b, *_ = _tower_channels(width)
        super().__init__(
            nn.Conv2d(3, a, 11, stride=4, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(a, b, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2),
        )


class UpperTower(nn.Module):
    """Half of the kernels of convolution 3, which sees both towers, and of 4 and 5, which see their own again."""

    def __init__(self, width: float) -> None:
        super().__init__()
        _, b, c, d, e = _tower_channels(width)
        self.layers = nn.Sequential(
            nn.Conv2d(2 * b, c, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(c, d, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(d, e, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2),
        )

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """Each tower puts both together for itself: what comes from its own device need not travel."""
        return self.layers(torch.cat([left, right], dim=1))  # type: ignore[no-any-return]


class TwoTowers(nn.Module):
    """Two towers, and fully connected layers that read both."""

    def __init__(self, classes: int, width: float, size: int, dropout: float) -> None:
        super().__init__()
        hidden = max(8, int(width * 4096))
        self.lower = nn.ModuleList(LowerTower(width) for _ in range(2))
        self.upper = nn.ModuleList(UpperTower(width) for _ in range(2))
        self.classifier = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(2 * _tower_channels(width)[-1] * _side(size) ** 2, hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        left, right = (tower(images) for tower in self.lower)
        features = torch.cat([tower(left, right) for tower in self.upper], dim=1)
        return self.classifier(features.flatten(1))  # type: ignore[no-any-return]


def _tower_channels(width: float) -> list[int]:
    return [max(2, int(width * n)) for n in (48, 128, 192, 192, 128)]


def _side(size: int) -> int:
    """Pixels per side after the first convolution and the three poolings."""
    for kernel, stride, padding in ((11, 4, 2), (3, 2, 0), (3, 2, 0), (3, 2, 0)):
        size = (size + 2 * padding - kernel) // stride + 1
    return size


def label_loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross-entropy over the images."""
    return F.cross_entropy(output, batch[1])


def alexnet(
    classes: int = 1000,
    width: float = 1.0,
    size: int = 224,
    dropout: float = 0.5,
    batch: int = 2,
    seed: int = 0,
) -> Workload:
    """``size`` (pixels per side) at least 63."""
    torch.manual_seed(seed)
    return _workload(AlexNet(classes, width, size, dropout), classes, size, batch, "alexnet")


def two_towers(
    classes: int = 1000,
    width: float = 1.0,
    size: int = 224,
    dropout: float = 0.5,
    batch: int = 2,
    seed: int = 0,
) -> Workload:
    """``size`` (pixels per side) at least 63."""
    torch.manual_seed(seed)
    return _workload(TwoTowers(classes, width, size, dropout), classes, size, batch, "alexnet_two_towers")


def _workload(model: nn.Module, classes: int, size: int, batch: int, name: str) -> Workload:
    example = (torch.randn(batch, 3, size, size), torch.randint(classes, (batch,)))
    return Workload(model, example, label_loss, name=name)
