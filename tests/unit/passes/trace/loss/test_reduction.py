"""Which reduction a loss gets by its form, what is refused, and what a rank must bring."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cost_models.errors import ModelError, UsageError
from passes.shard.couplings import couplings
from passes.trace.loss.reduction import with_normalizers
from passes.trace.trace import trace
from tests.unit.passes.trace.loss.test_token_mean import (
    LOSSES,
    VOCABULARY,
    Tagger,
    assert_like_whole_batch,
    batch,
    by_position,
    flat,
    plain,
    traced,
)


@pytest.mark.parametrize(
    ("reduction", "loss_fn"),
    [
        ("sum", lambda o, b: F.cross_entropy(*flat(o, b), reduction="sum")),
        ("mean", lambda o, b: F.cross_entropy(*flat(o, b), reduction="sum") / b["labels"].shape[0]),
        ("mean", lambda o, b: by_position(o, b).mean()),
        (
            "mean",
            lambda o, b: F.cross_entropy(o.transpose(1, 2), F.one_hot(b["tokens"], VOCABULARY).mT.double()),
        ),
        ("mean", lambda o, b: o.pow(2).mean()),
    ],
    ids=["sum", "sum per sample", "per position", "probabilities", "no labels"],
)
def test_other_losses_keep_their_form_and_are_exact_as_well(
    reduction: str, loss_fn: Callable[..., Any]
) -> None:
    graph = traced(loss_fn)
    assert graph.loss_reduction == reduction
    assert graph.token_counts is None
    assert_like_whole_batch(graph, loss_fn, batch(7, seed=3), 3)


def test_metrics_beside_a_sum_are_noted() -> None:
    """An accuracy, as a mean, would be four times itself with four micro-batches."""

    def with_metric(output: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        loss = F.cross_entropy(*flat(output, batch), reduction="sum")
        return loss, {"right": (output.argmax(-1) == batch["labels"]).double().mean()}

    for declared in (None, "sum"):
        graph = trace(Tagger(), batch(3), loss_fn=with_metric, loss_reduction=declared)
        assert any("metrics are summed over micro-batches as the loss is (right)" in n for n in graph.notes)
    graph = trace(Tagger(), batch(3), loss_fn=with_metric, loss_reduction="mean")
    assert not any("metrics are summed" in note for note in graph.notes)


def test_a_sum_divided_by_a_number_of_the_batch_is_a_sum() -> None:
    whole = {**batch(6, seed=1), "items": torch.tensor(19)}

    def loss_fn(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return F.cross_entropy(*flat(output, batch), reduction="sum") / batch["items"]

    graph = trace(Tagger(), {**batch(3), "items": torch.tensor(1)}, loss_fn=loss_fn)
    assert graph.loss_reduction == "sum"
    assert_like_whole_batch(graph, loss_fn, whole, 4)


@pytest.mark.parametrize(
    ("loss_fn", "why"),
    [
        (lambda o, b: plain(o, b).exp(), "reaches the loss through aten.exp.default"),
        (lambda o, b: plain(o, b) * o.mean(), "reaches the loss through aten.mul.Tensor"),
        (lambda o, b: F.cross_entropy(*flat(o, {"labels": o.argmax(-1) - 1})), "depend on the parameter"),
        (lambda o, b: F.cross_entropy(o.flatten(0, 1)[1:], b["labels"].flatten()[1:]), "5*s0 - 1 targets"),
        (lambda o, b: F.cross_entropy(*flat(o, {"labels": b["tokens"].bernoulli(0.5)})), "drawn at random"),
    ],
    ids=["exp", "product", "pseudo-labels", "shifted across samples", "random labels"],
)
def test_a_token_mean_that_cannot_be_had(loss_fn: Callable[..., Any], why: str) -> None:
    graph = traced(loss_fn)
    assert graph.loss_reduction == "mean"
    assert any("would average the loss by samples" in note and why in note for note in graph.notes)
    assert couplings(graph)
    with pytest.raises(ModelError, match="cannot be a mean over the batch's tokens") as refusal:
        traced(loss_fn, loss_reduction="token_mean")
    assert why in str(refusal.value)


def test_declared_where_nothing_is_counted_or_unknown() -> None:
    with pytest.raises(ModelError, match="holds no cross-entropy"):
        traced(lambda o, b: o.pow(2).mean(), loss_reduction="token_mean")
    with pytest.raises(UsageError, match="no loss reduction 'tokens'"):
        traced(plain, loss_reduction="tokens")


def test_the_reduction_is_part_of_the_fingerprint() -> None:
    loss_fn = LOSSES["summed by hand"]
    prints = {traced(loss_fn, loss_reduction=r).fingerprint for r in (None, "token_mean", "mean", "sum")}
    assert len(prints) == 3


def test_a_leaf_of_the_users_with_the_same_name_stays() -> None:
    whole = {**batch(3), "loss_normalizer": torch.ones(3)}
    graph = trace(Tagger(), whole, loss_fn=plain)
    assert "loss_normalizer_1" in graph.batch.batch_dims
    filled = with_normalizers(graph, whole, 2)
    assert torch.equal(filled["loss_normalizer"], torch.ones(3))


def test_a_mask_that_only_counts_is_still_read_from_the_batch() -> None:
    whole = {name: leaf for name, leaf in batch(5).items() if name != "labels"}

    def loss_fn(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return output.pow(2).sum() / batch["mask"].sum()

    graph = trace(Tagger(), {n: leaf[:2] for n, leaf in whole.items()}, loss_fn=loss_fn)
    assert "mask" not in {i.name for i in graph.inputs}
    assert_like_whole_batch(graph, loss_fn, whole, 2)
    with pytest.raises(UsageError, match="missing: mask"):
        with_normalizers(graph, {"tokens": whole["tokens"]}, 2)


def test_a_rank_without_the_loss_needs_no_labels() -> None:
    graph = traced(plain)
    tokens = {"tokens": batch(4)["tokens"]}
    assert with_normalizers(graph, tokens, 2, needed={"tokens"}) is tokens
    with pytest.raises(UsageError, match="missing: labels"):
        with_normalizers(graph, tokens, 2, needed={"tokens", "loss_normalizer"})


def test_zeros_to_start_with_are_no_constant() -> None:
    def loss_fn(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        loss = output.new_zeros(())
        return loss + F.cross_entropy(*flat(output, batch), reduction="sum")

    graph = traced(loss_fn)
    assert graph.loss_reduction == "sum"
    assert_like_whole_batch(graph, loss_fn, batch(5), 2)
