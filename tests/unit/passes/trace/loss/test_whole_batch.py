"""Losses in every form: put together from micro-batches they are the whole batch's, or the batch is not cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from passes.shard.couplings import couplings
from passes.trace.loss.reduction import with_normalizers
from passes.trace.trace import trace
from tests.unit.passes.trace.loss.test_token_mean import (
    IGNORED,
    VOCABULARY,
    Tagger,
    assert_like_whole_batch,
    batch,
    by_position,
    run,
)

Batch = Mapping[str, Tensor]
RARITY = torch.linspace(0.2, 30.0, VOCABULARY, dtype=torch.float64)


def labels(b: Batch, column: int = 0) -> Tensor:
    """One label a sample; some are ignored."""
    return b["labels"][:, column]


def mask(b: Batch) -> Tensor:
    return b["mask"][:, 0]


def each(o: Tensor, b: Batch) -> Tensor:
    """One loss a sample, 0 where its label is ignored."""
    return F.cross_entropy(o[:, 0], labels(b), reduction="none")


def guarded(o: Tensor, b: Batch) -> Tensor:
    count = mask(b).sum()
    return torch.where(count > 0, each(o, b).sum() / count.clamp(min=1), torch.zeros(()))


def surrogate(o: Tensor, b: Batch) -> Tensor:
    """A clipped policy objective: advantages are normalized over the batch, means are those of a mask."""
    reward = b["tokens"].double()
    advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
    ratio = by_position(o, b).exp()
    gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return -(gain * b["mask"]).sum() / b["mask"].sum() + 0.01 * o.square().mean()


def autoencoder(o: Tensor, b: Batch) -> Tensor:
    reconstruction = F.binary_cross_entropy_with_logits(o, torch.ones_like(o), reduction="sum")
    return reconstruction - 0.5 * (1 + o - o.square() - o.exp()).sum()


def heads(o: Tensor) -> list[Tensor]:
    return [o[:, column] for column in range(3)]


def losses_of_heads(o: Tensor, b: Batch) -> Tensor:
    return torch.stack([F.cross_entropy(h, labels(b, at)) for at, h in enumerate(heads(o))])


EXACT: dict[str, tuple[str, Callable[[Tensor, Batch], Tensor]]] = {
    # means over labels
    "one a sample": ("token_mean", lambda o, b: F.cross_entropy(o[:, 0], labels(b))),
    "weighted": ("token_mean", lambda o, b: F.cross_entropy(o[:, 0], b["tokens"][:, 0], weight=RARITY)),
    "module": (
        "token_mean",
        lambda o, b: nn.CrossEntropyLoss(RARITY, label_smoothing=0.1)(o[:, 0], labels(b)),
    ),
    "nll": ("token_mean", lambda o, b: F.nll_loss(F.log_softmax(o[:, 0], -1), labels(b))),
    "heads": ("token_mean", lambda o, b: losses_of_heads(o, b).sum()),
    "weighed heads": ("token_mean", lambda o, b: losses_of_heads(o, b) @ torch.tensor([1.0, 2, 3]).double()),
    "between two": ("token_mean", lambda o, b: torch.lerp(losses_of_heads(o, b)[0], o.square().mean(), 0.3)),
    "weights of the batch": (
        "token_mean",
        lambda o, b: F.cross_entropy(
            o[:, 0], labels(b), weight=1 / (1.0 + F.one_hot(b["tokens"], VOCABULARY).sum((0, 1)).double())
        ),
    ),
    "factor of the batch": ("token_mean", lambda o, b: F.cross_entropy(o[:, 0], labels(b)) * mask(b).mean()),
    # means by hand
    "by hand": ("token_mean", lambda o, b: (each(o, b) * mask(b)).sum() / mask(b).sum()),
    "clamped": ("token_mean", lambda o, b: each(o, b).sum() / mask(b).sum().clamp(min=1)),
    "eps": ("token_mean", lambda o, b: each(o, b).sum() / (mask(b).sum() + 1e-8)),
    "guarded": ("token_mean", guarded),
    "mean by mean": ("token_mean", lambda o, b: (each(o, b) * mask(b)).mean() / mask(b).mean()),
    "reciprocal": ("token_mean", lambda o, b: each(o, b).sum() * mask(b).sum().reciprocal()),
    "normalized weights": ("token_mean", lambda o, b: (each(o, b) * (mask(b) / mask(b).sum())).sum()),
    "weights of mean 1": ("token_mean", lambda o, b: (each(o, b) * (mask(b) / mask(b).mean())).mean()),
    "dot": ("token_mean", lambda o, b: each(o, b) @ mask(b) / mask(b).sum()),
    "where": (
        "token_mean",
        lambda o, b: torch.where(mask(b) > 0, each(o, b), 0.0).sum() / (mask(b) > 0).sum(),
    ),
    "kept dims": (
        "token_mean",
        lambda o, b: (by_position(o, b).sum((0, 1), keepdim=True) / b["mask"].sum((0, 1), keepdim=True))[
            0, 0
        ],
    ),
    "by column": (
        "token_mean",
        lambda o, b: (by_position(o, b).sum(0) / b["mask"].sum(0).clamp(min=1)).mean(),
    ),
    "by sample": ("mean", lambda o, b: (by_position(o, b).sum(1) / b["mask"].sum(1).clamp(min=1)).mean()),
    "weighted bce": (
        "token_mean",
        lambda o, b: (
            F.binary_cross_entropy_with_logits(o[:, 0, 0], mask(b), weight=mask(b), reduction="sum")
            / mask(b).sum()
        ),
    ),
    "pos_weight of the batch": (
        "token_mean",
        lambda o, b: F.binary_cross_entropy_with_logits(
            o[..., 0], b["mask"], pos_weight=(b["mask"] == 0).sum() / b["mask"].sum()
        ),
    ),
    "policy": ("token_mean", surrogate),
    # sums, means, and both
    "sum": ("sum", lambda o, b: (o - 1).square().sum() / 7),
    "autoencoder": ("sum", autoencoder),
    "mean times n": ("sum", lambda o, b: o.square().mean() * o.shape[0]),
    "sum by n": ("mean", lambda o, b: F.mse_loss(o, torch.ones_like(o), reduction="sum") / o.shape[0]),
    "sum of parts by n": ("mean", lambda o, b: (o.square() / o.numel()).sum()),
    "sum times 1/n": ("mean", lambda o, b: o.square().sum() * (1.0 / o.shape[0])),
    "batchmean": ("mean", lambda o, b: F.kl_div(o.log_softmax(-1), o.sigmoid(), reduction="batchmean")),
    "probabilities": (
        "mean",
        lambda o, b: F.cross_entropy(
            o[:, 0], F.one_hot(b["tokens"][:, 0], VOCABULARY).double(), weight=RARITY
        ),
    ),
    "own labels": ("mean", lambda o, b: F.cross_entropy(o[:, 0], o[:, 1].argmax(-1))),
    "mean and sum": ("token_mean", lambda o, b: o.square().mean() + 1e-3 * o.square().sum()),
    "sum and constant": ("token_mean", lambda o, b: each(o, b).sum() + 1.0),
    "labels, mean and sum": (
        "token_mean",
        lambda o, b: F.cross_entropy(o[:, 0], labels(b)) + o.mean() + 1e-3 * o.square().sum(),
    ),
    "numerator with a constant": ("token_mean", lambda o, b: (each(o, b).sum() + 1.0) / mask(b).sum()),
}

WHOLE: dict[str, Callable[[Tensor, Batch], Tensor]] = {
    "perplexity": lambda o, b: F.cross_entropy(o[:, 0], labels(b)).exp(),
    "root": lambda o, b: o.square().mean().sqrt(),
    "soft dice": lambda o, b: (
        1 - (o[..., 0].sigmoid() * b["mask"]).sum() / (o[..., 0].sigmoid() + b["mask"]).sum()
    ),
    "weight of outputs": lambda o, b: (each(o, b) * o[:, 0, 0].detach()).sum() / o[:, 0, 0].detach().sum(),
    "one less": lambda o, b: o.square().sum() / (o.shape[0] - 1),
    "both powers": lambda o, b: o.square().sum() * (1 + 1 / o.shape[0]),
    "not a number": lambda o, b: torch.nan_to_num(each(o, b).sum() / mask(b).sum()),
    "ignored by outputs": lambda o, b: F.cross_entropy(
        o[:, 0], torch.where(o[:, 0, 0] > 9, IGNORED, labels(b))
    ),
    "picked": lambda o, b: F.cross_entropy(o[:, 0][mask(b) > 0], labels(b)[mask(b) > 0]),
}


@pytest.mark.parametrize("name", EXACT)
def test_micro_batches_make_the_whole_batchs_loss(name: str) -> None:
    reduction, loss_fn = EXACT[name]
    graph = trace(Tagger(), batch(3), loss_fn=loss_fn)
    assert graph.loss_reduction == reduction
    assert couplings(graph) == ()
    for samples, microbatches, empty in ((5, 1, ()), (7, 3, (6,)), (4, 4, (2, 3))):
        whole = batch(samples, seed=samples, empty=empty)
        whole["labels"][0] = 1
        whole["mask"] = (whole["labels"] != IGNORED).double()
        assert_like_whole_batch(graph, loss_fn, whole, microbatches)


class Decayed(Tagger):
    """Terms of the parameters alone beside the logits."""

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        decay = 0.1 * self.head.weight.square().sum() + self.embed.weight.norm() + self.head.bias.abs().mean()
        return super().forward(tokens), decay


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_terms_of_the_parameters_count_once(reduction: str) -> None:
    def loss(o: tuple[Tensor, Tensor], b: Batch) -> Tensor:
        return F.cross_entropy(o[0][:, 0], b["tokens"][:, 0], reduction=reduction) + o[1]

    graph = trace(Decayed(), batch(3), loss_fn=loss)
    assert couplings(graph) == ()
    assert_like_whole_batch(graph, loss, batch(7), 3, Decayed)


@pytest.mark.parametrize("name", WHOLE)
def test_what_only_the_whole_batch_has_is_coupled(name: str) -> None:
    graph = trace(Tagger(), batch(3), loss_fn=WHOLE[name])
    assert [coupling.kind for coupling in couplings(graph)] == ["samples"]
    assert_like_whole_batch(graph, WHOLE[name], batch(5, ignored=0.2), 1)


def test_cut_all_the_same_it_is_each_micro_batchs_own() -> None:
    """Divided by the whole batch's count, and then no longer linear, it would be a part of something else."""
    loss_fn = WHOLE["not a number"]
    whole = batch(4, ignored=0.2)
    graph = trace(Tagger(), batch(3), loss_fn=loss_fn)
    output = Tagger()(whole["tokens"])
    parts = [
        loss_fn(output[at], {n: leaf[at] for n, leaf in whole.items()}) for at in (slice(2), slice(2, 4))
    ]
    found = run(graph, Tagger(), whole, 2)["loss"]
    torch.testing.assert_close(found, (sum(parts) / 2).detach())


