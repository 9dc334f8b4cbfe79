"""Bounds of stages that share memory, on pipelines that are written by hand."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from cost_models.arrays import FloatArray
from passes.search.hybrid.options import GroupOption
from passes.search.hybrid.pools import Pool, Run
from passes.search.hybrid.program import PipelineProgram
from passes.search.hybrid.recipes.composed import SCALE
from passes.search.hybrid.staged import Staged
from passes.search.hybrid.together import Together

PIECES = 5


def plane(seconds: FloatArray) -> FloatArray:
    """[first piece, last + 1] of ranges that take what their length says."""
    found = np.full((PIECES + 1, PIECES + 1), np.inf)
    for a, b in itertools.combinations(range(PIECES + 1), 2):
        found[a, b] = seconds[b - a - 1]
    return found


def bounded(chunks: int, link: float, longer: float = 0.0) -> tuple[Together, PipelineProgram]:
    """Two groups, a second per piece; stages that share a group fit if they take ``longer``, else need far too much."""
    schedule = "interleaved" if chunks > 1 else "1f1b"
    option = GroupOption((Run(Pool(tuple(range(0, 2 * 2, 2)), 2, 0), 2, 1, 2),), 2, 8, schedule, chunks)
    links = [np.full(PIECES + 1, link if k else 0.0) for k in range(option.stages)]
    lengths = np.arange(1.0, PIECES + 1)
    number = np.where(np.isfinite(plane(lengths)), plane(lengths) - 1, -1).astype(np.int64)
    table = cast(Any, SimpleNamespace(plane=plane, number=number))
    priced = lengths[:, None] + np.minimum(np.array(SCALE) * 1e3, longer)
    staged = Staged(option, [table] * option.stages, links, [1.0, 1.0], "none")
    together = Together(staged, [priced[:, None]] * option.stages)
    return together, PipelineProgram(option, [plane(lengths + longer)] * option.stages, links)


def cheapest(program: PipelineProgram) -> float:
    cuts = itertools.combinations(range(1, PIECES), program.option.stages - 1)
    return min(program.valued([0, *cut]).objective_seconds for cut in cuts)


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("link", [0.0, 1.0, 3.0])
def test_cuts_are_no_part_of_the_longest_stage(chunks: int, link: float) -> None:
    together, program = bounded(chunks, link)
    best = cheapest(program)
    assert together.quick_seconds() <= best * (1 + 1e-9)
    assert together.seconds(program.seconds, math.inf) <= best * (1 + 1e-9)
    assert together.seconds(program.seconds, best * 1.05) <= best * (1 + 1e-9)


def test_stages_may_be_longer_than_they_are_alone() -> None:
    """Without a known pipeline nothing says how long the longest stage may be."""
    together, program = bounded(2, 0.0, longer=10.0)
    alone = bounded(2, 0.0)[1].seconds
    assert together.seconds(alone, math.inf) <= cheapest(program) * (1 + 1e-9)
