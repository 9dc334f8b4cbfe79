"""Loss reductions on real processes: a plan trains as the whole batch would, whatever its labels and its micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cost_models.cluster import ClusterSpec
from cost_models.errors import ModelError, PlanError, UsageError
from partitioner import Plan, Workload, partition
from partitioner.models.bundled import bundled
from passes.trace.trace import trace
from runtime.ranks.launch import WorkerPool

LEARNING_RATE = 0.5
IGNORED = -100
WORDS = 11
WEIGHTS = torch.linspace(0.5, 2.0, WORDS, dtype=torch.float64)


class Tagger(nn.Module):
    """tokens (samples, length) -> logits (samples, length, WORDS)."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(WORDS, 6), nn.BatchNorm1d(6) if norm else nn.Identity()
        self.middle, self.head = nn.Linear(6, 6), nn.Linear(6, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.embed(tokens).transpose(1, 2)).transpose(1, 2)
        logits: Tensor = self.head(self.middle(hidden).tanh())
        return logits


def batch(samples: int = 7) -> dict[str, Tensor]:
    """Ever more labels are ignored; the last two samples (a micro-batch of 3 and 7) have none."""
    numbers = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(WORDS, (samples, 5), generator=numbers) for _ in range(2))
    for sample in range(samples):
        labels[sample, : sample % 5] = IGNORED
    labels[-2:] = IGNORED
    return {"tokens": tokens, "labels": labels}


