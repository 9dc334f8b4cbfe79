"""The data of a report: everything that its page draws of one or two plans, as plain JSON data.

plan ─► simulated step ─► lanes ─► timeline, memory, summary          times in seconds, sizes in bytes
     └► outline ─► placement graph      └► devices, traffic, what if
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cost_models.errors import UsageError
from partitioner.cost_graphs.plan import GraphPlan
from partitioner.pictures.cost_graph_data import cost_graph_data, graph_plan_differences
from partitioner.pictures.lanes import Lane, Lanes, critical_path, lanes_of, span_of
from partitioner.pictures.memory import memory_data
from partitioner.pictures.ops import op_graph_data
from partitioner.pictures.summary import summary_data
from partitioner.pictures.traffic import device_data, traffic_data
from partitioner.pictures.what_if import what_if_data
from partitioner.record.data import PlanData
from partitioner.record.modules import common_parent, shorten
from partitioner.record.rebuild import proved_programs, simulate_plan
from partitioner.report.diff import diff_plans
from partitioner.report.sharding import collective_name, devices_text, mesh_text
from runtime.collector import collector_paused
from runtime.simulate.simulation import Simulation

MOST_SPANS = 60_000
"""The most spans of a timeline: a page of more would be larger than 2 MB. Lanes beyond it are left out, and counted."""


@collector_paused()  # spans and messages are many small objects, none of them garbage
def report_data(
    plans: Sequence[PlanData | GraphPlan], files: Sequence[str] = (), measured: Simulation | None = None
) -> dict[str, Any]:
    """Return the data of a report of one or two plans. ``files``: their names; ``measured``: a step of the first.

    Raises UsageError for a plan of a model beside one of a cost graph.
    """
    names = [*files, *[""] * (len(plans) - len(files))]
    differences = _differences(*plans) if len(plans) == 2 else []
    drawn = [
        cost_graph_data(plan, name)
        if isinstance(plan, GraphPlan)
        else _plan_data(plan, name, measured if number == 0 else None)
        for number, (plan, name) in enumerate(zip(plans, names, strict=True))
    ]
    return {"plans": drawn, "differences": differences}


def _differences(first: PlanData | GraphPlan, second: PlanData | GraphPlan) -> list[str]:
    if isinstance(first, PlanData) and isinstance(second, PlanData):
        return diff_plans(first, second).splitlines()
    if isinstance(first, GraphPlan) and isinstance(second, GraphPlan):
        return graph_plan_differences(first, second)
    raise UsageError(
        "cannot draw these two plans side by side",
        ["one is the plan of a model, the other one of a cost graph"],
        ["make a report of each"],
    )


def _plan_data(plan: PlanData, file: str, measured: Simulation | None) -> dict[str, Any]:
    groups = proved_programs(plan)
    simulation = simulate_plan(plan, groups)
    lanes = lanes_of(simulation)
    return {
        "title": f"{plan.model.name} on {plan.cluster.name}",
        "file": file,
        "made_with": f"partitioner {plan.partitioner_version}",
        "summary": summary_data(plan, lanes),
        "stages": stage_data(plan),
        "graph": op_graph_data(plan),
        "devices": device_data(plan, simulation),
        "timeline": _timeline(plan, lanes, measured),
        "memory": memory_data(plan, simulation, lanes),
        "traffic": traffic_data(plan, simulation),
        "what_if": what_if_data(plan, groups),
    }


def stage_data(plan: PlanData) -> list[dict[str, Any]]:
    """Return the stages as the page lists them."""
    parent = common_parent([stage.modules for stage in plan.stages])
    return [
        {
            "name": f"stage {index}",
            "devices": devices_text(stage.devices),
            "ranks": list(stage.devices),
            "modules": shorten([name.removeprefix(parent) for name in stage.modules], 60),
            "mesh": None if stage.sharding is None else mesh_text(stage.sharding),
            "forward_seconds": stage.forward_seconds,
            "backward_seconds": stage.backward_seconds,
            "parameter_bytes": stage.parameter_bytes,
            "in_flight": stage.in_flight,
        }
        for index, stage in enumerate(plan.stages)
    ]


def _timeline(plan: PlanData, lanes: Lanes, measured: Simulation | None) -> dict[str, Any]:
    critical, waits = critical_path(lanes)
    shown = _shown(lanes)
    return {
        "step_seconds": lanes.step_seconds,
        "lanes": _lanes(lanes, shown),
        "hidden_lanes": len(lanes.lanes) - shown,
        "transfers": [
            [
                _moment(transfer.start_seconds),
                _moment(transfer.end_seconds),
                lanes.lane_of[transfer.message.source],
                lanes.lane_of[transfer.message.target],
                transfer.message.value,
                int(transfer.size_bytes),
                transfer.message.gradient,
                transfer.message.microbatch,
            ]
            for transfer in lanes.transfers[:MOST_SPANS]
            if max(lanes.lane_of[transfer.message.source], lanes.lane_of[transfer.message.target]) < shown
        ],
        "inside": [row for index in range(len(plan.stages)) for row in _inside(plan, index)],
        "critical": [[lane, index] for lane, index in critical if lane < shown],
        "waits": {f"{lane}:{index}": text for (lane, index), text in waits.items() if lane < shown},
        "measured": None if measured is None else {"lanes": _measured(plan, lanes, measured)},
    }


def _inside(plan: PlanData, index: int) -> list[dict[str, Any]]:
    """Sum up the collectives inside a stage's computes, per micro-batch: alike ones in one row, the longest first."""
    sharding = plan.stages[index].sharding
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for item in () if sharding is None else sharding.collectives:
        alike = {
            "stage": index,
            "kind": collective_name(item.kind),
            "axis": item.axis,
            "backward": item.backward,
            "size_bytes": item.size_bytes,
        }
        row = found.setdefault(tuple(alike.values()), {**alike, "count": 0, "seconds": 0.0})
        row["count"] += 1
        row["seconds"] += item.seconds
    return sorted(found.values(), key=lambda row: -row["seconds"])


def _shown(lanes: Lanes) -> int:
    """Count the lanes that fit."""
    spans = 0
    for number, lane in enumerate(lanes.lanes):
        spans += len(lane.spans)
        if spans > MOST_SPANS:
            return max(number, 1)
    return len(lanes.lanes)


def _lanes(lanes: Lanes, shown: int) -> list[dict[str, Any]]:
    return [
        {
            "label": lane.label,
            "ranks": list(lane.ranks),
            "stages": lane.stages,
            "spans": [
                [_moment(s.start_seconds), _moment(s.end_seconds), s.letter, s.stage, s.microbatch]
                for s in lane.spans
            ],
        }
        for lane in lanes.lanes[:shown]
    ]


def _measured(plan: PlanData, lanes: Lanes, measured: Simulation) -> list[dict[str, Any]]:
    """Return, for each lane, what its first rank was measured to do. Measured ranks play the used devices in order."""
    position = {device: rank for rank, device in enumerate(plan.used_devices)}
    own = [
        Lane(lane.ranks, tuple(map(span_of, measured.timeline[position[lane.ranks[0]]])))
        for lane in lanes.lanes
    ]
    return _lanes(Lanes(measured.step_seconds, tuple(own), ()), len(own))


def _moment(seconds: float) -> float:
    """Round to six digits: a picture shows no more."""
    return float(f"{seconds:.6g}")
