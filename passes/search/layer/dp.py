"""Exact minimum of the layer-wise surrogate: bottlenecks bisected (``passes.search.bisect``) over ``CutProgram``."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from passes.search.bisect import Bisected, Bisection
from passes.search.layer.cuts import CutProgram
from passes.search.layer.problem import LayerProblem, StageSplit
from passes.search.layer.table import Geometry, StageTable


@dataclass(frozen=True)
class DpResult:
    """``splits``: distinct, best first; empty if nothing fits. No split of the space is below
    ``bound_seconds``."""

    splits: tuple[StageSplit, ...]
    bound_seconds: float
    optimal: bool
    thresholds: int
    """Dynamic programs solved."""


def solve_dp(
    problem: LayerProblem,
    *,
    geometry: Geometry | None = None,
    keep: int = 8,
    relative_gap: float = 1e-10,
    deadline: float = math.inf,
    cutoff_seconds: float = math.inf,
) -> DpResult:
    """The best split by the surrogate, and up to ``keep`` good ones of other bottlenecks and stage counts.

    The other arguments are those of ``Bisection``.
    """
    table = StageTable(problem, geometry or Geometry(problem.structure))
    problems = [problem]
    if problem.pins:
        # a pin counts stages from the front, the program counts from the end: one search per number of stages
        first = max(problem.stage_counts[0], max(problem.pins.values()) + 1)
        problems = [replace(problem, stage_counts=(p, p)) for p in range(first, problem.max_stages + 1)]
    results: list[Bisected[StageSplit]] = []
    for each in problems:
        if each.max_stages < each.stage_counts[0]:
            results.append(Bisected((), math.inf, True, 0))
            continue
        bisection = Bisection(
            CutProgram(each, table),
            keep=keep,
            relative_gap=relative_gap,
            deadline=deadline,
            cutoff_seconds=cutoff_seconds,
        )
        results.append(bisection.run())
        best = min((r.found[0].objective_seconds for r in results if r.found), default=math.inf)
        cutoff_seconds = min(cutoff_seconds, best * (1 + 1e-9)) if keep == 1 else cutoff_seconds
    splits = sorted((s for r in results for s in r.found), key=lambda s: s.objective_seconds)
    bound = min((r.bound_seconds for r in results), default=math.inf)
    return DpResult(
        tuple(splits[:keep]), bound, all(r.optimal for r in results), sum(r.thresholds for r in results)
    )
