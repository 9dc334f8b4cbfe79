"""Min-sum elimination against every combination of options, on layout problems of pieces of real models."""

from __future__ import annotations

import itertools
import random
from functools import cache

import numpy as np
import pytest

from cost_models.cluster import ClusterSpec
from passes.costs.costs import costs_of
from passes.lower.job import Job
from passes.search.feature.bound import bridges_used, price, wire_tables
from passes.search.feature.graph import feature_graph
from passes.search.feature.problem import FeatureProblem, build_problem
from passes.search.feature.setting import PartPlace, Setting
from passes.search.hybrid.recipes.eliminate import KEPT_KINDS, eliminate
from passes.search.hybrid.recipes.joints import Pieces, pieces_of
from passes.search.hybrid.recipes.pieces import GroupKind
from passes.shard.discover import Discovery
from tests.support.matrix import thinned
from tests.support.traced_models import loaded

MOST = 1 << 12
"""Combinations of options that are all tried."""
CASES = [(model, seed) for seed in range(16) for model in ("gpt2", "t5", "unet", "mixtral")]
GROUPS = [GroupKind((0, 1), 1, 2), GroupKind((0, 1, 2, 3), 2, 2)]


@cache
def pieces_of_model(name: str) -> Pieces:
    return pieces_of(loaded(name)[1])


def thin_problem(model: str, seed: int) -> FeatureProblem:
    """A piece's problem, so many options left out at random that all combinations can be tried."""
    draw, pieces = random.Random(seed), pieces_of_model(model)
    cluster = ClusterSpec.parse("dgx-h100:1")
    part = draw.choice([pieces.parts[first] for first in pieces.first])
    group = draw.choice(GROUPS)
    space = feature_graph(part, costs_of(part, cluster), Discovery.stored().choices)
    names = tuple(name for name, _ in group.axes)
    setting = Setting(cluster, Job(8), part=PartPlace(group.ranks, names))
    whole = build_problem(space, group.mesh, 2, setting)
    left = MOST
    masks = [np.zeros(len(unit.seconds), dtype=bool) for unit in whole.units]
    for u in draw.sample(range(len(masks)), len(masks)):
        count = len(masks[u])
        most = 3 if left >= 3 * 3 else 1
        kept = min(count, draw.randint(1, most), left)
        masks[u][draw.sample(range(count), kept)] = True
        left //= kept
    return whole.keep(masks)


@pytest.mark.parametrize(("model", "seed"), thinned(CASES, [("gpt2", 1), ("unet", 1), ("mixtral", 2)]))
def test_no_combination_is_cheaper(model: str, seed: int) -> None:
    problem = thin_problem(model, seed)
    tables = wire_tables(problem)
    counts = [len(unit.seconds) for unit in problem.units]
    free = [u for u, count in enumerate(counts) if count > 1]
    kept = random.Random(seed).sample(free, min(2, len(free)))
    scale = sum(float(unit.seconds.min()) for unit in problem.units) / 1e9
    state, held = scale * np.array([0.0, 1.0, 3.0]), scale * np.array([0.0, 4.0, 1.0])
    found = eliminate(problem, tables, state, held, kept)

    least = np.full(found.least.shape, np.inf)
    for combination in itertools.product(*(range(counts[u]) for u in free)):
        options = [0] * len(counts)
        for unit, option in zip(free, combination, strict=True):
            options[unit] = option
        seconds = price(problem, tables, options).seconds
        always = sum(
            float(numbers.bytes[option])
            for unit, numbers, option in zip(problem.space.units, problem.units, options, strict=True)
            if unit.kind in KEPT_KINDS
        )
        whole = sum(float(n.bytes[option]) for n, option in zip(problem.units, options, strict=True))
        for wire, known in zip(problem.space.wires, tables, strict=True):
            whole += float(known.table.copies[bridges_used(problem, wire, known, options)].sum())
        total = seconds + state * always + held * (whole - always)
        at = (slice(None), *(options[u] for u in kept))
        least[at] = np.minimum(least[at], total)
    np.testing.assert_allclose(found.least, least, rtol=1e-9)

    chosen = found.decode()
    amounts = found.amounts(chosen)
    axes = [slice(None), *[None] * len(kept)]
    taken = amounts.seconds + amounts.once_seconds
    taken = taken + state[tuple(axes)] * amounts.state_bytes + held[tuple(axes)] * amounts.held_bytes
    np.testing.assert_allclose(taken, least, rtol=1e-9)
    for grid, unit in zip(np.indices(chosen.shape[1:])[1:], kept, strict=True):
        assert (chosen[unit] == grid).all()
