"""(min, +) products of recipes against every choice of layouts at the joints."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.random import Generator, default_rng

from cost_models.arrays import FloatArray
from cost_models.layout import Replicate, Shard
from passes.search.hybrid.recipes.eliminate import Amounts
from passes.search.hybrid.recipes.pieces import Recipes
from passes.search.hybrid.recipes.ranges import (
    BUFFER,
    HELD,
    ONCE,
    SAVED,
    SECONDS,
    STATE,
    Layouts,
    ranges_of,
    whole_seconds,
)

LAYOUTS = ((Replicate(),), (Shard(0),), (Shard(1),))
STATE_PRICES, HELD_PRICES = np.array([0.0, 0.3, 1.0]), np.array([0.0, 1.0, 0.5])
KINDS = (0, 1, 1, 2, 1, 3)
"""Embedding, layer, layer, another one, layer, head."""


def random_recipes(rng: Generator) -> list[Recipes]:
    found = []
    for kind in range(4):
        arriving = (None,) if kind == 0 else LAYOUTS
        leaving = (None,) if kind == 3 else LAYOUTS[: 2 if kind == 2 else 3]
        shape = (len(STATE_PRICES), len(arriving), len(leaving))
        seconds, once, state, held, buffer = (rng.integers(1, 20, shape).astype(float) for _ in range(5))
        least = seconds + once + STATE_PRICES[:, None, None] * state + HELD_PRICES[:, None, None] * held
        amounts = Amounts(seconds, once, state, held, buffer)
        nothing = cast(Any, SimpleNamespace())
        found.append(Recipes(nothing, arriving, leaving, least, amounts, nothing))
    return found


def every_way(
    recipes: list[Recipes], first: int, end: int, arriving: FloatArray, leaving: FloatArray, price: int
) -> dict[tuple[int, ...], float]:
    """Layouts at the joints of a range, by their numbers, with what they cost."""
    number = Layouts(recipes).number
    found = {}
    owns = [recipes[kind] for kind in KINDS[first:end]]
    for joints in itertools.product(range(len(number)), repeat=len(owns) + 1):
        cost = arriving[KINDS[first], joints[0]] + leaving[KINDS[end - 1], joints[-1]]
        for own, before, behind in zip(owns, joints, joints[1:], strict=False):
            into, out = [number[x] for x in own.arriving], [number[x] for x in own.leaving]
            if before not in into or behind not in out:
                cost = np.inf
                break
            cost += own.least[price, into.index(before), out.index(behind)]
        if np.isfinite(cost):
            found[joints] = float(cost)
    return found


@pytest.mark.parametrize("seed", range(6))
def test_no_layouts_at_joints_are_cheaper(seed: int) -> None:
    rng = default_rng(seed)
    recipes = random_recipes(rng)
    count = len(Layouts(recipes))
    arriving, leaving = (rng.integers(0, 9, (4, count)).astype(float) for _ in range(2))
    found = ranges_of(KINDS, recipes, arriving, leaving, saved_bytes=np.array([0.0, 5.0, 7.0, 0.0]))
    for (first, end), price in itertools.product(
        itertools.combinations(range(len(KINDS) + 1), 2), range(len(STATE_PRICES))
    ):
        ways = every_way(recipes, first, end, arriving, leaving, price)
        number = int(found.number[first, end])
        joints = tuple(found.layouts(number, price))
        assert ways[joints] == pytest.approx(min(ways.values()))
        rows = found.amounts[:, number, price]
        crossing = arriving[KINDS[first], joints[0]] + leaving[KINDS[end - 1], joints[-1]]
        priced = rows[SECONDS] + rows[ONCE] + STATE_PRICES[price] * rows[STATE]
        assert priced + HELD_PRICES[price] * rows[HELD] + crossing == pytest.approx(ways[joints])
        assert rows[SAVED] == max({1: 5.0, 2: 7.0}.get(kind, 0.0) for kind in KINDS[first:end])
        buffers = []
        for kind, before, behind in zip(KINDS[first:end], joints, joints[1:], strict=False):
            own, numbers = recipes[kind], Layouts(recipes).number
            at = (
                [numbers[x] for x in own.arriving].index(before),
                [numbers[x] for x in own.leaving].index(behind),
            )
            buffers.append(float(own.amounts.buffer_bytes[price, at[0], at[1]]))
        assert rows[BUFFER] == max(buffers)


def test_equal_ranges_are_one() -> None:
    recipes = random_recipes(default_rng(0))
    free = np.zeros((4, len(Layouts(recipes))))
    number = ranges_of(KINDS, recipes, free, free).number
    assert number[1, 2] == number[2, 3] == number[4, 5]
    assert len({int(number[a, b]) for a, b in [(0, 1), (1, 2), (3, 4), (5, 6), (1, 3), (2, 4)]}) == 6
    assert number[3, 3] == -1


def test_all_pieces_in_a_row_cost_the_least_way() -> None:
    recipes = random_recipes(default_rng(1))
    free = np.zeros((4, len(Layouts(recipes))))
    expected = min(every_way(recipes, 0, len(KINDS), free, free, 0).values())
    assert whole_seconds(KINDS, recipes) == pytest.approx(expected)
