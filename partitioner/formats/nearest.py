"""The nearest plan that another tool can run: every way to divide the devices that it has words for, the fastest that fits.

pipeline × tensor × data = devices, ZeRO as the tool has it, sequence parallelism where it has that, 1F1B; no recomputation,
or where that does not fit, of all blocks. Micro-batches and borders are searched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import replace

from cost_models.cluster import ClusterSpec
from cost_models.errors import InfeasibleError, UsageError
from partitioner.formats.parallelism import Parallelism, Zero
from partitioner.formats.planned import planned
from partitioner.formats.tool import Tool
from partitioner.plan import Plan
from partitioner.planning.options import PlanOptions
from passes.graph.graph import OpGraph
from passes.search.hybrid.fix import Fix
from passes.search.words import RecomputeMode

MODES: tuple[RecomputeMode, ...] = ("none", "full")
"""Recomputation, the faster first: what every tool has words for."""


def nearest_plan(
    tool: Tool,
    graph: OpGraph,
    cluster: ClusterSpec,
    options: PlanOptions,
    progress: Callable[[str], AbstractContextManager[None]],
) -> Plan:
    """Return the fastest plan that the tool can run. Raises UsageError where there is none."""
    best: Plan | None = None
    for degrees in degrees_of(tool, cluster):
        fix = replace(degrees.fix(), microbatch=None, recompute=None)
        with progress(f"trying {fix}"):
            found = _fastest(graph, cluster, options, degrees, fix)
        if found is not None and (best is None or _seconds(found) < _seconds(best)):
            best = found
    if best is None:
        raise UsageError(
            f"{tool.title} cannot run this model on {cluster.name}",
            ["none of the ways to divide the devices that it has words for fits"],
        )
    return best


def degrees_of(tool: Tool, cluster: ClusterSpec) -> Iterator[Parallelism]:
    """Yield the ways to divide the devices that the tool can run: with ZeRO-3, and with the most that it has below."""
    world, inside = cluster.world_size, max(map(len, cluster.ranks_per_node))
    for pipeline in _divisors(world):
        for tensor in _divisors(world // pipeline):
            if tensor > inside:
                continue
            data = world // pipeline // tensor
            levels: tuple[tuple[Zero, ...], ...] = ((3,), (1, 0)) if data > 1 else ((0,),)
            for zeros in levels:
                every = [
                    Parallelism(pipeline=pipeline, tensor=tensor, sequence=sequence, data=data, zero=zero)
                    for sequence in ((True, False) if tensor > 1 else (False,))
                    for zero in zeros
                ]
                yield from [degrees for degrees in every if not list(tool.refuses(degrees))][:1]


def _fastest(
    graph: OpGraph, cluster: ClusterSpec, options: PlanOptions, degrees: Parallelism, fix: Fix
) -> Plan | None:
    for mode in MODES:
        # The next mode where it does not fit; none where the batch or the model cannot be divided so.
        with suppress(InfeasibleError, UsageError):
            return planned(graph, cluster, options, degrees, replace(fix, recompute=mode))
    return None


def _seconds(plan: Plan) -> float:
    return plan.prediction.step_seconds


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
