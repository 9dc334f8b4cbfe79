"""The reference of a verification: uneven labels, and when a whole batch is no sum over its samples."""

from __future__ import annotations

import torch
from torch import Tensor

from partitioner.models.bundled import bundled
from partitioner.models.workload import Workload
from partitioner.verify.grow_batch import grow_batch, ignore_unevenly
from partitioner.verify.reference import reference_step, why_in_pieces
from passes.evaluate.copied_module import copied_module
from passes.trace.batch import flatten_batch
from passes.trace.export import loss_and_metrics
from passes.trace.trace import trace
from tests.unit.passes.trace.loss.test_token_mean import IGNORED, Tagger, batch, plain


def test_grown_batches_of_language_models_have_unlike_numbers_of_labels() -> None:
    workload = bundled("llama-1b", size="tiny", layers=1)
    assert (workload.example_inputs["labels"] == IGNORED).any()
    graph = trace(workload.model, workload.example_inputs)
    grown = grow_batch(workload.example_inputs, graph.batch.batch_dims, workload.model, 6)
    made = ignore_unevenly(grown, workload.model, graph)
    valid = (made["labels"] != IGNORED).view(3, -1).sum(1).tolist()
    assert len(set(valid)) == 3
    assert min(valid) > 0
    assert torch.equal(made["input_ids"], grown["input_ids"])


def test_labels_that_may_not_be_ignored_stay() -> None:
    whole = {name: leaf for name, leaf in batch(4, ignored=0.0).items() if name != "mask"}
    graph = trace(Tagger(), whole, loss_fn=plain)
    assert torch.equal(ignore_unevenly(whole, Tagger(), graph)["labels"], whole["labels"])


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
    found = reference_step(reference, whole, whole, graph, (2, 2, 2), "none", 0.0)
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
