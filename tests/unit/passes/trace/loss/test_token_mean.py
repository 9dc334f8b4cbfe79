"""Token mean: the micro-batches' losses and gradients, recombined, are those of the whole batch, however it is cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from cost_models.errors import ModelError
from passes.graph.graph import OpGraph
from passes.graph.token_counts import adds_up, counted
from passes.graph.verify import verify_graph
from passes.trace.loss.reduction import samples_in, step_weights, with_normalizers
from passes.trace.trace import trace
from runtime.segment.microbatch import Microbatches
from tests.support.matrix import drawn

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
    "one a sample": lambda o, b: F.cross_entropy(o[:, 0], b["labels"][:, 0], weight=WEIGHTS),
    "two heads": lambda o, b: (
        F.cross_entropy(o[:, 0], b["labels"][:, 0])
        + 0.5 * F.cross_entropy(o[:, 1], b["tokens"][:, 1], ignore_index=2)
    ),
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
    leaves = with_normalizers(graph, whole, microbatches)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers()), **graph.constants}
    cuts = Microbatches.of(samples_in(graph, whole), microbatches)
    pieces = {n: cuts.cut(leaves[n], dim) for n, dim in graph.batch.batch_dims.items()}
    totals: dict[str, Tensor] = {}
    for index, weight in enumerate(step_weights(graph, whole, microbatches)):
        arguments = [pieces[i.name][index] if i.kind == "batch" else state[i.name] for i in graph.inputs]
        for output, value in zip(graph.outputs, graph.module(*arguments), strict=True):
            totals[output.name] = totals.get(output.name, 0.0) + value.detach().double() * weight
            if output.kind == "loss" and value.requires_grad:
                (value * weight).backward()
    return totals


def assert_like_whole_batch(
    graph: OpGraph,
    loss_fn: Callable[..., Any],
    whole: Mapping[str, Tensor],
    microbatches: int,
    make: Callable[[], nn.Module] | None = None,
) -> None:
    model, reference = (make or Tagger)(), (make or Tagger)()
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
    counts, whole, spec = graph.token_counts, batch(8), graph.batch
    assert counts is not None
    assert adds_up(counts, spec)  # two ranks, each with a part of two micro-batches
    parts = [{key: leaf[[*own]] for key, leaf in whole.items()} for own in ((0, 1, 4, 5), (2, 3, 6, 7))]
    summed = sum(counted(counts, spec, part, (2, 2)) for part in parts)
    assert torch.equal(torch.as_tensor(summed), counted(counts, spec, whole, (4, 4)))


def chosen_by(output: Tensor, batch: Mapping[str, Tensor], count: Tensor) -> Tensor:
    """A sum says as well which targets there are."""
    labels = torch.where(count > 10, batch["labels"], batch["tokens"])
    return (by_position(output, batch) * batch["mask"]).sum() / count + plain(output, {"labels": labels})


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda o, b: F.cross_entropy(*flat(o, {"labels": b["labels"].roll(1, 0)})),
        lambda o, b: F.cross_entropy(*flat(o, {"labels": b["labels"].clamp(max=b["tokens"].max())})),
        lambda o, b: (by_position(o, b) * b["mask"]).sum() / b["mask"].mean(),
        lambda o, b: by_position(o, b).sum() / b["mask"].std(),
        lambda o, b: chosen_by(o, b, b["mask"].sum()),
    ],
)
def test_counts_that_look_across_samples_do_not_add_up(loss_fn: Callable[..., Any]) -> None:
    graph = traced(loss_fn)
    assert graph.token_counts is not None
    assert not adds_up(graph.token_counts, graph.batch)


@pytest.mark.parametrize("name", ["plain", "smoothed", "weighted", "masked sum"])
def test_a_micro_batch_without_valid_labels_adds_nothing(name: str) -> None:
    assert_like_whole_batch(traced(LOSSES[name]), LOSSES[name], batch(6, empty=(2, 3)), 3)


_GRAPHS: dict[str, OpGraph] = {}


@drawn(60)
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


def test_class_weights_of_the_model_itself() -> None:
    class Own(Tagger):
        def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
            weights = self.class_weights
            assert isinstance(weights, Tensor)
            return F.cross_entropy(super().forward(tokens).transpose(1, 2), labels, weight=weights)

    whole = {name: leaf for name, leaf in batch(6, empty=(5,)).items() if name != "mask"}
    graph = trace(Own(), whole)
    assert set(graph.batch.batch_dims) == {"tokens", "labels", "loss_normalizer", "loss_class_counts"}
    found = run(graph, Own(), whole, 3)["loss"]
    torch.testing.assert_close(found, Own()(**whole).detach(), rtol=1e-12, atol=0)


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
