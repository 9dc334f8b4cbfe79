"""AlexNet (Krizhevsky, Sutskever and Hinton 2012), in the single-tower form.

    partitioner plan examples/alexnet.py:alexnet --cluster local:2 --batch-size 32

Most of its time is in the convolutions and most of its parameters are in the fully connected layers, so that
balancing one of them unbalances the other.

Shapes: a tuple (images (batch, 3, size, size), labels (batch,)).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partitioner.workloads import Workload


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
        side = size
        for kernel, stride, padding in ((11, 4, 2), (3, 2, 0), (3, 2, 0), (3, 2, 0)):
            side = (side + 2 * padding - kernel) // stride + 1
        self.classifier = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(e * side * side, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images).flatten(1))  # type: ignore[no-any-return]


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
    model = AlexNet(classes, width, size, dropout)
    example = (torch.randn(batch, 3, size, size), torch.randint(classes, (batch,)))
    return Workload(model, example, label_loss, name="alexnet")
