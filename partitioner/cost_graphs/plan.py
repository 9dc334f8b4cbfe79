"""The plan of a cost graph that is no traced model: which node goes where, what that costs, how sure that is.

Data only, as :class:`partitioner.plan.Plan`: JSON, safe to load from anyone. It holds no programs: there is nothing to run.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection
from typing import ClassVar, Literal, get_args

from pydantic import Field, model_validator

from cost_models.errors import UsageError
from cost_models.shown import printable
from cost_models.units import counted, format_bytes, percent
from partitioner.cost_graphs.outline import GraphOutline, outline_contradictions, outline_of
from partitioner.cost_graphs.read import GraphFormat, ReadGraph
from partitioner.record.file import (
    Amount,
    CertificateField,
    Natural,
    PlanFile,
    Record,
    package_version,
    read_text,
)
from partitioner.record.modules import shorten
from partitioner.report.text import columns, labelled
from passes.search.cost_graph.contiguous import place_contiguous
from passes.search.cost_graph.graph import evaluate, named
from passes.search.cost_graph.latency import place_for_latency
from passes.search.cost_graph.layouts import SplitBy
from passes.search.cost_graph.result import PlacementResult
from passes.search.cost_graph.throughput import place_for_throughput

Objective = Literal["throughput", "latency"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
GraphStrategy = Literal["free", "feature"]
ANEW = "make the plan anew with `partitioner plan --graph FILE --strategy free -o plan.json`"
MAX_ROWS = 24


class GraphInfo(Record):
    """The graph that the plan is for. ``fingerprint`` covers nodes, costs and edges."""

    source: str
    format: GraphFormat
    fingerprint: str
    nodes: Natural
    edges: Natural
    notes: tuple[str, ...] = ()


class MachineInfo(Record):
    """The machine that the graph was placed on."""

    accelerators: Natural
    cpus: Natural
    memory_size: Amount | None = Field(description="of each accelerator; null: no limit")


class GraphPrediction(Record):
    """The costs of the placement, in ``cost_unit``; loads and memory by device."""

    max_load: Amount = Field(description="of the busiest device: the objective of throughput")
    makespan: Amount | None = Field(
        description="of one batch: the objective of latency; null if not asked for"
    )
    loads: dict[str, Amount]
    memory: dict[str, Amount]
    transfers: Amount = Field(description="part of all loads that is sending and receiving")


class GraphPlan(PlanFile):
    """A placement of a cost graph; of a profile by strategy ``feature``, the layout of every node on all devices."""

    _called: ClassVar[str] = "plan of a graph"
    _anew: ClassVar[str] = ANEW
    schema_version: Literal[1] = 1
    kind: Literal["graph"] = "graph"
    partitioner_version: str
    graph: GraphInfo
    machine: MachineInfo
    strategy: GraphStrategy = "free"
    contiguous: bool = Field(description="whether the quotient of the forward graph had to be acyclic")
    objective: Objective
    cost_unit: str
    placements: dict[str, str] = Field(
        description="device of every node: acc0 … or cpu0 …; empty for strategy feature: all are on every device"
    )
    layouts: dict[str, SplitBy] = Field(
        default={}, description="strategy feature: how every node is spread over all devices"
    )
    prediction: GraphPrediction
    certificate: CertificateField = Field(description="seconds are in cost_unit, but for search_seconds")
    outline: GraphOutline | None = Field(
        default=None, description="the graph itself, for pictures; null: made before plans had it"
    )

    @model_validator(mode="after")
    def _consistent(self) -> GraphPlan:
        devices = set(self.prediction.loads)
        lost = [
            f"placements.{node}: there is no device {d}"
            for node, d in self.placements.items()
            if d not in devices
        ]
        free = self.strategy == "free"
        for what, held, there in (("placements", self.placements, free), ("layouts", self.layouts, not free)):
            expected = self.graph.nodes if there else 0
            if len(held) != expected:
                of_nodes = f", the graph has {expected}" if there else f", strategy {self.strategy} has none"
                lost.append(f"{what}: {len(held)} nodes{of_nodes}")
        if self.outline is not None:
            lost += outline_contradictions(self.outline, [*self.placements, *self.layouts])
        if lost:
            raise ValueError("\n".join(lost[:20]))
        return self

    def __str__(self) -> str:
        return _render(self)


def check_options(
    contiguous: bool, objective: str, time_limit_seconds: float, strategy: str = "free"
) -> None:
    """Refuse unknown words, numbers that mean nothing and combinations that no search is for, all at once."""
    problems = []
    if strategy == "feature" and contiguous:
        problems.append("by strategy feature every node is on all devices: contiguous means nothing there")
    if strategy == "feature" and objective == "latency":
        problems.append("strategy feature is searched for throughput, one mini-batch per device and step")
    if objective not in OBJECTIVES:
        problems.append(f"objective {objective!r} is not one of: {', '.join(OBJECTIVES)}")
    if objective == "latency" and contiguous:
        problems.append("contiguous placements are searched for throughput; latency has no contiguous search")
    if not 0 < time_limit_seconds < math.inf:
        problems.append(f"the time limit is {time_limit_seconds!r}, expected more than 0 seconds")
    if problems:
        raise UsageError("cannot plan the graph with these options", problems)


def plan_graph(
    read: ReadGraph,
    *,
    contiguous: bool = False,
    objective: str = "throughput",
    time_limit_seconds: float = 60.0,
) -> GraphPlan:
    """Place a cost graph and write down what was found."""
    check_options(contiguous, objective, time_limit_seconds)
    graph = read.graph
    found: PlacementResult
    if objective == "latency":
        found = place_for_latency(graph, time_limit_seconds)
    elif contiguous:
        found = place_contiguous(graph, time_limit_seconds)
    else:
        found = place_for_throughput(graph, time_limit_seconds)
    return _record(read, found, contiguous, "latency" if objective == "latency" else "throughput")


def graph_info(read: ReadGraph, *notes: str) -> GraphInfo:
    """Describe the graph that a plan is for, with ``notes`` beside its own."""
    graph = read.graph
    return GraphInfo(
        source=read.source,
        format=read.format,
        fingerprint=graph.fingerprint,
        nodes=len(graph.nodes),
        edges=len(graph.edges),
        notes=(*graph.notes, *notes),
    )


def _record(read: ReadGraph, found: PlacementResult, contiguous: bool, objective: Objective) -> GraphPlan:
    graph, machine = read.graph, read.graph.machine
    costs = evaluate(graph, found.placement)
    devices = machine.devices
    return GraphPlan(
        partitioner_version=package_version(),
        graph=graph_info(read),
        machine=MachineInfo(
            accelerators=machine.accelerators,
            cpus=machine.cpus,
            memory_size=machine.memory_size if math.isfinite(machine.memory_size) else None,
        ),
        contiguous=contiguous,
        objective=objective,
        cost_unit=graph.unit,
        placements=dict(named(graph, found.placement)),
        prediction=GraphPrediction(
            max_load=costs.max_load,
            makespan=found.value if objective == "latency" else None,
            loads=dict(zip(devices, costs.loads, strict=True)),
            memory=dict(zip(devices, costs.memory, strict=True)),
            transfers=costs.transfers,
        ),
        certificate=found.certificate,
        outline=outline_of(graph, found.placement, bytes_per_cost(read)),
    )


def bytes_per_cost(read: ReadGraph) -> float | None:
    """Return the bytes that are sent at an output cost of 1; None where the file has costs alone."""
    return None if read.profile is None else read.bytes_per_second / 1e3  # a profile's costs are milliseconds


def _render(plan: GraphPlan) -> str:
    p, c, m, by_layout = plan.prediction, plan.certificate, plan.machine, plan.strategy == "feature"
    memory = (
        "no memory limit" if m.memory_size is None else f"{size_text(plan, m.memory_size)} of memory each"
    )
    counts = f"{counted(m.accelerators, 'accelerator')} ({memory}), {counted(m.cpus, 'CPU')}"
    unit = "" if plan.cost_unit.startswith("cost unit") else f" {plan.cost_unit}"
    lines = [
        labelled("graph", f"{plan.graph.source}: {plan.graph.nodes:,} nodes, {plan.graph.edges:,} edges"),
        labelled("machine", counts),
        labelled(
            "plan",
            f"feature-wise, for throughput: {p.max_load:g}{unit} per mini-batch, "
            f"{m.accelerators * p.max_load:g}{unit} per step of {counted(m.accelerators, 'mini-batch')}"
            if by_layout
            else f"{'contiguous' if plan.contiguous else 'free'} placement, for {plan.objective}: "
            + (f"makespan {p.makespan:g}{unit}, " if p.makespan is not None else "")
            + f"largest load {p.max_load:g}{unit}",
        ),
        "",
        _layout_lines(plan) if by_layout else _table(plan),
        "",
        labelled("search", f"{c.solver_status}, in {c.search_seconds:.1f} s, over {c.space}; {c.method}"),
        labelled(
            "bound",
            f"no such {'choice' if by_layout else 'placement'} has a {c.objective} below "
            f"{c.bound_seconds:g}{unit}; this one is "
            + ("at it" if c.gap == 0 else f"within {percent(c.gap)} of it"),
        ),
    ]
    lines += [labelled("note", note) for note in plan.graph.notes]
    return printable("\n".join(lines))


def _table(plan: GraphPlan) -> str:
    p = plan.prediction
    held: dict[str, list[str]] = {device: [] for device in p.loads}
    for node, device in plan.placements.items():
        held[device].append(node)
    used = [device for device in p.loads if held[device]]
    rows = []
    for device in used[:MAX_ROWS]:
        shown = shorten(_in_order(plan, held[device]), 60)
        share = percent(p.loads[device] / p.max_load) if p.max_load else "0%"
        rows.append(
            [
                device,
                f"{len(held[device]):,}",
                f"{p.loads[device]:g}",
                share,
                size_text(plan, p.memory[device]),
                shown,
            ]
        )
    text = columns(
        ("device", "nodes", "load", "of largest", "memory", "which"), rows, left=("device", "which")
    )
    idle = len(p.loads) - len(used)
    more = [f"{len(used) - MAX_ROWS} more devices"] if len(used) > MAX_ROWS else []
    more += [f"{counted(idle, 'device')} idle"] if idle else []
    return "\n".join([text, *more])


def _layout_lines(plan: GraphPlan) -> str:
    held: dict[str, list[str]] = {"samples": [], "features": [], "inputs": []}
    for node in _in_order(plan, plan.layouts):
        held[plan.layouts[node]].append(node)
    return "\n".join(
        labelled(f"by {layout}", f"{counted(len(nodes), 'node')}: {_first(nodes)}" if nodes else "no nodes")
        for layout, nodes in held.items()
    )


def _in_order(plan: GraphPlan, nodes: Collection[str]) -> list[str]:
    """Return nodes with producers before consumers, where the plan remembers its graph."""
    if plan.outline is None:
        return list(nodes)
    place = {plan.outline.ids[v]: number for number, v in enumerate(plan.outline.in_order())}
    return sorted(nodes, key=place.__getitem__)


def size_text(plan: GraphPlan, size: float) -> str:
    """Write a size of memory: in bytes where they are that, else as a number alone."""
    in_bytes = plan.outline is not None and plan.outline.bytes_per_cost is not None
    return format_bytes(size) if in_bytes else f"{size:,.0f}" if 1e4 <= size < 1e15 else f"{size:.4g}"


def _first(nodes: list[str]) -> str:
    more = f" and {len(nodes) - MAX_ROWS} more" if len(nodes) > MAX_ROWS else ""
    return ", ".join(nodes[:MAX_ROWS]) + more


def is_graph_plan(path: str | os.PathLike[str]) -> bool:
    """Tell whether a file says that it is a plan of a cost graph; that it is a valid one is not checked."""
    try:
        data = json.loads(read_text(path))
    except (ValueError, RecursionError):
        return False
    return isinstance(data, dict) and data.get("kind") == "graph"
