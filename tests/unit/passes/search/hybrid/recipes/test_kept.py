"""Ways to keep parameters: no recipe of a piece takes less than one replica's, and the cheapest of these on top."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from cost_models.cluster import ClusterSpec
from passes.lower.job import Job
from passes.search.hybrid.floors import MANY
from passes.search.hybrid.recipes.joints import pieces_of
from passes.search.hybrid.recipes.kept import keeping, kept, used_seconds
from passes.search.hybrid.recipes.pieces import GroupKind, PieceSearch, Prices
from tests.support.matrix import thinned
from tests.support.traced_models import loaded

PRICES = np.array([0.0, 1e-14, 1e-12, 1e-10, 1e-8])
"""Seconds per byte: from where parameters are kept whole to where they are kept in parts."""


@pytest.mark.parametrize(
    ("model", "replicas", "tensor"),
    thinned(
        [(model, *group) for model in ("gpt2", "t5") for group in ((4, 1), (2, 2), (8, 1), (1, 4))],
        [("t5", 2, 2), ("gpt2", 8, 1)],
    ),
)
def test_no_recipe_is_below(model: str, replicas: int, tensor: int) -> None:
    search = PieceSearch(pieces_of(loaded(model)[1]), ClusterSpec.parse("dgx-h100:1"), frozenset())
    ranks, samples, m = tuple(range(replicas * tensor)), 16, 4
    group, one = GroupKind(ranks, replicas, tensor), GroupKind(ranks[:tensor], 1, tensor)
    free = Prices(np.zeros(1), np.zeros(1))
    for kind, again in product(range(len(search.pieces.first)), (False, True)):
        many = Job(samples // replicas * MANY)
        alone = search.recipes(kind, one, many, MANY, free, again=again).least.min() / MANY
        priced = Prices(PRICES * m, np.zeros(len(PRICES)))
        own = search.recipes(kind, group, Job(samples * m), m, priced, again=again).least.min(axis=(1, 2)) / m
        problems = [keeping(search, kind, group, Job(samples * m), again=each) for each in (False, True)]
        ways = kept(problems, tensor, samples)
        least = ways.least(m, PRICES)
        assert (alone + least <= own * (1 + 1e-9)).all()
        if len(ways.begins):
            assert least[0] > 0  # gradients are summed, parameters updated, whatever memory costs
            assert (np.diff(least) > 0).all()


def test_dearer_memory_brings_parts() -> None:
    search = PieceSearch(pieces_of(loaded("gpt2")[1]), ClusterSpec.parse("dgx-h100:1"), frozenset())
    ways = kept([keeping(search, 1, GroupKind(tuple(range(8)), 8, 1), Job(64), again=False)], 1, 16)
    slope = np.diff(ways.least(4, PRICES)) / np.diff(PRICES)  # bytes of the cheapest ways
    assert (np.diff(slope) <= slope[:-1] * 1e-9).all()
    assert slope[-1] < slope[0] / 3


def test_parameters_cost_the_same_whatever_ops_do() -> None:
    search = PieceSearch(pieces_of(loaded("t5")[1]), ClusterSpec.parse("dgx-h100:1"), frozenset())
    kind = len(search.pieces.first) - 1
    every, alone = (
        search.problem(kind, GroupKind((0, 1, 2, 3), 4, 1), Job(64), 4, ops_cost=whole)
        for whole in (True, False)
    )
    assert sum(own.seconds.sum() for own in every.units) > sum(own.seconds.sum() for own in alone.units)
    one, other = used_seconds(every), used_seconds(alone)
    for unit in every.space.units:
        if unit.kind == "parameter":
            np.testing.assert_array_equal(one[unit.index], other[unit.index])


def test_a_class_without_parameters_costs_nothing() -> None:
    search = PieceSearch(pieces_of(loaded("gpt2")[1]), ClusterSpec.parse("dgx-h100:1"), frozenset())
    ways = kept([keeping(search, 0, GroupKind((0, 1), 2, 1), Job(64), again=False)], 1, 16)
    none = replace(ways, begins=ways.begins[:0])
    assert (none.least(4, PRICES) == 0).all()
