"""Models with parts that no export can trace, and training them without a plan.

first (b, 8) -> (b, 8)     part: what cannot be traced     last -> (b, 4)     loss: mean squares, or one of its own
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

SAMPLES, STEPS = 8, 3


class Rounded(torch.autograd.Function):
    """Straight through: rounds forward, passes gradients on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: float) -> Tensor:
        return torch.round(x / step) * step

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return -ctx.scale * gradients[0], None


class Noisy(torch.autograd.Function):
    """Adds noise to gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] + 0.1 * torch.randn_like(gradients[0])


class NoisyLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        noisy: Tensor = Noisy.apply(super().forward(x))
        return noisy


class FusedCrossEntropy(torch.autograd.Function):
    """Keeps probabilities, not logits; its backward is written out."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        probabilities = torch.softmax(logits, -1)
        ctx.save_for_backward(probabilities, target)
        return -torch.log(probabilities.gather(-1, target[:, None])).mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        probabilities, target = ctx.saved_tensors
        hit = F.one_hot(target, probabilities.shape[-1])
        return gradients[0] * (probabilities - hit) / len(target), None


class Quantizer(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        rounded: Tensor = Rounded.apply(super().forward(x), 0.25)
        return rounded.tanh()


class Reversal(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        turned: Tensor = Reversed.apply(super().forward(x), 0.5)
        return turned


class Kept(nn.Module):
    """A linear layer for the samples whose sum is positive: as many as there are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        keep = x.sum(-1) > 0
        result = torch.zeros_like(x)
        result[keep] = self.linear(x[keep])
        return result


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        chosen: Tensor = torch.cond(x.sum() > 0, lambda t: self.left(t), lambda t: self.right(t).relu(), (x,))
        return chosen


class PythonIf(nn.Module):
    """Also writes a buffer and counts in it."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(self.left(x))
        return normed if normed.abs().sum() > 0.001 else -normed


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=x.shape[1])[0]


class Net(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.first, self.part, self.last = nn.Linear(8, 8), part, nn.Linear(8, 4)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        hidden = self.first(x)
        hidden = self.part(hidden) if lengths is None else self.part(hidden, lengths)
        result: Tensor = self.last(hidden)
        return result


def squares(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return ((output - batch["wanted"]) ** 2).mean()


def fused(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    loss: Tensor = FusedCrossEntropy.apply(output, batch["label"])
    return loss


def ctc(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    scores = output.log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(scores, batch["targets"], batch["steps"], batch["sizes"])


class Forces(nn.Module):
    """An energy, and its derivative by the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 16), nn.Linear(16, 1)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        positions = positions.detach().requires_grad_()
        energy = self.b(F.silu(self.a(positions))).sum((1, 2))
        (slope,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
        return energy, -slope


def force_loss(output: tuple[Tensor, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    return (output[0] - batch["energy"]).square().mean() + (output[1] - batch["force"]).square().mean()


@dataclass(frozen=True)
class Case:
    """``coupled``: samples of a micro-batch depend on each other, so a step is one micro-batch."""

    part: Callable[[], nn.Module]
    loss: Callable[[Any, Any], Tensor] = squares
    shape: tuple[int, ...] = (8,)
    coupled: bool = False

    def model(self) -> Net:
        torch.manual_seed(3)
        return Net(self.part()).double()

    def batch(self, seed: int = 0) -> dict[str, Tensor]:
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(SAMPLES, *self.shape, generator=g).double()
        batch = {"x": x}
        if self.loss is squares:
            batch["wanted"] = torch.randn(SAMPLES, *self.shape[:-1], 4, generator=g).double()
        if self.loss is fused:
            batch["label"] = torch.randint(0, 4, (SAMPLES,), generator=g)
        if self.loss is ctc:
            batch["targets"] = torch.randint(1, 4, (SAMPLES, 2), generator=g)
            batch["steps"] = torch.full((SAMPLES,), self.shape[0])
            batch["sizes"] = torch.full((SAMPLES,), 2)
        if self.part is Packed:
            batch["lengths"] = torch.tensor([5, 2, 4, 1, 5, 3, 3, 5])
        return batch


NOISY = Case(partial(NoisyLinear, 8, 8))
"""No plain loop draws the numbers that a plan draws."""

CASES = {
    "quantizer": Case(partial(Quantizer, 8, 8)),
    "reversal": Case(partial(Reversal, 8, 8)),
    "fused": Case(partial(Quantizer, 8, 8), fused),
    "boolean": Case(Kept),
    "cond": Case(Branches, coupled=True),
    "python-if": Case(PythonIf, coupled=True),
    "packed": Case(Packed, shape=(5, 8)),
    "ctc": Case(partial(nn.Linear, 8, 8), ctc, shape=(6, 8)),
}


def trained(name: str) -> tuple[list[float], dict[str, Tensor]]:
    """Train the user's own module, whole batches: losses and state after ``STEPS`` steps."""
    case = CASES[name]
    model, losses = case.model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for seed in range(STEPS):
        batch = case.batch(seed)
        optimizer.zero_grad()
        output = model(batch["x"], batch["lengths"]) if "lengths" in batch else model(batch["x"])
        loss = case.loss(output, batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {key: value.detach() for key, value in model.state_dict().items()}
