"""Every loss of torch.nn, with the reductions and targets that are seen least, and losses that people write by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.odd_models.case import SAMPLES, floats, loss, model

B = SAMPLES


def _classes(high: int = 6, *shape: int) -> Any:
    return lambda: torch.randint(0, high, (B, *shape))


def _signs(*shape: int) -> Any:
    return lambda: torch.randint(0, 2, (B, *shape)) * 2.0 - 1.0


def _binary(*shape: int) -> Any:
    return lambda: torch.randint(0, 2, (B, *shape)).double()


def _ignored() -> Tensor:
    target = torch.randint(0, 6, (B,))
    target[0] = target[5] = -100
    return target


def _some(*shape: int) -> Any:
    return floats(*shape)


def _three(y: Tensor) -> tuple[Tensor, ...]:
    return y, y.roll(1, 1), y.flip(1) * 0.5


def _ctc(y: Tensor) -> Tensor:
    """Logits of 3 positions of 4 labels, positions first."""
    return y.view(-1, 3, 4).transpose(0, 1).log_softmax(-1)


def _ctc_targets() -> tuple[Tensor, ...]:
    return torch.randint(1, 4, (B, 2)), torch.full((B,), 3), torch.randint(1, 3, (B,))


CHAPTER = {
    "L1Loss": loss(nn.L1Loss, _some(6)),
    "MSELoss": loss(nn.MSELoss, _some(6)),
    "MSELoss, sum": loss(lambda: nn.MSELoss(reduction="sum"), _some(6)),
    "CrossEntropyLoss": loss(nn.CrossEntropyLoss, _classes()),
    "CrossEntropyLoss, ignored labels": loss(nn.CrossEntropyLoss, _ignored),
    "CrossEntropyLoss, weighted and smooth": loss(
        lambda: nn.CrossEntropyLoss(
            weight=torch.tensor([1.0, 2, 3, 1, 0.5, 1]), label_smoothing=0.1, reduction="sum"
        ),
        _classes(),
    ),
    "CrossEntropyLoss, weighted mean": loss(
        lambda: nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2, 3, 1, 0.5, 1])), _classes()
    ),
    "CrossEntropyLoss of probabilities": loss(nn.CrossEntropyLoss, lambda: torch.randn(B, 6).softmax(-1)),
    "CrossEntropyLoss, per sample": loss(
        lambda: lambda y, t: (F.cross_entropy(y, t, reduction="none") * torch.tensor(0.3)).mean(), _classes()
    ),
    "CTCLoss": loss(lambda: nn.CTCLoss(zero_infinity=True), _ctc_targets, 12, _ctc),
    "CTCLoss, sum": loss(lambda: nn.CTCLoss(reduction="sum"), _ctc_targets, 12, _ctc),
    "NLLLoss": loss(nn.NLLLoss, _classes(), before=lambda y: y.log_softmax(-1)),
    "NLLLoss over places": loss(nn.NLLLoss, _classes(3, 4), 12, lambda y: y.view(-1, 3, 4).log_softmax(1)),
    "PoissonNLLLoss": loss(
        lambda: nn.PoissonNLLLoss(full=True), lambda: torch.randint(0, 5, (B, 6)).double()
    ),
    "GaussianNLLLoss": loss(nn.GaussianNLLLoss, lambda: (torch.randn(B, 6), torch.rand(B, 6) + 0.1)),
    "KLDivLoss": loss(
        lambda: nn.KLDivLoss(reduction="batchmean"),
        lambda: torch.randn(B, 6).softmax(-1),
        before=lambda y: y.log_softmax(-1),
    ),
    "KLDivLoss, log target": loss(
        lambda: nn.KLDivLoss(log_target=True),
        lambda: torch.randn(B, 6).log_softmax(-1),
        before=lambda y: y.log_softmax(-1),
    ),
    "BCELoss": loss(nn.BCELoss, _binary(6), before=torch.sigmoid),
    "BCEWithLogitsLoss": loss(lambda: nn.BCEWithLogitsLoss(pos_weight=torch.arange(1.0, 7.0)), _binary(6)),
    "MarginRankingLoss": loss(
        lambda: nn.MarginRankingLoss(0.2), _signs(3), before=lambda y: (y[:, :3], y[:, 3:])
    ),
    "HingeEmbeddingLoss": loss(nn.HingeEmbeddingLoss, _signs(6)),
    "MultiLabelMarginLoss": loss(nn.MultiLabelMarginLoss, lambda: torch.randint(-1, 6, (B, 6))),
    "HuberLoss": loss(lambda: nn.HuberLoss(delta=0.3), _some(6)),
    "SmoothL1Loss": loss(lambda: nn.SmoothL1Loss(beta=0.4, reduction="sum"), _some(6)),
    "SoftMarginLoss": loss(nn.SoftMarginLoss, _signs(6)),
    "MultiLabelSoftMarginLoss": loss(nn.MultiLabelSoftMarginLoss, _binary(6)),
    "CosineEmbeddingLoss": loss(
        lambda: nn.CosineEmbeddingLoss(0.1), _signs(), before=lambda y: (y, y.flip(1))
    ),
    "MultiMarginLoss": loss(lambda: nn.MultiMarginLoss(p=2, margin=0.7), _classes()),
    "TripletMarginLoss": loss(lambda: nn.TripletMarginLoss(margin=4.0, swap=True), lambda: (), before=_three),
    "TripletMarginWithDistanceLoss": loss(
        lambda: nn.TripletMarginWithDistanceLoss(
            distance_function=lambda a, b: 1 - F.cosine_similarity(a, b)
        ),
        lambda: (),
        before=_three,
    ),
}


def _contrastive(output: Tensor, batch: object) -> Tensor:
    unit = F.normalize(output, dim=1)
    scores = unit @ unit.roll(1, 1).T / 0.3
    return F.cross_entropy(scores, torch.arange(scores.shape[0]))


def _dice(output: Tensor, batch: object) -> Tensor:
    p = output.sigmoid()
    t = (p > 0.4).double()
    return 1 - (2 * (p * t).sum((0, 1)) + 1) / (p.sum() + t.sum() + 1)


def _focal(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    ce = F.cross_entropy(output, batch["y"], reduction="none")
    return ((1 - (-ce).exp()) ** 2 * ce).mean()


def _masked_mean(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    mask = (batch["y"] > 1).double()
    return ((output**2).mean(1) * mask).sum() / mask.sum().clamp(min=1)


def _labelled() -> dict[str, Tensor]:
    return {"x": torch.randn(B, 6), "y": torch.randint(0, 6, (B,))}


def _three_layers(m: Any, x: Tensor, y: Tensor | None = None) -> Tensor:
    return m.c(m.b(m.a(x).tanh()).tanh())


BY_HAND = {
    "LinearCrossEntropyLoss": model(
        lambda m, x, y: m.l(m.a(x).tanh(), y), _labelled, None, lambda: {"l": nn.LinearCrossEntropyLoss(6, 6)}
    ),
    "in-batch contrast": model(_three_layers, loss=_contrastive),
    "dice": model(_three_layers, loss=_dice),
    "focal": model(_three_layers, _labelled, _focal),
    "mean over a mask": model(_three_layers, _labelled, _masked_mean),
    "weight decay inside": model(
        lambda m, x: (_three_layers(m, x) ** 2).mean() + 0.01 * sum((p**2).sum() for p in m.parameters()),
        loss=None,
    ),
    "a pair of losses": model(
        lambda m, x: _three_layers(m, x),
        loss=lambda y, b: ((y**2).mean() + y.abs().mean(), {"largest": y.max()}),
    ),
    "hardest example": model(_three_layers, loss=lambda y, b: (y**2).mean(1).max()),
    "top half of the batch": model(
        _three_layers, loss=lambda y, b: (y**2).mean(1).topk(max(1, y.shape[0] // 2)).values.mean()
    ),
    "variance over the batch": model(
        _three_layers, loss=lambda y, b: F.relu(1 - y.std(0)).mean() + (y**2).mean()
    ),
    "median of the batch": model(_three_layers, loss=lambda y, b: (y**2).mean(1).median()),
    "sum of squares": model(_three_layers, loss=lambda y, b: (y**2).sum()),
    "loss of nothing": model(_three_layers, loss=lambda y, b: (y * 0).sum()),
    "a loss that is NaN": model(_three_layers, loss=lambda y, b: (y * float("nan")).mean()),
    "NaN in some samples, nanmean": model(
        _three_layers,
        loss=lambda y, b: torch.where(y > 0.5, torch.full_like(y, float("nan")), y**2).nanmean(),
    ),
    "a loss that is infinite": model(_three_layers, loss=lambda y, b: (y**2).mean() + float("inf")),
    "a gradient as penalty": model(lambda m, x: _penalty(m, x), loss=None),
    "wasserstein of sorted": model(
        _three_layers, loss=lambda y, b: (y.sort(0).values - y.sort(1).values).abs().mean()
    ),
}


def _penalty(m: Any, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    y = _three_layers(m, x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return (y**2).mean() + ((slope.norm(dim=1) - 1) ** 2).mean()


CHAPTERS = {"losses": CHAPTER, "losses by hand": BY_HAND}
