"""Parts of batches: which ones ranks take, and the sums that they make of what they counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from partitioner.batches.part_batch import AbsentBatch, DataPlace, PartBatch, agreed_place, normalized
from partitioner.batches.step import BatchCuts
from passes.trace.trace import trace
from runtime.ranks.collective import Collectives
from runtime.ranks.meeting import Meeting

CUTS = BatchCuts(8, 2, multiple=2)


class Said:
    """A meeting of ranks that said this."""

    def __init__(self, *said: list[Any]) -> None:
        self.said = list(said)

    def decide(self, topic: str, mine: Any, judge: Any) -> Any:
        assert mine in self.said
        return judge(self.said)


@pytest.mark.parametrize(
    ("said", "world"),
    [
        ([[True, 2], [True, 2], [True, 2], [True, 2]], 2),
        ([[True, 2], [True, 2], [False, 1], [True, 2]], 2),
        ([[True, 1], [True, 2], [True, 2]], 1),
        ([[True, 2], [True, 2], [True, 3]], 1),
        ([[False, 1], [True, 1]], 1),
    ],
)
def test_ranks_that_read_take_as_many_parts(said: list[list[Any]], world: int) -> None:
    meeting = cast(Meeting, Said(*said))
    for reads, own in said:
        mine = DataPlace(own - 1, own, CUTS, (0,))
        place = agreed_place(mine, reads, meeting)
        assert place.world == world
        assert (place == mine) == (own == world)
        assert place.speaks == (own == world)
        assert bool(place.sizes(8)) == (world > 1)


class Sums:
    """Collectives that hand in what the other ranks brought, and note what this one brings."""

    device = torch.device("cpu")

    def __init__(self, others: Tensor) -> None:
        self.others, self.brought = others, others

    def all_reduce(self, own: Tensor, what: str) -> Any:
        self.brought = own
        summed = own + self.others
        return type("Pending", (), {"wait": lambda _: summed})()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Embedding(5, 5)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.up(ids).flatten(0, 1), labels.flatten(), ignore_index=-100)


def test_a_divisor_is_counted_once_whoever_reads_it() -> None:
    """Two stages of two replicas count 3 and 5 valid labels; a rank of another stage has nothing to add, and joins."""
    ids, labels = torch.zeros(8, 2, dtype=torch.int64), torch.full((8, 2), -100)
    labels[:2], labels[2, 0] = 1, 1
    labels[4:6], labels[6, 0] = 1, 1
    graph = trace(Net().double(), {"ids": ids, "labels": labels})
    assert graph.token_counts is not None
    made, sizes = graph.token_counts.made, (4, 4)
    place = DataPlace(0, 2, CUTS, (0,))
    first, second = labels[[0, 1, 4, 5]], labels[[2, 3, 6, 7]]
    counts = [float((part != -100).sum()) for part in (first, second)]
    assert counts == [8.0, 2.0]

    absent = Sums(torch.zeros(2, dtype=torch.float64))
    normalized(graph, {}, sizes, (), AbsentBatch(8, graph, in_parts=True), cast(Collectives, absent))
    assert absent.brought.tolist() == [0.0, 0.0]

    # The other replica, and both of another stage that reads labels too.
    others = torch.tensor([counts[1] + sum(counts), 1.0], dtype=torch.float64)
    leaves, own = {"ids": ids[:4], "labels": first}, Sums(others)
    found = normalized(graph, leaves, sizes, made, PartBatch(leaves, 8, place), cast(Collectives, own))
    assert own.brought.tolist() == [8.0, 1.0]
    expected = torch.full((8,), 2.0 / 10.0, dtype=torch.float64)
    torch.testing.assert_close(found["loss_normalizer"], expected)

    silent = Sums(others)
    copy = PartBatch(leaves, 8, replace(place, speaks=False))
    normalized(graph, leaves, sizes, made, copy, cast(Collectives, silent))
    assert silent.brought.tolist() == [0.0, 0.0]
