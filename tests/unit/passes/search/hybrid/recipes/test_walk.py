"""The layouts at the joints of a stage: the cheapest row, and the first of those that cost the same."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from passes.search.hybrid.recipes.walk import _cheapest


@pytest.mark.parametrize("seed", range(20))
def test_no_row_of_layouts_is_cheaper(seed: int) -> None:
    costs = list(np.random.default_rng(seed).random((5, 3, 3)))
    rows = itertools.product(range(3), repeat=6)
    best = min(rows, key=lambda row: sum(c[a, b] for c, a, b in zip(costs, row, row[1:], strict=False)))
    assert _cheapest(costs) == list(best)


def test_rounding_does_not_change_the_layout_between_equal_layers() -> None:
    noise = np.random.default_rng(0).choice([0.0, 1e-16], (40, 2, 2))
    assert _cheapest(list(0.1 + noise)) == [0] * 41