def token_loss(output: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    labels = batch["labels"].flatten()
    loss = F.cross_entropy(output.flatten(0, 1), labels, weight=WEIGHTS, label_smoothing=0.1)
    valid = labels != IGNORED
    hits = (output.argmax(-1).flatten() == labels) & valid
    return loss, {"accuracy": hits.sum().double() / valid.sum(), "entropy": plain(output, batch)}


def plain(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())


def summed_loss(output: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    labels = batch["labels"]
    loss = F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum")
    return loss, {"tokens": (labels != IGNORED).sum()}


def with_other_terms(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """A load-balancing kind of loss beside the token mean: no sum over samples."""
    return plain(output, batch) + 0.1 * output.mean((0, 1)).square().sum()


LOSSES = {"token_mean": token_loss, "sum": summed_loss, "mean": plain}


def workload(kind: str) -> Workload:
    example = batch()
    if kind == "mean":
        example["labels"][-2:, 0] = 1  # without any label, a micro-batch's own mean is nan
    return Workload(Tagger().double(), example, LOSSES[kind], kind)


def planned(kind: str, ranks: int, **options: Any) -> Plan:
    pins = {"embed": 0, "middle": ranks // 2, "head": ranks - 1}
    return partition(
        workload(kind),
        ClusterSpec.local(ranks),
        batch_size=7,
        microbatches=3,
        pins=pins,
        **{"strategy": "layer", **options},
    )


def train(plan_json: str, kind: str) -> tuple[float, dict[str, float], dict[str, Tensor]]:
    """One step on this rank: loss, metrics, the parameters it owns afterwards."""
    made = workload(kind)
    optimizer = {"optimizer": torch.optim.SGD, "optimizer_kwargs": {"lr": LEARNING_RATE}}
    with Plan.from_json(plan_json).deploy(made, timeout_seconds=20.0, **optimizer) as engine:
        loss = float(engine.train_step(made.example_inputs))
        assert engine.last_step is not None
        metrics = {name: float(value) for name, value in engine.last_step.metrics.items()}
        return loss, metrics, {name: p.detach() for name, p in engine.parameters.items()}


def eager(kind: str) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """The same step on the whole batch at once."""
    made = workload(kind)
    model = made.model.train()
    returned = LOSSES[kind](model(made.example_inputs["tokens"]), made.example_inputs)
    loss, metrics = returned if isinstance(returned, tuple) else (returned, {})
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=LEARNING_RATE).step()
    return float(loss.detach()), metrics, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize(("kind", "ranks"), [("token_mean", 2), ("sum", 3)])
def test_a_step_equals_the_whole_batchs(kind: str, ranks: int, pool: WorkerPool) -> None:
    plan = planned(kind, ranks, schedule="1f1b")
    assert plan.loss_reduction == kind
    loss, metrics, parameters = eager(kind)
    seen: set[str] = set()
    for own_loss, own_metrics, own in pool.run(
        train, plan.model_dump_json(), kind, world_size=plan.world_size, timeout_seconds=60.0
    ):
        assert own_loss == pytest.approx(loss, rel=1e-12)
        assert own_metrics == pytest.approx({n: float(m.detach()) for n, m in metrics.items()}, rel=1e-12)
        seen |= set(own)
        for name, parameter in own.items():
            torch.testing.assert_close(parameter, parameters[name], rtol=1e-10, atol=1e-12, msg=name)
    assert seen == set(parameters)


def test_weighing_by_samples_is_off_where_a_token_mean_is_exact(pool: WorkerPool) -> None:
    expected, _, _ = eager("mean")
    found = {}
    for reduction in ("mean", "token_mean"):
        plan = planned("mean", 2, loss_reduction=reduction)
        results = pool.run(
            train, plan.model_dump_json(), "mean", world_size=plan.world_size, timeout_seconds=60.0
        )
        (found[reduction],) = {loss for loss, _, _ in results}
    assert abs(found["mean"] - expected) > 1e-3 * expected
    assert found["token_mean"] == pytest.approx(expected, rel=1e-12)


def test_a_hugging_face_model_with_a_micro_batch_without_labels(pool: WorkerPool) -> None:
    """Its own loss: shifted, padded, flattened, upcast. The reference is the eager model on the whole batch."""
    made = bundled("llama-1b", size="tiny", layers=2, seq=8, batch=6)
    made.example_inputs["labels"][2:4] = IGNORED  # the second of three micro-batches
    plan = partition(made, ClusterSpec.local(3), batch_size=6, microbatches=3, max_stages=3)
    assert plan.loss_reduction == "token_mean"
    assert "mean over the whole batch's valid labels" in str(plan)
    plan.verify(made, pool=pool).raise_if_different()


@pytest.mark.parametrize(
    ("norm", "loss_fn", "note"),
    [
        (False, token_loss, ""),
        pytest.param(False, summed_loss, "", marks=pytest.mark.matrix),
        (True, plain, "batch norm sees one micro-batch at a time"),
        pytest.param(True, token_loss, "batch norm sees one micro-batch at a time", marks=pytest.mark.matrix),
        (True, summed_loss, "batch norm sees one micro-batch at a time"),
        (False, with_other_terms, "samples are coupled at square"),
    ],
)
def test_verify(norm: bool, loss_fn: Any, note: str, pool: WorkerPool) -> None:
    made = Workload(Tagger(norm), batch(), loss_fn, "tagger")
    plan = partition(made, ClusterSpec.local(2), batch_size=7, microbatches=3, max_stages=2)
    report = plan.verify(made, pool=pool)
    report.raise_if_different()
    assert any(note in n for n in report.notes) if note else not any("compared" in n for n in report.notes)


def heads_loss(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Two heads with labels for a part of the samples each, classes weighed in one; and a masked mean by hand."""
    one = F.cross_entropy(output[:, 3], batch["labels"][:, 3], weight=WEIGHTS.to(output.dtype))
    two = F.cross_entropy(output[:, 4], batch["labels"][:, 4], ignore_index=IGNORED, label_smoothing=0.1)
    mask = (batch["labels"] != IGNORED).to(output.dtype)
    return one + 0.5 * two + (output.square().mean(-1) * mask).sum() / mask.sum().clamp(min=1)


@pytest.mark.parametrize("train", [False, True])
def test_one_label_a_sample_is_verified_against_the_whole_batch(train: bool, pool: WorkerPool) -> None:
    """The last of three micro-batches has no label for either head, and the user's own loop over all of it has."""
    made = Workload(Tagger(), batch(), heads_loss, "heads")
    plan = partition(made, ClusterSpec.local(2), batch_size=7, microbatches=3, max_stages=2)
    assert plan.loss_reduction == "token_mean"
    report = plan.verify(made, pool=pool, train=train)
    report.raise_if_different()
    assert not any("compared micro-batch by micro-batch" in note for note in report.notes)


@pytest.mark.parametrize("train", [False, True])
def test_a_batch_without_any_label_agrees_with_nothing(train: bool, pool: WorkerPool) -> None:
    example = batch()
    example["labels"][:] = IGNORED
    made = Workload(Tagger(), example, plain, "unlabelled")
    plan = partition(made, ClusterSpec.local(2), batch_size=7, microbatches=1, max_stages=2)
    with pytest.raises(ModelError, match="the unpartitioned model computes no number"):
        plan.verify(made, pool=pool, train=train)


def test_a_mean_declared_a_sum_differs_from_the_whole_batch(pool: WorkerPool) -> None:
    made = Workload(Tagger(), batch(), plain, "tagger")
    plan = partition(
        made, ClusterSpec.local(2), batch_size=7, microbatches=3, loss_reduction="sum", strategy="layer"
    )
    report = plan.verify(made, pool=pool)
    assert not report.passed
    assert "the traced graph alone differs from the eager model" in (report.first_difference or "")


def test_another_reduction_is_refused() -> None:
    made = workload("token_mean")
    plan = planned("token_mean", 2)
    other = trace(made.model, made.example_inputs, loss_fn=made.loss_fn, loss_reduction="mean")
    with pytest.raises(PlanError, match="traced with loss_reduction='mean', planned with 'token_mean'"):
        plan.verify(made, graph=other)
    with pytest.raises(UsageError, match="traced with another loss reduction"):
        partition(other, ClusterSpec.local(2), loss_reduction="sum", strategy="layer")
