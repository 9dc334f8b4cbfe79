"""Cutting batches."""

from __future__ import annotations

import pytest
import sympy
import torch

from cost_models.errors import InternalError, UsageError
from runtime.ops.random import mix
from runtime.segment.code import BatchSpec, TensorSpec
from runtime.segment.microbatch import Microbatches, batch_size_of, symbol_sizes

B, S = sympy.Symbol("b"), sympy.Symbol("s")
SPEC = BatchSpec({"ids": 1, "table": None}, B, {B: ("ids", 1), S: ("ids", 0)})


@pytest.mark.parametrize(("size", "parts"), [(10, 4), (7, 7), (9, 2), (8, 4), (5, 1)])
def test_sizes_are_those_of_the_pieces(size: int, parts: int) -> None:
    cuts = Microbatches.of(size, parts)
    sizes, tensor = cuts.sizes, torch.arange(2 * size).view(2, size)
    pieces = cuts.cut(tensor, 1)
    assert [p.shape[1] for p in pieces] == list(sizes)
    assert max(sizes) - min(sizes) <= 1
    assert torch.equal(torch.cat(pieces, 1), tensor)
    assert (len(cuts), cuts.batch_size) == (parts, size)
    assert [p is tensor for p in Microbatches((1, 1, 1)).cut(tensor, None)] == [True] * 3


def test_a_part_of_each_micro_batch_is_cut_where_its_samples_end() -> None:
    cuts, part = Microbatches.of(10, 2, 2), torch.arange(5)
    assert cuts.sizes == (6, 4)
    assert [piece.tolist() for piece in cuts.cut(part, 0, 2)] == [[0, 1, 2], [3, 4]]
    for wrong, parts in ((torch.arange(6), 2), (torch.arange(3), 3), (torch.arange(4), 1)):
        with pytest.raises(InternalError, match="samples of 1 / "):
            cuts.cut(wrong, 0, parts)


def test_symbols_follow_the_micro_batch() -> None:
    assert symbol_sizes(SPEC, {"ids": (17, 10), "table": (4,)}, 3) == {B: 3, S: 17}


def test_bad_batches_are_explained() -> None:
    with pytest.raises(UsageError, match="missing: table"):
        batch_size_of({"ids": torch.zeros(3, 4)}, SPEC)
    two = BatchSpec({"a": 0, "b": 0}, B, {B: ("a", 0)})
    with pytest.raises(UsageError, match=r"a: 3 samples in dimension 0(.|\n)*b: 4 samples"):
        batch_size_of({"a": torch.zeros(3), "b": torch.zeros(4)}, two)
    with pytest.raises(UsageError, match="cannot cut a batch of 3 samples into 4"):
        Microbatches.of(3, 4)
    with pytest.raises(UsageError, match="a micro-batch needs a multiple of 2"):
        Microbatches.of(7, 3, 2)


def test_seeds_differ_in_every_place() -> None:
    places = [(s, t, g, m) for s in range(3) for t in range(4) for g in range(4) for m in range(8)]
    assert len({mix(*place) for place in places}) == len(places)
    assert all(0 <= mix(*place) < 2**63 for place in places)


def test_a_batch_unlike_the_traced_one_is_refused_before_anything_is_sent() -> None:
    leaves = {"ids": TensorSpec((S, B), torch.int64), "table": TensorSpec((4, 6), torch.float32)}
    spec = BatchSpec({"ids": 1, "table": None}, B, {B: ("ids", 1), S: ("ids", 0)}, leaves)
    good = {"ids": torch.zeros(5, 8, dtype=torch.int64), "table": torch.zeros(4, 6)}
    assert batch_size_of(good, spec) == 8
    with pytest.raises(UsageError) as caught:
        batch_size_of({"ids": torch.zeros(5, 8), "table": torch.zeros(4, 7)}, spec)
    assert caught.value.because == (
        "ids is torch.float32, expected torch.int64",
        "table has the shape (4, 7), expected (4, 6)",
    )
    with pytest.raises(UsageError, match=r"ids has the shape \(8,\), expected \(any, any\)"):
        batch_size_of({**good, "ids": torch.zeros(8, dtype=torch.int64)}, spec)
