"""The search against every choice × cut × group × count of real layout problems, listed one by one.

Of each unit of a piece's problem a few options are left at random, so many that all combinations can be listed; what they
cost is added up by ``price``, not by elimination. Layouts at joints stay whole, and so does what bounds without solving.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import pytest

from cost_models.cluster import ClusterSpec
from cost_models.layout import Replicate
from passes.costs.costs import costs_of
from passes.graph.graph import OpGraph
from passes.lower.job import Job
from passes.search.feature.bound import bridges_used, price, wire_tables
from passes.search.feature.options import Options
from passes.search.feature.problem import FeatureProblem, build_problem
from passes.search.hybrid import bounds as bounds_module
from passes.search.hybrid.floors import MANY
from passes.search.hybrid.recipes import pieces as pieces_module
from passes.search.hybrid.recipes.composed import Composed
from passes.search.hybrid.recipes.eliminate import KEPT_KINDS
from passes.search.hybrid.search import GroupSearch
from passes.search.hybrid.survey import survey
from passes.trace.trace import trace
from tests.distributed.sharded_models import Gpt, gpt_batch
from tests.support.every_pipeline import EveryPipeline, Way, undominated
from tests.support.matrix import thinned
from tests.support.traced_models import loaded

MOST = 24
"""Combinations of options of each piece's units, beside those at its ends."""
SAMPLES = 4
POSSIBLE_SECONDS = 1e6
"""Less than a bridge that does not exist is charged: what is left at random may have no other."""


@cache
def graph(name: str) -> OpGraph:
    if name == "gpt":
        return trace(Gpt(tied=False, blocks=3), gpt_batch(SAMPLES))
    if name == "tied":
        return trace(Gpt(tied=True, blocks=2), gpt_batch(SAMPLES))
    return loaded(name)[1]


def machine(draw: random.Random, memory_bytes: int) -> ClusterSpec:
    """Two to four devices on one or two nodes."""
    counts = draw.choice([(2,), (1, 1), (4,), (2, 2), (1, 2), (3,)])
    nodes = [
        {
            "name": f"n{number}",
            "count": count,
            "device": {
                "name": f"d{number}",
                "kind": "cpu",
                "memory": max(memory_bytes, 1 << 20),
                "memory_bandwidth": "10GB/s",
                "flops": {"float32": 1e9 * draw.choice([1.0, 2.0])},
                "launch_overhead": "1us",
            },
            "links": {"default": {"bandwidth": 10.0 ** draw.uniform(7, 10), "latency": "1us"}},
        }
        for number, count in enumerate(counts)
    ]
    network = {"bandwidth": 10.0 ** draw.uniform(6, 9), "latency": "5us", "per": "device"}
    return ClusterSpec.from_dict({"name": "toys", "nodes": nodes, "network": network})


def whole_option(problem: FeatureProblem, unit: int) -> int:
    """Return the option of a unit that splits nothing, so that some choice is possible; the first if there is none."""
    detail = problem.units[unit].detail
    for at, index in enumerate(problem.units[unit].index.tolist()):
        if isinstance(detail, Options):
            placed = [(*(need.placement for need in c.inputs), *c.outputs) for c in detail.per_axis(index)]
        else:
            placed = [(c.stored, c.state) for c in detail[index]]
        if all(isinstance(p, Replicate) for each in placed for p in each):
            return at
    return 0


def thin(seed: int) -> Any:
    """Build problems of which a few options per unit are left, but for units at joints."""

    def built(space: Any, mesh: Any, microbatches: int, *further: Any, **more: Any) -> FeatureProblem:
        whole = build_problem(space, mesh, microbatches, *further, **more)
        if microbatches == MANY:
            return whole
        draw = random.Random(f"{seed} {mesh.shape} {space.graph.ops[0].name}")
        left = MOST
        masks = [np.ones(len(unit.seconds), dtype=bool) for unit in whole.units]
        for u in draw.sample(range(len(masks)), len(masks)):
            if space.units[u].kind in ("value", "leaving"):
                continue
            count = len(masks[u])
            kept = min(count, draw.randint(1, 3) if left >= 9 else 1, left)
            masks[u] = np.zeros(count, dtype=bool)
            masks[u][[whole_option(whole, u), *draw.sample(range(count), kept - 1)]] = True
            left //= kept
        return whole.keep(masks)

    return mock.patch.object(pieces_module, "build_problem", built)


