"""The reference of a verification: uneven labels and micro-batches, and when a whole batch is no sum over its samples."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from partitioner.engine.optimizer import make_budgeted
from partitioner.models.bundled import bundled
from partitioner.models.workload import Workload
from partitioner.verify.eager import (
    EagerModel,
    counted_means,
    weights_by_definition,
    why_in_pieces,
    written_once,
)
from partitioner.verify.grow_batch import grow_batch, ignore_unevenly
from passes.copies.copied_module import copied_module
from passes.fidelity.agree import StepResult
from passes.graph.graph import OpGraph
from passes.trace.batch import flatten_batch
from passes.trace.export import loss_and_metrics
from passes.trace.trace import trace
from tests.unit.passes.trace.loss.test_token_mean import IGNORED, Tagger, batch, plain


def eager_step(
    workload: Workload, batch: dict[str, Tensor], graph: OpGraph, sizes: tuple[int, ...]
) -> StepResult:
    """One step that moves nothing."""
    model = EagerModel(
        workload, graph, lambda named: make_budgeted("none", [{"params": [p for _, p in named]}], 0.0)
    )
    return model.steps([(batch, sizes)], double=True)[0]


def test_grown_batches_of_language_models_have_unlike_numbers_of_labels() -> None:
    workload = bundled("llama-1b", size="tiny", layers=1)
    assert (workload.example_inputs["labels"] == IGNORED).any()
    graph = trace(workload.model, workload.example_inputs)
    grown = grow_batch(workload.example_inputs, graph.batch.batch_dims, workload.model, 6)
    made = ignore_unevenly(grown, graph)
    valid = (made["labels"] != IGNORED).view(3, -1).sum(1).tolist()
    assert len(set(valid)) == 3
    assert min(valid) > 0
    assert torch.equal(made["input_ids"], grown["input_ids"])


def test_labels_that_may_not_be_ignored_stay() -> None:
    whole = {name: leaf for name, leaf in batch(4, ignored=0.0).items() if name != "mask"}
    graph = trace(Tagger(), whole, loss_fn=plain)
    assert torch.equal(ignore_unevenly(whole, graph)["labels"], whole["labels"])


class Normed(Tagger):
    """A batch norm in front of the head: no sample is alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(6, dtype=torch.float64)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.embed(tokens).transpose(1, 2)).transpose(1, 2))
        return logits


def test_in_pieces_each_call_is_divided_by_the_whole_batchs_labels() -> None:
    whole = batch(6, empty=(4, 5))
    reference = Workload(Normed(), whole, plain)
    graph = trace(reference.model, whole, loss_fn=plain)
    assert "batch norm" in why_in_pieces(graph)
    found = eager_step(reference, whole, graph, (2, 2, 2))
    model, total = copied_module(reference.model).train(), 0.0
    for piece in ({n: t[i : i + 2] for n, t in whole.items()} for i in (0, 2, 4)):
        output = model(piece["tokens"]).flatten(0, 1)
        labels = piece["labels"].flatten()
        total += float(torch.nn.functional.cross_entropy(output, labels, reduction="sum").detach())
    assert abs(found.loss - total / int((whole["labels"] != IGNORED).sum())) < 1e-12
    loss, _ = loss_and_metrics(model(whole["tokens"]), whole, plain)
    assert loss is not None
    assert abs(found.loss - float(loss.detach())) > 1e-3


def test_a_frozen_batch_norm_sees_no_batch() -> None:
    whole = batch(3)
    model = Normed()
    graph = trace(model, whole, loss_fn=plain, training=False)
    assert why_in_pieces(graph) == ""
    assert set(flatten_batch(whole)) == set(whole)


class Centred(Tagger):
    """A running mean of the head's inputs, which forward writes and then subtracts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6, dtype=torch.float64))

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        self.mean.mul_(0.9).add_(0.1 * h.detach().mean((0, 1)))
        logits: Tensor = self.head(h - self.mean)
        return logits


class Counting(Tagger):
    """A number of steps, which couples no samples."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls.add_(1)
        logits: Tensor = self.head(self.embed(tokens))
        return logits


def test_a_running_mean_goes_in_pieces() -> None:
    whole = batch(6)
    reference = Workload(Centred(), whole, plain)
    graph = trace(reference.model, whole, loss_fn=plain)
    why = why_in_pieces(graph)
    assert "samples are coupled at " in why or "running average" in why
    assert "test_eager.py:" in why
    found = eager_step(reference, whole, graph, (2, 2, 2))
    model = copied_module(reference.model).train()
    for start in (0, 2, 4):
        model(whole["tokens"][start : start + 2])
    torch.testing.assert_close(found.buffers["mean"], model.get_buffer("mean"), rtol=1e-12, atol=1e-12)


def test_a_buffer_that_a_batch_writes_once_needs_no_pieces_and_starts_each_from_what_was_there() -> None:
    whole = batch(6)
    reference = Workload(Counting(), whole, plain)
    graph = trace(reference.model, whole, loss_fn=plain)
    assert why_in_pieces(graph) == ""
    assert written_once(graph) == ["calls"]
    for sizes in ((2, 2, 2), (6,)):
        found = eager_step(reference, whole, graph, sizes)
        assert float(found.buffers["calls"]) == 1


def by_sample(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return output.square().mean()


def test_micro_batches_have_the_plans_sizes_and_count_by_them() -> None:
    whole = batch(14)
    reference = Workload(Tagger(), whole, by_sample)
    graph = trace(reference.model, whole, loss_fn=by_sample)
    assert graph.loss_reduction == "mean"
    expected = by_sample(reference.model(whole["tokens"]), whole)
    for sizes in ((6, 4, 4), (14,), (1, 13)):
        found = eager_step(reference, whole, graph, sizes)
        assert found.loss is not None
        assert abs(found.loss - float(expected.detach())) < 1e-12


def test_weights_are_written_out() -> None:
    assert weights_by_definition("sum", (6, 4, 4)) == [1, 1, 1]
    assert weights_by_definition("mean", (6, 4, 4)) == [6 / 14, 4 / 14, 4 / 14]


class AsksForFloat32(Tagger):
    """Code that does not run on what it gets for a float32 that was widened."""

    def __init__(self) -> None:
        super().__init__()
        self.float()

    def forward(self, tokens: Tensor) -> Tensor:
        asked = self.embed(tokens).float()
        if asked.dtype != torch.float32:
            raise TypeError("another dtype")
        logits: Tensor = asked @ self.head.weight.T
        return logits


def test_labels_are_counted_in_the_models_own_types_too() -> None:
    whole = batch(6, empty=(4, 5))
    reference = Workload(AsksForFloat32(), whole, plain)
    graph = trace(reference.model, whole, loss_fn=plain)
    means = counted_means(reference, whole, graph, (2, 2, 2), double=False)
    means.start(0)
    assert not means.counting
    with pytest.raises(TypeError, match="dtype"):
        counted_means(reference, whole, graph, (2, 2, 2), double=True)