def test_a_declared_mean_is_a_consent() -> None:
    graph = trace(Tagger(), batch(3), loss_fn=EXACT["one a sample"][1], loss_reduction="mean")
    assert graph.unlike_whole
    assert couplings(graph) == ()


def test_metrics_go_on_reading_their_own_counts() -> None:
    """The count is read by both; the loss's is the whole batch's, and the metric is weighed by it."""

    def loss_fn(o: Tensor, b: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        count = mask(b).sum()
        loss = each(o, b).sum() / count.clamp(min=1)
        return loss, {"accuracy": ((o[:, 0].argmax(-1) == labels(b)) * mask(b)).sum() / count, "nll": loss}

    graph = trace(Tagger(), batch(3), loss_fn=loss_fn)
    whole = batch(6, empty=(4, 5))
    loss, metrics = loss_fn(Tagger()(whole["tokens"]), whole)
    found = run(graph, Tagger(), whole, 3)
    torch.testing.assert_close(found["loss"], loss.detach())
    for name, expected in metrics.items():
        torch.testing.assert_close(found[name], expected.detach())


def test_a_label_that_is_ignored_by_its_size() -> None:
    """Positions beyond an open length: ``ignore_index`` is a size."""

    class Pointer(Tagger):
        def forward(self, tokens: Tensor, start: Tensor) -> Tensor:  # type: ignore[override]
            scores = super().forward(tokens)[..., 0]
            return F.cross_entropy(scores, start.clamp(0, scores.shape[1]), ignore_index=scores.shape[1])

    whole: dict[str, Any] = {"tokens": batch(6)["tokens"], "start": torch.tensor([1, 9, 2, 9, 9, 4])}
    graph = trace(Pointer(), whole, dynamic_dims={"tokens": [1]})
    assert graph.loss_reduction == "token_mean"
    shorter = {**whole, "tokens": whole["tokens"][:, :4]}
    assert "loss_normalizer" in with_normalizers(graph, shorter, 3)
    found = run(graph, Pointer(), shorter, 3)["loss"]
    torch.testing.assert_close(found, Pointer()(**shorter).detach())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_sum_in_sixteen_bits_beside_a_mean_is_weighed_in_wider_ones(dtype: torch.dtype) -> None:
    def loss_fn(o: Tensor, b: Batch) -> Tensor:
        return o.square().mean() + 1e-3 * o.square().sum()

    graph = trace(Tagger(dtype), {"tokens": batch(3)["tokens"]}, loss_fn=loss_fn)
    whole = {"tokens": batch(6)["tokens"]}
    expected = loss_fn(Tagger(dtype).double()(whole["tokens"]), whole).detach()
    torch.testing.assert_close(run(graph, Tagger(dtype), whole, 3)["loss"], expected, rtol=2e-2, atol=0)
