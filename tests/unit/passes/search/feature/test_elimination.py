"""The search's optimum is that of every combination of every numerically valid layout, on 200 graphs of up to 8 ops."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from cost_models.layout import Mesh
from passes.costs.costs import cost_graph
from passes.lower.job import Job
from passes.search.feature.graph import feature_graph
from passes.search.feature.problem import FeatureProblem, build_problem
from passes.search.feature.setting import Setting
from tests.support.matrix import thinned
from tests.support.random_graphs import random_model
from tests.unit.passes.search.feature.eliminate import TooWideError, least_seconds
from tests.unit.passes.search.feature.test_optimum import _cluster, every_valid, solve_problem

SHAPES = ((2,), (4,), (2, 2))
CASES = 200


def _problem(seed: int) -> FeatureProblem:
    draw = random.Random(1000 + seed)
    graph = random_model(1000 + seed, ops=2 + seed % 7).graph
    shape = SHAPES[seed % len(SHAPES)]
    ranks = math.prod(shape)
    cluster = _cluster(draw, ranks)
    space = feature_graph(graph, cost_graph(graph), every_valid)
    mesh = Mesh(tuple(range(ranks)), shape, ("outer", "inner")[: len(shape)])
    setting = Setting(cluster, Job(8))
    return build_problem(space, mesh, draw.choice([1, 2]), setting)


@pytest.mark.parametrize("part", thinned(range(4), [1]))
def test_no_combination_is_cheaper_than_what_the_search_finds(part: int) -> None:
    """Nothing is thinned out: the larger cases have 10¹² combinations."""
    most, cases = 0.0, 0
    for seed in itertools.count(part, 4):
        problem = _problem(seed)
        try:
            least, combinations = least_seconds(problem)
        except TooWideError:
            continue
        solved = solve_problem(problem, math.inf, math.inf)
        assert solved.status == "optimal", seed
        assert solved.seconds == pytest.approx(least, rel=1e-9), seed
        assert solved.bound_seconds == pytest.approx(least, rel=1e-6), seed
        most, cases = max(most, combinations), cases + 1
        if cases == CASES // 4:
            break
    assert most > 1e12
    assert seed < 5 * CASES // 4
