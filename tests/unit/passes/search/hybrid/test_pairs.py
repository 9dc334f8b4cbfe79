"""Two stages on each group: cuts that fit are found wherever there are some, beside listing all of them."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from cost_models.arrays import FloatArray
from passes.search.hybrid.options import GroupOption
from passes.search.hybrid.pairs import Pairs
from passes.search.hybrid.pools import Pool, Run
from passes.search.hybrid.staged import Staged
from tests.support.matrix import some

PIECES, GROUPS, MOST = 8, 3, 1.0


def pairs(random: np.random.Generator) -> tuple[Pairs, list[FloatArray]]:
    """Three groups of random memory, bytes that grow with a stage, some stages and cuts too long."""
    option = GroupOption((Run(Pool(tuple(range(0, 2 * 3, 2)), 2, 0), 2, 1, GROUPS),), 2, 8, "interleaved", 2)
    assert option.in_pairs
    planes = []
    for _ in range(option.stages):
        each = random.random(PIECES) * 10
        plane = np.full((PIECES + 1, PIECES + 1), np.inf)
        for a, b in itertools.combinations(range(PIECES + 1), 2):
            if random.random() < 0.85:
                plane[a, b] = each[a:b].sum()
        planes.append(plane)
    links = [np.where(random.random(PIECES + 1) < 0.1, 2 * MOST, 0.0) for _ in planes]
    links[0][:] = 0.0
    table = cast(Any, SimpleNamespace())
    capacity = (random.random(GROUPS) * 20 + 5).tolist()
    return Pairs(Staged(option, [table] * option.stages, links, capacity, "none")), planes


def total(own: Pairs, planes: list[FloatArray], starts: list[int]) -> float:
    """Return the bytes of all stages; infinite where a group has too few, or a cut is too long."""
    used, ends = np.zeros(GROUPS), [*starts[1:], PIECES]
    for stage, (a, b) in enumerate(zip(starts, ends, strict=True)):
        behind = len(planes) - 1 - stage
        if own.staged.links[behind][b] > MOST:
            return np.inf
        used[stage % GROUPS] += planes[behind][a, b]
    return np.inf if (used > np.array(own.staged.capacity_bytes)).any() else float(used.sum())


@pytest.mark.parametrize("seed", some(range(40)))
def test_the_least_bytes_of_all_cuts_are_found(seed: int) -> None:
    own, planes = pairs(np.random.default_rng(seed))
    listed = [[0, *cut] for cut in itertools.combinations(range(1, PIECES), 2 * GROUPS - 1)]
    best = min(total(own, planes, starts) for starts in listed)
    found = own.cuts(MOST, planes)
    if found is None:
        assert np.isinf(best)
    else:
        assert total(own, planes, found) == pytest.approx(best)


def test_some_seeds_have_cuts_and_some_have_none() -> None:
    found = [own.cuts(MOST, planes) for own, planes in (pairs(np.random.default_rng(s)) for s in range(40))]
    assert 5 < sum(starts is not None for starts in found) < 35