class Listed(EveryPipeline):
    """Pipelines of all choices of all units."""

    def of_piece(self, table: Composed, piece: int, held: int) -> dict[tuple[object, object], list[Way]]:
        kind = self.search.pieces.kind[piece]
        key = id(table), kind, held
        if key not in self._pieces:
            found: dict[tuple[object, object], list[Way]] = {}
            for anew, recipes in enumerate(table.recipes):
                if anew and not self.search.pieces.blocks[piece]:
                    continue
                own = recipes[kind]
                ends = self.search.piece_search._ends(kind, own.problem)
                for options, way in every_choice(own.problem, again=bool(anew)):
                    at = [0 if unit is None else options[unit] for unit in ends]
                    found.setdefault((own.arriving[at[0]], own.leaving[at[1]]), []).append(way)
            self._pieces[key] = {layouts: undominated(ways, held) for layouts, ways in found.items()}
        return self._pieces[key]


def every_choice(problem: FeatureProblem, *, again: bool) -> Iterator[tuple[tuple[int, ...], Way]]:
    tables = wire_tables(problem)
    for options in itertools.product(*(range(len(unit.seconds)) for unit in problem.units)):
        state = sum(
            float(numbers.bytes[option])
            for unit, numbers, option in zip(problem.space.units, problem.units, options, strict=True)
            if unit.kind in KEPT_KINDS
        )
        whole = sum(float(n.bytes[option]) for n, option in zip(problem.units, options, strict=True))
        buffer = 0.0
        for wire, known in zip(problem.space.wires, tables, strict=True):
            used = bridges_used(problem, wire, known, options)
            whole += float(known.table.copies[used].sum())
            buffer = max(buffer, float(known.table.buffers[used].sum()))
        yield options, Way(price(problem, tables, options).seconds, state, whole - state, buffer, again)


def listed(model: str, seed: int, *, tight: bool) -> tuple[GroupSearch, Listed]:
    draw = random.Random(seed)
    own = graph(model)
    whole = 16 * sum(spec.elements for spec in own.parameters.values())
    cluster = machine(draw, int(whole * draw.uniform(0.4, 1.2)) if tight else 10**11)
    count, schedule = draw.choice(["auto", 1, 2]), draw.choice(["1f1b", "auto"])
    found = GroupSearch(own, costs_of(own, cluster), cluster, Job(SAMPLES), count, schedule)  # type: ignore[arg-type]
    return found, Listed(found)


CASES = [(model, seed) for seed in range(12) for model in ("gpt", "tied", "mixtral", "gpt2", "llama-8b")]


@pytest.mark.parametrize(("model", "seed"), thinned(CASES, [("gpt", 0), ("llama-8b", 2)]))
def test_the_optimum_is_that_of_every_choice_listed(model: str, seed: int) -> None:
    with thin(seed), mock.patch.object(bounds_module, "GAP", 1e-10):
        own, every = listed(model, seed, tight=False)
        surveyed = survey(own, math.inf)
        least = min(every.least(option) for option in own.options())
    assert surveyed.solved[0].pipeline.objective_seconds == pytest.approx(least, rel=1e-9)
    if least < POSSIBLE_SECONDS:
        assert least * (1 - 1e-6) <= surveyed.bound_seconds <= least * (1 + 1e-9)


@pytest.mark.parametrize(("model", "seed"), thinned(CASES, [("gpt2", 2)]))
def test_no_choice_that_fits_is_below_the_bound(model: str, seed: int) -> None:
    with thin(seed):
        own, every = listed(model, seed, tight=True)
        surveyed = survey(own, math.inf)
        least = min(every.least(option) for option in own.options())
    assert surveyed.bound_seconds <= least * (1 + 1e-9)
    if surveyed.solved and own.fits(surveyed.solved[0]):
        assert surveyed.solved[0].pipeline.objective_seconds >= least * (1 - 1e-9)
