"""Small models with one thing wrong each, for the bad inputs; loaded as ``bad_workloads.py:NAME``. ``net`` is right."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from partitioner import Workload


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.second = nn.Linear(width, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.second(self.first(x).relu()), y)


class NoLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(x)
        return out


class Branch(NoLoss):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = x + 1
        return super().forward(x).sum()


class FixedBatch(NoLoss):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(4, 4)).sum()


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(4, 4), "y": torch.zeros(4, dtype=torch.long)}


def net(width: int = 8) -> Workload:
    return Workload(Net(width), batch())


def talks() -> Workload:
    print("chatter of a data loader")  # noqa: T201
    return net()


def raises() -> Workload:
    raise RuntimeError("no such data set")


def exits() -> Workload:
    raise SystemExit("usage: train.py DATA")


def wrong_type() -> Any:
    return Net()


def required(width: int) -> Workload:
    return net(width)


def not_a_module() -> Workload:
    return Workload(len, batch())  # type: ignore[arg-type]


def no_loss() -> Workload:
    return Workload(NoLoss(), {"x": torch.randn(4, 4)})


def vector_loss() -> Workload:
    return Workload(NoLoss(), {"x": torch.randn(4, 4)}, loss_fn=lambda output, _: output.sum(1))


def integer_loss() -> Workload:
    return Workload(NoLoss(), {"x": torch.randn(4, 4)}, loss_fn=lambda output, _: output.argmax())


def loss_raises() -> Workload:
    return Workload(NoLoss(), {"x": torch.randn(4, 4)}, loss_fn=lambda output, _: output["loss"])


def branch() -> Workload:
    return Workload(Branch(), {"x": torch.randn(4, 4)})


def fixed_batch() -> Workload:
    return Workload(FixedBatch(), {"x": torch.randn(4, 4)})


def missing_input() -> Workload:
    return Workload(Net(), {"x": torch.randn(4, 4)})


def wrong_shape() -> Workload:
    return Workload(Net(), {"x": torch.randn(4, 5), "y": torch.zeros(4, dtype=torch.long)})


def no_tensors() -> Workload:
    return Workload(Net(), {})


def no_batch() -> Workload:
    return Workload(NoLoss(), {"x": torch.tensor(1.0)}, loss_fn=lambda output, _: output.sum())


not_callable = 3
