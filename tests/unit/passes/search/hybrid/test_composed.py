"""Stages of a real model on one kind of group: what fits, how fast, and what is proved about it."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from benchmarks.feature_matrix import load
from cost_models.cluster import ClusterSpec
from passes.lower.job import Job
from passes.search.hybrid.composed import Composed, composed, families_of
from passes.search.hybrid.joints import pieces_of
from passes.search.hybrid.pieces import GroupKind, PieceSearch
from passes.search.hybrid.ranges import HELD, STATE


@cache
def table(model: str) -> Composed:
    search = PieceSearch(pieces_of(load(model)[1]), ClusterSpec.parse("dgx-h100:1"), frozenset())
    return composed(search, GroupKind((0, 1, 2, 3), 2, 2), Job(16), 4, families_of(4), 1e-3)


def rooms(own: Composed) -> list[float]:
    kept = own.ranges[0].amounts[:, int(own.number[0, len(own.pieces)]), 0]
    return [float(kept[STATE] + 4 * kept[HELD]) * share for share in (0.2, 0.5, 0.7, 0.9, 1.1, 2.0)]


@pytest.mark.parametrize("model", ["gpt2", "t5"])
@pytest.mark.parametrize("held", [1, 3, 4, 9])
def test_nothing_that_fits_is_below_the_bound(model: str, held: int) -> None:
    own = table(model)
    for room in rooms(own):
        fast, least = own.fastest(4, held, room), own.least(4, held, room)
        assert (least <= fast.seconds * (1 + 1e-9)).all()


def test_more_room_is_never_slower_and_less_of_it_computes_more_again() -> None:
    own = table("gpt2")
    found = [own.fastest(4, 4, room) for room in rooms(own)]
    for tight, wide in pairwise(found):
        assert (wide.seconds <= tight.seconds).all()
    whole = int(own.number[0, len(own.pieces)])
    again = [int(fast.again[whole]) for fast in found if np.isfinite(fast.seconds[whole])]
    assert again[-1] == 0
    assert max(again) > 0


def test_what_computes_again_is_no_more_than_there_are_blocks() -> None:
    own = table("t5")
    for room in rooms(own):
        fast = own.fastest(4, 4, room)
        assert (fast.again <= own.blocks).all()


def test_with_room_for_everything_the_fastest_is_the_bound() -> None:
    own = table("gpt2")
    fast, least = own.fastest(4, 4, 1e15), own.least(4, 4, 1e15)
    np.testing.assert_allclose(fast.seconds, least, rtol=1e-9)
