"""Stages of a real model on one kind of group: what fits, how fast, and what is proved about it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from cost_models.arrays import FloatArray
from cost_models.cluster import ClusterSpec
from passes.lower.job import Job
from passes.search.hybrid.recipes.composed import SCALE, Composed, composed
from passes.search.hybrid.recipes.joints import pieces_of
from passes.search.hybrid.recipes.mixes import Mix
from passes.search.hybrid.recipes.pieces import GroupKind, PieceSearch
from passes.search.hybrid.recipes.ranges import HELD, STATE
from passes.search.hybrid.recipes.walk import needed_bytes, seconds_per_step, walk
from passes.search.words import RecomputeMode
from tests.support.traced_models import loaded


@cache
def table(model: str) -> Composed:
    search = PieceSearch(pieces_of(loaded(model)[1]), ClusterSpec.parse("dgx-h100:1"), frozenset())
    return composed(search, GroupKind((0, 1, 2, 3), 2, 2), Job(16), 4, (1, 2, 4), 1e-3)


def rooms(own: Composed) -> list[float]:
    kept = own.ranges[0].amounts[:, int(own.number[0, len(own.pieces)]), 0]
    return [float(kept[STATE] + 4 * kept[HELD]) * share for share in (0.2, 0.5, 0.7, 0.9, 1.1, 2.0)]


def least(own: Composed, held: int, room: float, longest: int | None = None) -> FloatArray:
    found: FloatArray = own.priced(4, held, room, longest=longest).max(axis=-1).min(axis=1)
    return found


@pytest.mark.parametrize("model", ["gpt2", "t5"])
@pytest.mark.parametrize("held", [1, 3, 4, 9])
def test_nothing_that_fits_is_below_the_bounds(model: str, held: int) -> None:
    own = table(model)
    for room in rooms(own):
        fast = own.mixes(4, held).fastest(room).seconds
        by_count = least(own, held, room, len(own.pieces))
        assert (by_count <= fast * (1 + 1e-9)).all()
        assert (least(own, held, room) <= by_count * (1 + 1e-9)).all()


def test_ranges_of_few_pieces_are_bounded_as_all_are() -> None:
    own = table("gpt2")
    room = rooms(own)[1]
    few, every = least(own, 4, room, 2), least(own, 4, room, len(own.pieces))
    first, end = np.nonzero(own.number >= 0)
    short = own.number[first, end][end - first <= 2]
    np.testing.assert_array_equal(few[short], every[short])
    assert np.isinf(np.delete(few, short)).all()


def test_ranges_that_are_too_long_are_left_out() -> None:
    own = table("gpt2")
    for room in rooms(own):
        every = own.mixes(4, 4).fastest(room)
        most = float(np.median(every.seconds[np.isfinite(every.seconds)]))
        some = own.mixes(4, 4).fastest(room, most)
        short = every.seconds <= most
        for name in ("seconds", "rest", "first", "count"):
            np.testing.assert_array_equal(getattr(some, name)[short], getattr(every, name)[short])
        assert (some.seconds[~short] > most).all()


def test_more_room_is_never_slower_and_less_of_it_computes_more_again() -> None:
    own = table("gpt2")
    mixes = own.mixes(4, 4)
    found = [mixes.fastest(room) for room in rooms(own)]
    for tight, wide in pairwise(found):
        assert (wide.seconds <= tight.seconds).all()
    whole = int(own.number[0, len(own.pieces)])
    again = [blocks_again(own, mixes.mix(fast, whole)) for fast in found if np.isfinite(fast.seconds[whole])]
    assert again[-1] == 0
    assert max(again) > 0


def blocks_again(own: Composed, mix: Mix) -> int:
    blocks = sum(map(bool, own.pieces.blocks))
    return mix.first_again * mix.count + mix.again * (blocks - mix.count)


@pytest.mark.parametrize(("recompute", "again"), [("none", {False}), ("full", {True})])
def test_recomputation_is_as_asked(recompute: RecomputeMode, again: set[bool]) -> None:
    own = table("t5")
    mixes = own.mixes(4, 4, recompute)
    assert {each for _, each in mixes.ways} == again
    for room in rooms(own):
        fast = mixes.fastest(room)
        assert (fast.count <= own.blocks).all()
        bound = own.priced(4, 4, room, recompute, len(own.pieces)).max(axis=-1).min(axis=1)
        assert (bound <= fast.seconds * (1 + 1e-9)).all()


def test_blocks_that_keep_nothing_are_computed_again_where_all_are_to_be() -> None:
    """Parts of blocks that are as cheap computed again as kept are no reason to have no way at all."""
    own = table("gpt2")
    alike = replace(own, ranges=(own.ranges[0],) * 2)
    assert {again for _, again in alike.mixes(4, 4, "full").ways} == {True}
    assert {again for _, again in alike.mixes(4, 4).ways} == {False}


def test_a_walk_takes_what_the_table_says() -> None:
    own = table("gpt2")
    mixes = own.mixes(4, 4)
    whole = len(own.pieces)
    for room in rooms(own):
        fast = mixes.fastest(room)
        number = int(own.number[0, whole])
        if np.isfinite(fast.seconds[number]):
            steps = walk(own, 0, whole, mixes.mix(fast, number), 4, room)
            assert needed_bytes(steps, 4) <= room
            assert seconds_per_step(steps) / 4 == pytest.approx(float(fast.seconds[number]), rel=0.02)


def test_within_a_time_the_cheapest_way_is_one_of_the_fastest_that_fit() -> None:
    own = table("gpt2")
    mixes = own.mixes(4, 4)
    for room in rooms(own):
        fast = mixes.fastest(room).seconds
        for number in np.flatnonzero(np.isfinite(fast)).tolist():
            _, size = mixes.cheapest(float(fast[number]) * (1 + 1e-9), 1e3)
            assert size[number] <= room * (1 + 1e-9)


def test_with_room_for_everything_the_fastest_is_the_bound() -> None:
    own = table("gpt2")
    np.testing.assert_allclose(own.mixes(4, 4).fastest(1e15).seconds, least(own, 4, 1e15), rtol=1e-9)


def test_the_largest_buffer_leaves_the_bound_less_room() -> None:
    own = table("gpt2")
    whole, room = int(own.number[0, len(own.pieces)]), rooms(own)[1]
    largest = max(recipes.floor_bytes for recipes in own.recipes[0])
    assert largest > 0
    prices = [0, *range(1 - len(SCALE), 0)]  # those of four micro-batches held at once, the most
    expected = own.ranges[0].least[whole] + own.prices.state * (largest - room)
    np.testing.assert_allclose(own.priced(4, 4, room, "none")[whole, 0], expected[prices] / 4, rtol=1e-12)
