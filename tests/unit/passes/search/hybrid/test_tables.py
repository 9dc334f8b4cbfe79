"""Lower tables are below upper ones on every model, kind of group and room, and no plan simulates below its bound."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from benchmarks.feature_matrix import MODELS
from cost_models.cluster import ClusterSpec
from passes.compile import compile_graph
from passes.lower.job import Job
from passes.search.hybrid.recipes.composed import Composed, composed
from passes.search.hybrid.recipes.joints import Pieces, pieces_of
from passes.search.hybrid.recipes.pieces import GroupKind, PieceSearch
from passes.search.hybrid.recipes.ranges import HELD, STATE
from passes.search.hybrid.request import HybridRequest
from tests.support.matrix import thinned
from tests.support.traced_models import loaded

GROUPS = [(1, 1), (2, 1), (1, 2), (4, 1), (1, 4), (2, 2)]
"""(replicas, devices that share ops)."""
CASES = [(model, group) for model in MODELS for group in GROUPS]
SHOWN = [("unet", (2, 2)), ("mixtral", (4, 1))]
SAMPLES, COUNT = 16, 4


@cache
def pieces(model: str) -> Pieces:
    return pieces_of(loaded(model)[1])


def table(model: str, group: tuple[int, int]) -> Composed:
    replicas, tensor = group
    search = PieceSearch(pieces(model), ClusterSpec.parse("dgx-h100:1"), frozenset())
    kind = GroupKind(tuple(range(replicas * tensor)), replicas, tensor)
    return composed(search, kind, Job(SAMPLES), COUNT, (1, 2, 4, 8), 1e-3)


@pytest.mark.parametrize(("model", "group"), thinned(CASES, SHOWN))
def test_no_lower_table_is_above_an_upper_one(model: str, group: tuple[int, int]) -> None:
    own = table(model, group)
    layouts = [(recipes.arriving, recipes.leaving) for recipes in own.recipes[0]]
    assert all([(r.arriving, r.leaving) for r in each] == layouts for each in own.recipes)
    kept = own.ranges[0].amounts[:, int(own.number[0, len(own.pieces)]), 0]
    fits = 0
    for held in (1, 3, 4, 8):
        whole = float(kept[STATE] + held * kept[HELD])
        for room in (0.05 * whole, 0.2 * whole, 0.5 * whole, 0.8 * whole, whole, 2 * whole):
            for recompute in ("auto", "none", "full"):
                fast = own.mixes(COUNT, held, recompute).fastest(room).seconds
                fits += int(np.isfinite(fast).sum())
                for longest in (None, len(own.pieces)):
                    least = own.priced(COUNT, held, room, recompute, longest)
                    assert (least.max(axis=-1).min(axis=1) <= fast * (1 + 1e-9)).all()
    assert fits


@pytest.mark.parametrize(
    ("model", "machine"),
    thinned([(model, name) for model in MODELS for name in ("dgx-h100:1", "local:2")], [("gpt2", "local:2")]),
)
def test_no_plan_simulates_below_the_bound(model: str, machine: str) -> None:
    found = compile_graph(loaded(model)[1], ClusterSpec.parse(machine), HybridRequest(Job(SAMPLES)))
    outcome = found.outcome
    bound = outcome.certificate.simulated_lower_bound_seconds
    assert 0 < bound <= outcome.best.step_seconds * (1 + 1e-9)
    for other in outcome.runner_ups:
        assert other.step_seconds >= bound * (1 - 1e-9)
