"""The nearest plan that another tool can run: every way to divide the devices that it has words for, the fastest that fits.

pipeline × tensor × data = devices, ZeRO as the tool has it, sequence parallelism where it has that, 1F1B; no recomputation,
or where that does not fit, of all blocks. Micro-batches and borders are searched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace

from cost_models.cluster import ClusterSpec
from cost_models.errors import InfeasibleError, UsageError
from partitioner.api import plan_traced
from partitioner.formats.parallelism import Parallelism, Zero
from partitioner.formats.tool import Tool
from partitioner.plan import Plan
from partitioner.planning.options import PlanOptions
from passes.graph.graph import OpGraph
from passes.search.hybrid.fix import Fix

MODES = ("none", "full")
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
        with progress(f"trying {_fix(degrees, 'auto')}"):
            found = _fastest(graph, cluster, options, degrees)
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


def _fastest(graph: OpGraph, cluster: ClusterSpec, options: PlanOptions, degrees: Parallelism) -> Plan | None:
    for mode in MODES:
        given = {n: v for n, v in vars(_fix(degrees, mode)).items() if v is not None}
        schedule = degrees.schedule if degrees.pipeline > 1 else "auto"
        try:
            return plan_traced(
                graph, cluster, replace(options, strategy="hybrid", fix=given, schedule=schedule), None
            )
        except InfeasibleError:
            continue
        except UsageError:  # the batch or the model cannot be divided so
            return None
    return None


def _fix(degrees: Parallelism, mode: str) -> Fix:
    fixed = replace(degrees, recompute=mode).fix()  # type: ignore[arg-type]
    return replace(fixed, microbatch=None, recompute=None if mode == "auto" else fixed.recompute)


def _seconds(plan: Plan) -> float:
    return plan.prediction.step_seconds


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
