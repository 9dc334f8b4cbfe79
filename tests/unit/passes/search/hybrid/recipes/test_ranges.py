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
    SAVED,
    Layouts,
    least_of_ranges,
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
        found.append(Recipes(arriving, leaving, least, 0.0, nothing, amounts, nothing))
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


SAVES = np.array([0.0, 5.0, 7.0, 0.0])
"""Bytes made anew while a piece of each kind is computed again."""


def amounts_of(recipes: list[Recipes], first: int, joints: tuple[int, ...], price: int) -> list[float]:
    """Add up what pieces from ``first`` on take with these layouts at their joints."""
    number, found = Layouts(recipes).number, np.zeros(6)
    for kind, before, behind in zip(KINDS[first:], joints, joints[1:], strict=False):
        own = recipes[kind]
        at = [number[x] for x in own.arriving].index(before), [number[x] for x in own.leaving].index(behind)
        a = own.amounts
        each = (a.seconds, a.once_seconds, a.state_bytes, a.held_bytes, a.buffer_bytes)
        taken = np.array([*(float(values[price, at[0], at[1]]) for values in each), SAVES[kind]])
        most = np.maximum(found, taken)
        found += taken
        found[[BUFFER, SAVED]] = most[[BUFFER, SAVED]]
    return list(found.tolist())


@pytest.mark.parametrize("seed", range(6))
def test_no_layouts_at_joints_are_cheaper(seed: int) -> None:
    rng = default_rng(seed)
    recipes = random_recipes(rng)
    count = len(Layouts(recipes))
    arriving, leaving = (rng.integers(0, 9, (4, count)).astype(float) for _ in range(2))
    found = ranges_of(KINDS, recipes, arriving, leaving, saved_bytes=SAVES)
    for (first, end), price in itertools.product(
        itertools.combinations(range(len(KINDS) + 1), 2), range(len(STATE_PRICES))
    ):
        ways = every_way(recipes, first, end, arriving, leaving, price)
        number = int(found.number[first, end])
        rows, least = found.amounts[:, number, price], min(ways.values())
        assert found.least[number, price] == pytest.approx(least)
        cheapest = [joints for joints, cost in ways.items() if cost == pytest.approx(least)]
        assert any(
            rows.tolist() == pytest.approx(amounts_of(recipes, first, joints, price)) for joints in cheapest
        )
        assert rows[SAVED] == max(SAVES[kind] for kind in KINDS[first:end])


@pytest.mark.parametrize("seed", range(6))
def test_costs_alone_are_those_of_the_ways(seed: int) -> None:
    recipes = random_recipes(default_rng(seed))
    free = np.zeros((4, len(Layouts(recipes))))
    found = ranges_of(KINDS, recipes, free, free)
    number, least = least_of_ranges(KINDS, recipes)
    assert (number == found.number).all()
    assert (least == found.least).all()


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
