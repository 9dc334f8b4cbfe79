"""Token mean: the micro-batches' losses and gradients, recombined, are those of the whole batch, however it is cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cost_models.errors import ModelError, UsageError
from passes.graph import OpGraph
from passes.loss_reduction import loss_weights, with_normalizers
from passes.trace import trace
from passes.verify_graph import verify_graph
from runtime.microbatch import cut

VOCABULARY, LENGTH = 7, 5
IGNORED = -100
WEIGHTS = torch.linspace(0.5, 2.0, VOCABULARY, dtype=torch.float64)


class Tagger(nn.Module):
    """tokens (samples, LENGTH) -> logits (samples, LENGTH, VOCABULARY), and a score per sample for other terms."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, 6, dtype=dtype)
        self.head = nn.Linear(6, VOCABULARY, dtype=dtype)
        self.gain = nn.Parameter(torch.tensor(1.5, dtype=dtype))
        self.register_buffer("class_weights", WEIGHTS.to(dtype))

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(tokens).tanh())
        return logits


def batch(
    samples: int, seed: int = 0, empty: tuple[int, ...] = (), ignored: float = 0.4
) -> dict[str, Tensor]:
    """Random tokens and labels, an uneven share of the labels ignored; all of them in the samples of ``empty``."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (samples, LENGTH), generator=generator)
    labels = torch.randint(VOCABULARY, (samples, LENGTH), generator=generator)
    share = torch.linspace(0, 2 * ignored, samples)[:, None]
    labels = labels.masked_fill(torch.rand(samples, LENGTH, generator=generator) < share, IGNORED)
    for sample in empty:
        labels[sample] = IGNORED
    return {"tokens": tokens, "labels": labels, "mask": (labels != IGNORED).double()}


def flat(output: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    return output.flatten(0, 1), batch["labels"].flatten()


def by_position(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(output.transpose(1, 2), batch["labels"], reduction="none")


def plain(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(*flat(output, batch))


LOSSES: dict[str, Callable[[Tensor, Mapping[str, Tensor]], Any]] = {
    "plain": plain,
    "nd": lambda o, b: F.cross_entropy(o.transpose(1, 2), b["labels"]),
    "shifted": lambda o, b: F.cross_entropy(o[:, :-1].flatten(0, 1), b["labels"][:, 1:].flatten()),
    "smoothed": lambda o, b: F.cross_entropy(*flat(o, b), label_smoothing=0.1),
    "ignoring zero": lambda o, b: F.cross_entropy(*flat(o, {"labels": b["tokens"]}), ignore_index=0),
    "nll": lambda o, b: F.nll_loss(F.log_softmax(o, -1).flatten(0, 1), b["labels"].flatten()),
    "nll nd": lambda o, b: F.nll_loss(F.log_softmax(o, -1).transpose(1, 2), b["labels"]),
    "weighted": lambda o, b: F.cross_entropy(*flat(o, b), weight=WEIGHTS),
    "weighted and smoothed": lambda o, b: F.cross_entropy(*flat(o, b), weight=WEIGHTS, label_smoothing=0.2),
    "two, scaled": lambda o, b: 0.3 * plain(o, b) - F.cross_entropy(*flat(o, {"labels": b["tokens"]})) / 2,
    "stacked": lambda o, b: torch.stack(
        [plain(o, b), F.cross_entropy(*flat(o, {"labels": b["tokens"]}))]
    ).mean(),
    "masked sum": lambda o, b: (by_position(o, b) * b["mask"]).sum() / b["mask"].sum(),
    "masked sum, clamped": lambda o, b: by_position(o, b).sum() / (b["labels"] != IGNORED).sum().clamp(min=1),
    "summed by hand": lambda o, b: (
        F.cross_entropy(*flat(o, b), reduction="sum") / (b["labels"] != IGNORED).sum() + 1.0
    ),
}


def traced(loss_fn: Callable[..., Any], **options: Any) -> OpGraph:
    graph = trace(Tagger(), batch(3), loss_fn=loss_fn, **options)
    verify_graph(graph, after="token_mean")
    return graph


def run(
    graph: OpGraph, model: nn.Module, whole: Mapping[str, Tensor], microbatches: int
) -> dict[str, Tensor]:
    """Outputs recombined from micro-batches; gradients of the recombined loss are left in the model."""
    samples = whole["tokens"].shape[0]
    leaves = with_normalizers(graph, whole, microbatches)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers()), **graph.constants}
    pieces = {n: cut(leaves[n], dim, microbatches) for n, dim in graph.batch.batch_dims.items()}
    totals: dict[str, Tensor] = {}
    for index, weight in enumerate(loss_weights(graph.loss_reduction, samples, microbatches)):
        arguments = [pieces[i.name][index] if i.kind == "batch" else state[i.name] for i in graph.inputs]
        for output, value in zip(graph.outputs, graph.module(*arguments), strict=True):
            totals[output.name] = totals.get(output.name, 0.0) + value.detach().double() * weight
            if output.kind == "loss" and value.requires_grad:
                (value * weight).backward()
    return totals


def assert_like_whole_batch(
    graph: OpGraph, loss_fn: Callable[..., Any], whole: Mapping[str, Tensor], microbatches: int
) -> None:
    model, reference = Tagger(), Tagger()
    expected = loss_fn(reference(whole["tokens"]), whole)
    torch.autograd.backward(expected)
    found = run(graph, model, whole, microbatches)["loss"]
    torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=1e-12)
    for (name, mine), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        own = torch.zeros_like(mine) if mine.grad is None else mine.grad
        theirs = torch.zeros_like(other) if other.grad is None else other.grad
        torch.testing.assert_close(own, theirs, rtol=1e-11, atol=1e-13, msg=name)


@pytest.mark.parametrize("name", LOSSES)
def test_recombined_micro_batches_are_the_whole_batch(name: str) -> None:
    graph = traced(LOSSES[name])
    assert graph.loss_reduction == "token_mean"
    for samples, microbatches in ((5, 1), (5, 2), (7, 3), (4, 4)):
        assert_like_whole_batch(graph, LOSSES[name], batch(samples, seed=samples), microbatches)


@pytest.mark.parametrize("name", ["plain", "smoothed", "weighted", "masked sum"])
def test_a_micro_batch_without_valid_labels_adds_nothing(name: str) -> None:
    assert_like_whole_batch(traced(LOSSES[name]), LOSSES[name], batch(6, empty=(2, 3)), 3)


_GRAPHS: dict[str, OpGraph] = {}


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(["shifted", "weighted and smoothed", "two, scaled", "masked sum, clamped"]),
    samples=st.integers(1, 9),
    pieces=st.integers(1, 9),
    seed=st.integers(0, 10_000),
    ignored=st.floats(0, 0.5),
)
def test_any_cut_of_any_batch(name: str, samples: int, pieces: int, seed: int, ignored: float) -> None:
    whole = batch(samples, seed=seed, ignored=ignored)
    whole["labels"][0, 1] = 1  # nan of a batch without any label is a test of its own
    whole["mask"] = (whole["labels"] != IGNORED).double()
    if name not in _GRAPHS:
        _GRAPHS[name] = traced(LOSSES[name])
    assert_like_whole_batch(_GRAPHS[name], LOSSES[name], whole, min(pieces, samples))


def test_averaging_the_micro_batches_own_means_is_off() -> None:
    whole = batch(6, empty=(5,))
    expected = float(plain(Tagger()(whole["tokens"]), whole).detach())
    found = {
        reduction: float(run(traced(plain, loss_reduction=reduction), Tagger(), whole, 3)["loss"])
        for reduction in ("mean", "token_mean")
    }
    assert abs(found["mean"] - expected) > 1e-3 * expected
    assert abs(found["token_mean"] - expected) < 1e-12


def test_a_batch_without_valid_labels_is_nan_as_in_eager_code() -> None:
    whole = batch(4, empty=(0, 1, 2, 3))
    model, reference = Tagger(), Tagger()
    expected = plain(reference(whole["tokens"]), whole)
    torch.autograd.backward(expected)
    assert expected.isnan()
    assert run(traced(plain), model, whole, 2)["loss"].isnan()
    assert torch.equal(model.head.weight.grad, reference.head.weight.grad)  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------------------
# Which reduction a loss gets, and what is refused


@pytest.mark.parametrize(
    ("reduction", "loss_fn"),
    [
        ("sum", lambda o, b: F.cross_entropy(*flat(o, b), reduction="sum")),
        ("mean", lambda o, b: F.cross_entropy(*flat(o, b), reduction="sum") / b["labels"].shape[0]),
        ("mean", lambda o, b: F.cross_entropy(o[:, 0], b["tokens"][:, 0])),
        ("mean", lambda o, b: by_position(o, b).mean()),
        (
            "mean",
            lambda o, b: F.cross_entropy(o.transpose(1, 2), F.one_hot(b["tokens"], VOCABULARY).mT.double()),
        ),
        ("mean", lambda o, b: o.pow(2).mean()),
    ],
    ids=["sum", "sum per sample", "one target per sample", "per position", "probabilities", "no labels"],
)
def test_other_losses_keep_their_form_and_are_exact_as_well(
    reduction: str, loss_fn: Callable[..., Any]
) -> None:
    graph = traced(loss_fn)
    assert graph.loss_reduction == reduction
    assert graph.token_counts is None
    assert_like_whole_batch(graph, loss_fn, batch(7, seed=3), 3)


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
        (lambda o, b: plain(o, b) * b["mask"].mean(), "reaches the loss through aten.mul.Tensor"),
        (lambda o, b: F.cross_entropy(*flat(o, {"labels": o.argmax(-1)})), "depend on the parameter"),
        (lambda o, b: F.cross_entropy(o.flatten(0, 1)[1:], b["labels"].flatten()[1:]), "5*s0 - 1 targets"),
        (lambda o, b: F.cross_entropy(*flat(o, {"labels": b["tokens"].bernoulli(0.5)})), "drawn at random"),
    ],
    ids=["exp", "factor of the batch", "pseudo-labels", "shifted across samples", "random labels"],
)
def test_a_token_mean_that_cannot_be_had(loss_fn: Callable[..., Any], why: str) -> None:
    graph = traced(loss_fn)
    assert graph.loss_reduction == "mean"
    assert any("averaged over micro-batches by samples" in note and why in note for note in graph.notes)
    with pytest.raises(ModelError, match="cannot be a mean over the batch's tokens") as refusal:
        traced(loss_fn, loss_reduction="token_mean")
    assert why in str(refusal.value)


def test_declared_where_nothing_is_counted_or_unknown() -> None:
    with pytest.raises(ModelError, match="holds no cross-entropy"):
        traced(lambda o, b: o.pow(2).mean(), loss_reduction="token_mean")
    with pytest.raises(UsageError, match="no loss reduction 'tokens'"):
        traced(plain, loss_reduction="tokens")


def test_declared_for_one_target_per_sample() -> None:
    def loss_fn(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return F.cross_entropy(output[:, 0], batch["labels"][:, 0], weight=WEIGHTS)

    graph = traced(loss_fn, loss_reduction="token_mean")
    assert_like_whole_batch(graph, loss_fn, batch(7, empty=(6,)), 3)


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_do_not_overflow(dtype: torch.dtype) -> None:
    """4000 samples of 5 labels with losses near 20: their sum is past what float16 holds."""

    def loss_fn(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1) * 60, batch["tokens"].flatten())

    graph = trace(Tagger(dtype), {"tokens": batch(3)["tokens"]}, loss_fn=loss_fn)
    whole = {"tokens": batch(4000)["tokens"]}
    model = Tagger(dtype)
    expected = loss_fn(Tagger(dtype).float()(whole["tokens"]), whole)
    assert expected * 20_000 > torch.finfo(torch.float16).max
    found = run(graph, model, whole, 2)["loss"]
    torch.testing.assert_close(found, expected.detach().double(), rtol=2e-2, atol=0)
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


# --------------------------------------------------------------------------------------------------
# Metrics


def with_metrics(output: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    loss = F.cross_entropy(*flat(output, batch), label_smoothing=0.1)
    valid = batch["labels"] != IGNORED
    hits = (output.argmax(-1) == batch["labels"]) & valid
    metrics = {"nll": loss, "scaled": 2 * loss, "accuracy": hits.sum() / valid.sum(), "hits": hits.sum()}
    return 0.5 * loss, metrics


def test_metrics_of_a_token_mean_count_by_valid_tokens() -> None:
    graph = traced(with_metrics)
    assert [o.name for o in graph.outputs if o.kind == "metric"] == ["nll", "scaled", "accuracy", "hits"]
    assert not graph.needs_grad & {o.node for o in graph.outputs if o.kind == "metric"}
    whole = batch(6, empty=(4, 5))
    loss, expected = with_metrics(Tagger()(whole["tokens"]), whole)
    found = run(graph, Tagger(), whole, 3)
    torch.testing.assert_close(found["loss"], loss.detach())
    for name in ("nll", "scaled", "accuracy"):
        torch.testing.assert_close(found[name], expected[name].detach().double())


def test_weighted_means_read_by_a_metric_are_the_micro_batchs_own() -> None:
    def loss_fn(output: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        loss = F.cross_entropy(*flat(output, batch), weight=WEIGHTS)
        return loss, {"nll": loss}

    whole = batch(3, seed=2)
    found = run(traced(loss_fn), Tagger(), whole, 1)
    torch.testing.assert_close(found["nll"], found["loss"])


def test_metrics_of_a_mean_count_by_samples_and_of_a_sum_are_summed() -> None:
    whole = batch(5, seed=4)
    first = whole["tokens"].double()[:, 0]

    def loss_fn(output: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return output.pow(2).mean(), {"first": batch["tokens"].double()[:, 0].mean()}

    assert run(traced(loss_fn), Tagger(), whole, 2)["first"] == pytest.approx(float(first.mean()))
    summed = run(traced(loss_fn, loss_reduction="sum"), Tagger(), whole, 2)["first"]
    assert summed == pytest.approx(float(first[:3].mean() + first[3:].mean()))


def test_metrics_that_are_no_numbers() -> None:
    with pytest.raises(ModelError, match="cannot be aggregated") as refusal:
        traced(lambda o, b: (plain(o, b), {"x": 1.0, "y": o, 3: plain(o, b), "loss": plain(o, b)}))
    assert len(refusal.value.because) == 4


def test_an_evaluation_graph_has_the_same_loss_metrics_and_outputs() -> None:
    graph = trace(Tagger(), batch(3), loss_fn=with_metrics, training=False)
    assert graph.loss_reduction == "token_mean"
    assert [o.kind for o in graph.outputs] == ["loss", *["metric"] * 4, "output"]
