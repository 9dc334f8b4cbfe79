"""Leaves without a batch dimension: right where all samples share them, refused elsewhere."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partitioner import ModelError
from partitioner.models.as_graph import as_graph
from passes.fidelity.parts import whole_leaves

SAMPLES = 4
Body = Callable[["Two", Tensor, Tensor], Tensor]


class Two(nn.Module):
    """Two inputs, of which the second meets the first in ``body``."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.linear, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.body = body

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return self.body(self, x, other).square().mean()


def list_of_samples(m: Two, x: Tensor, other: Tensor) -> Tensor:
    """One entry for each sample: a list fixes their number. Every sample of ``x`` takes all that there are."""
    return m.linear(x) * torch.stack(list(m.second(other))).mean(0)


def paired(m: Two, x: Tensor, other: Tensor) -> Tensor:
    rows = torch.cat([row.unsqueeze(0) for row in m.second(other)], dim=0)
    return m.linear(x).index_select(0, torch.arange(rows.shape[0])) + rows


def shared_mask(m: Two, x: Tensor, other: Tensor) -> Tensor:
    """(samples, tokens, 6) with a mask (tokens, tokens)."""
    return m.linear((x.transpose(1, 2) @ other).transpose(1, 2))


def checked(body: Body, x: Tensor, other: Tensor, **options: Any) -> Any:
    return as_graph(Two(body), example_inputs={"x": x, "other": other}, **options)


def test_a_part_that_fails_is_refused_with_the_leaf_and_the_line() -> None:
    with pytest.raises(ModelError) as caught:
        checked(paired, torch.randn(SAMPLES, 6), torch.randn(SAMPLES, 6))
    text = str(caught.value)
    assert "would get other whole" in text
    assert "a part of the batch fails with IndexError" in text
    assert "test_parts.py:" in text
    assert "opaque=[the module that fixes the size of other]" in text


def test_edges_between_the_nodes_of_a_batch_do_not_fit_its_parts() -> None:
    def neighbours(m: Two, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        return torch.zeros_like(x).index_add(0, target, m.linear(x)[source])

    edges = torch.tensor([[0, 1, 2, 3, 3], [1, 2, 3, 0, 1]])
    with pytest.raises(ModelError, match="would get other whole") as caught:
        checked(neighbours, torch.randn(SAMPLES, 6), edges)
    assert re.search(
        r"a part of the batch fails with IndexError: .* \(test_parts.py:\d+\)", str(caught.value)
    )
    assert "other, (2, 5), has no batch dimension" in str(caught.value)


def rows_in_order(m: Two, x: Tensor, other: Tensor) -> Tensor:
    """Run with any number of samples, and pair the wrong ones: the first of ``other`` with whatever comes."""
    rows = torch.stack(list(m.second(other)))
    return m.linear(x) * rows[torch.arange(x.shape[0])]


def test_wrong_pairs_are_refused_by_the_loss() -> None:
    with pytest.raises(
        ModelError, match=r"the loss of the batch is .*, that of its parts of 2 and 2 samples"
    ):
        checked(rows_in_order, torch.randn(SAMPLES, 6), torch.randn(SAMPLES, 6))


def test_the_users_word_is_taken() -> None:
    graph = checked(
        rows_in_order, torch.randn(SAMPLES, 6), torch.randn(SAMPLES, 6), batch_dims={"other": None}
    )
    assert graph.batch.batch_dims["other"] is None


@pytest.mark.parametrize("samples", [SAMPLES, 2 * SAMPLES])
def test_a_mask_of_the_batchs_size_by_coincidence_is_fine(samples: int) -> None:
    graph = checked(shared_mask, torch.randn(samples, SAMPLES, 6), torch.ones(SAMPLES, SAMPLES).tril())
    assert graph.batch.batch_dims == {"x": 0, "other": None}
    assert whole_leaves(graph, ()) == ("other",)
    assert whole_leaves(graph, ("other",)) == ()


def test_all_samples_may_share_a_list() -> None:
    graph = checked(list_of_samples, torch.randn(SAMPLES, 6), torch.randn(SAMPLES, 6))
    assert graph.batch.batch_dims["other"] is None


def test_without_values_a_note_says_what_happens() -> None:
    with torch.device("meta"):
        model = Two(paired)
        batch = {"x": torch.randn(SAMPLES, 6), "other": torch.randn(SAMPLES, 6)}
    (note,) = (n for n in as_graph(model, example_inputs=batch).notes if n.startswith("other "))
    assert "has no batch dimension, as the code fixes its size, in test_parts.py:" in note
    assert "every micro-batch gets all of it" in note


class Memory(nn.Module):
    """Attends to what earlier batches left, kept for each sample of three: the code fixes their number."""

    memory: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("memory", torch.zeros(3, 2, 6))

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.cat([self.memory, self.linear(x)], 1)
        weights = (self.linear(x) @ seen.transpose(1, 2)).softmax(-1)
        return (weights @ seen).square().mean()


def test_a_sequence_is_not_taken_for_the_samples() -> None:
    x = torch.randn(3, 8, 6)
    with pytest.raises(ModelError) as caught:
        as_graph(Memory(), example_inputs={"x": x})
    text = str(caught.value)
    assert "not clear along which dimension Memory has its samples" in text
    assert "test_parts.py:" in text
    assert "batch_dims={'x': 1}" in text
    assert as_graph(Memory(), example_inputs={"x": x}, batch_dims={"x": 1}).batch.batch_dims == {"x": 1}
