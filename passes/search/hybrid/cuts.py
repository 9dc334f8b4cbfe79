"""Stage borders: at the modules that the user names, or where the layer-wise program balances the groups.

A group of n devices is to that program one device with n times the speed and the memory: sharding is taken for free, so
that cuts follow the work. The simulation of the sharded stages has the last word.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from cost_models.cluster import ClusterSpec
from cost_models.devices import Device, Rates
from cost_models.errors import UsageError
from cost_models.units import counted
from passes.costs.costs import GraphCosts
from passes.graph.graph import OpGraph
from passes.graph.recomputed import recomputed_ops
from passes.graph.state import colocated
from passes.lower.job import Job
from passes.search.hybrid.degrees import Degrees
from passes.search.layer.dp import solve_dp
from passes.search.layer.options import DevicePlan, DeviceTable, ScheduleOption
from passes.search.layer.problem import DevicePool
from passes.search.layer.request import LayerRequest, prepare
from passes.search.layer.search import LayerSearch
from passes.search.layer.spaces import Space, make_space
from passes.search.layer.tuning import TUNING
from passes.search.pins import matches
from passes.search.words import RecomputeMode
from runtime.schedules import SCHEDULES


def stages_at_borders(graph: OpGraph, borders: Sequence[str], stages: int) -> dict[str, int]:
    """Op -> stage: a new one begins with the first op of each of ``borders``. Raises UsageError where that cannot be."""
    if len(borders) != stages - 1:
        raise UsageError(
            f"cannot cut {graph.model_name} into {counted(stages, 'stage')} at {counted(len(borders), 'border')}",
            [f"{counted(stages, 'stage')} have {stages - 1} borders between them"],
        )
    copied = recomputed_ops(graph)
    stage, stage_of = 0, {}
    for node in graph.ops:
        path = str(node.meta.get("module_path", ""))
        if stage < len(borders) and matches(borders[stage], node.name, path):
            stage += 1
        if node.name not in copied:
            stage_of[node.name] = stage
    problems = [f"no op of {name!r} comes after those of the border before it" for name in borders[stage:]]
    for together in colocated(graph):
        if len({stage_of[op] for op in together if op in stage_of}) > 1:
            problems.append(f"a border parts {', '.join(sorted(together)[:3])}, which must share a stage")
    if problems:
        raise UsageError(f"cannot cut {graph.model_name} at these borders", problems[:8])
    return stage_of


def balanced_stages(
    graph: OpGraph,
    costs: GraphCosts,
    cluster: ClusterSpec,
    job: Job,
    degrees: Degrees,
    schedule: str,
    microbatches: int,
    recompute: RecomputeMode,
    *,
    limited: bool,
) -> dict[str, int]:
    """Op -> stage, by the layer-wise program over groups.

    ``limited``: as the program counts memory, where it finds any cuts that fit; else only seconds count.
    """
    request = LayerRequest(job, microbatches=microbatches, recompute=recompute)
    prepared = prepare(graph, costs, cluster, request)
    if degrees.stages == 1:
        return dict.fromkeys(prepared.model.names, 0)
    representatives = tuple(_joined([cluster.devices[rank] for rank in group]) for group in degrees.groups)
    option = ScheduleOption(microbatches, schedule, degrees.chunks)
    search = replace(
        prepared,
        spaces=_spaces(prepared),
        table=DeviceTable(representatives, tuple(range(len(representatives)))),
        options=(option,),
        min_stages=len(degrees.groups),
        max_stages=degrees.stages,
        _numbers={},
    )
    plan = _groups_as_devices(cluster, degrees, schedule, representatives)
    for number, space in enumerate(search.spaces):
        for scale in (1.0, math.inf) if limited else (math.inf,):
            problem = search.problem(number, option, scale, plan)
            if problem is None:
                break
            found = solve_dp(problem, geometry=space.geometry, keep=1, relative_gap=TUNING.gap)
            if found.splits:
                stages = np.array(found.splits[0].stage_of)[space.unit_of].tolist()
                return dict(zip(prepared.model.names, stages, strict=True))
    why = SCHEDULES[schedule].check(degrees.stages, len(degrees.groups), microbatches)
    raise UsageError(
        f"cannot cut {graph.model_name} into {counted(degrees.stages, 'stage')}",
        [why or "it has fewer ops that may be parted"],
        ["fewer groups, less interleaving, or borders= of your own"],
    )


def _spaces(search: LayerSearch) -> list[Space]:
    """Cuts between blocks first, where one residual stream crosses; cuts anywhere, for models without enough blocks."""
    anywhere, model = search.spaces[0], search.model
    last = np.append(anywhere.unit_of[1:] != anywhere.unit_of[:-1], False)
    inside = np.append((model.blocks.of[1:] == model.blocks.of[:-1]) & (model.blocks.of[1:] >= 0), False)
    between = np.cumsum(np.append(0, (last & ~inside)[:-1]))
    return [make_space(model, "cuts between blocks", between.tolist(), None), anywhere]


def _joined(devices: Sequence[Device]) -> Device:
    """Return a device as fast as all of ``devices`` together, each at the pace of the slowest."""
    slowest = min(devices, key=lambda d: max(d.flops_per_second.values()))
    count = len(devices)
    return replace(
        slowest,
        memory_bytes=count * min(d.memory_bytes for d in devices),
        memory_bandwidth_bytes_per_second=count * slowest.memory_bandwidth_bytes_per_second,
        flops_per_second=Rates({name: count * rate for name, rate in slowest.flops_per_second.items()}),
        op_times=None if slowest.op_times is None else slowest.op_times.slower(1 / count),
    )


def _groups_as_devices(
    cluster: ClusterSpec, degrees: Degrees, schedule: str, devices: Sequence[Device]
) -> DevicePlan:
    count = len(degrees.groups)
    latency, per_byte = np.zeros((count, count)), np.zeros((count, count))
    for a, first in enumerate(degrees.groups):
        for b, second in enumerate(degrees.groups):
            if a != b:
                path, lanes = cluster.path(first[0], second[0]), min(len(first), len(second))
                latency[a, b] = 2 * path.latency_seconds
                per_byte[a, b] = 1.0 / (path.bandwidth_bytes_per_second * lanes)
    sequence = SCHEDULES[schedule].positions(degrees.stages, count)
    kinds = tuple(DevicePool(f"group {i}", i, float(d.memory_bytes)) for i, d in enumerate(devices))
    text = f"{counted(count, 'group')} in the cluster's order"
    return DevicePlan(kinds, latency, per_byte, "sequence", sequence, degrees.groups, text)
