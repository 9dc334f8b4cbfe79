"""The plan of a cost graph as pictures: its nodes with their devices, what crosses between them, loads and memory.

Such a plan has no step that could be simulated: timeline, memory over time, traffic and what-if are left out. Costs are
in the unit of the file; bytes are known of PipeDream profiles alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import PurePath
from typing import Any

from cost_models.errors import PlanError
from cost_models.units import counted, percent
from partitioner.cost_graphs.outline import GraphOutline
from partitioner.cost_graphs.plan import ANEW, GraphPlan, size_text
from partitioner.pictures.drawing import Drawing
from partitioner.pictures.graph_drawing import graph_drawing
from partitioner.pictures.ops import AMOUNTS
from partitioner.pictures.summary import fact
from partitioner.pictures.tree import tree_node

MOST_RUNS = 40
"""The most boxes of devices; a placement that jumps to and fro more often is drawn without them."""
LAYOUT_WORDS = {
    "samples": "each device has a part of the samples",
    "features": "each device has a part of the features",
    "inputs": "each device has a part of the inputs",
}


def cost_graph_drawing(plan: GraphPlan, *, whole: bool = False) -> Drawing:
    """Draw the nodes of the graph in the colours of their devices. Raises PlanError for a plan without its graph."""
    if plan.outline is None:
        raise PlanError(
            f"cannot draw the graph {plan.graph.source} from this plan",
            ["it was made by an older version, and does not hold the graph"],
            [ANEW],
        )
    words = [(row["name"], row["devices"]) for row in _stages(plan)]
    return graph_drawing(_graph(plan, plan.outline), _title(plan), words, whole=whole)


def cost_graph_data(plan: GraphPlan, file: str = "") -> dict[str, Any]:
    """Return the data of the plan's report page, as ``report_data`` does of a model's plan."""
    return {
        "title": _title(plan),
        "file": file,
        "made_with": f"partitioner {plan.partitioner_version}",
        "summary": _summary(plan),
        "stages": _stages(plan),
        "graph": None if plan.outline is None else _graph(plan, plan.outline),
        **dict.fromkeys(("devices", "timeline", "memory", "traffic", "what_if")),
    }


def graph_plan_differences(first: GraphPlan, second: GraphPlan) -> list[str]:
    """Say what differs between two plans of cost graphs, line by line."""
    if first.graph.fingerprint != second.graph.fingerprint:
        return [f"the graph: {first.graph.source} and {second.graph.source} are not the same"]
    facts = [{fact["label"]: fact["value"] for fact in _facts(plan)} for plan in (first, second)]
    lines = [
        f"{label}: {value} -> {facts[1].get(label, 'not known')}"
        for label, value in facts[0].items()
        if facts[1].get(label) != value
    ]
    moved = sum(
        getattr(first, kind).get(node) != where
        for kind in ("placements", "layouts")
        for node, where in getattr(second, kind).items()
    )
    return lines + ([f"{counted(moved, 'node')} elsewhere"] if moved else [])


def _title(plan: GraphPlan) -> str:
    machine = plan.machine
    words = [counted(machine.accelerators, "accelerator")] if machine.accelerators else []
    words += [counted(machine.cpus, "CPU")] if machine.cpus else []
    # Every benchmark calls its file graph.txt or so: the folder says more.
    return f"{'/'.join(PurePath(plan.graph.source).parts[-2:])} on {' and '.join(words)}"


def _unit(plan: GraphPlan) -> str:
    return "cost" if plan.cost_unit.startswith("cost unit") else plan.cost_unit


def _cost(plan: GraphPlan, value: float) -> str:
    return f"{value:.4g} {_unit(plan)}"


def _devices(plan: GraphPlan) -> list[str]:
    """Return the devices that have nodes; of a plan by layouts, all of them as one."""
    if plan.layouts:
        return ["all devices"]
    used = set(plan.placements.values())
    return [device for device in plan.prediction.loads if device in used]


def _stages(plan: GraphPlan) -> list[dict[str, Any]]:
    p, counts = plan.prediction, Counter(plan.placements.values())
    found = []
    for name in _devices(plan):
        first = name if name in p.loads else next(iter(p.loads))
        kind = "CPU" if name.startswith("cpu") else "accelerator"
        found.append(
            {
                "name": name,
                "devices": counted(len(p.loads), "accelerator") if plan.layouts else kind,
                "ranks": [list(p.loads).index(first)],
                "modules": counted(counts[name] or plan.graph.nodes, "node"),
                **dict.fromkeys(
                    ("mesh", "forward_seconds", "backward_seconds", "parameter_bytes", "in_flight")
                ),
                "facts": [
                    ["load", _cost(plan, p.loads[first])],
                    ["of the largest", percent(p.loads[first] / p.max_load) if p.max_load else "0%"],
                    ["memory", size_text(plan, p.memory[first])],
                ],
            }
        )
    return found


def _summary(plan: GraphPlan) -> dict[str, Any]:
    c = plan.certificate
    return {
        "facts": list(_facts(plan)),
        "division": [],
        "fullest": None,
        "sentences": [
            {
                "title": "Why this plan",
                "text": [f"It is the best found for {plan.objective}, in {c.search_seconds:.1f} s."],
                "exactly": [f"Searched: {c.space}.", f"Method: {c.method} ({c.solver_status})."],
            },
            {"title": "How sure", "text": list(_sure(plan))},
        ],
        "alternatives": [],
        "step_seconds": None,
        "notes": list(plan.graph.notes),
    }


def _facts(plan: GraphPlan) -> Iterator[dict[str, str]]:
    p, machine = plan.prediction, plan.machine
    if plan.layouts:
        yield fact("per mini-batch", _cost(plan, p.max_load), "every device computes a part of every node")
    else:
        if p.makespan is not None:
            yield fact("one batch", _cost(plan, p.makespan), "from its first node to its last")
        yield fact("largest load", _cost(plan, p.max_load), "of the busiest device")
    yield fact("sending", _cost(plan, p.transfers), "of all loads together")
    kind = "feature-wise" if plan.layouts else "contiguous" if plan.contiguous else "free"
    yield fact("placement", kind, f"for {plan.objective}")
    yield fact(
        "devices", f"{len(_devices(plan))} of {len(p.loads)}" if plan.placements else f"{len(p.loads)}"
    )
    fullest = max(p.memory, key=lambda device: p.memory[device])
    limit = "no limit" if machine.memory_size is None else f"of {size_text(plan, machine.memory_size)}"
    yield fact("fullest device", size_text(plan, p.memory[fullest]), f"{fullest}, {limit}")
    yield fact("graph", counted(plan.graph.nodes, "node"), counted(plan.graph.edges, "edge"))


def _sure(plan: GraphPlan) -> Iterator[str]:
    c = plan.certificate
    reached = "this plan is at it" if c.gap == 0 else f"this plan is within {percent(c.gap)} of it"
    yield f"No such plan has a {c.objective} below {_cost(plan, c.bound_seconds)}; that is proved, and {reached}."
    yield f"All costs are those of {plan.graph.source}; nothing was simulated or measured."


def _graph(plan: GraphPlan, outline: GraphOutline) -> dict[str, Any]:
    """Return the nodes as ops on their devices, each value that another device needs as a bridge."""
    device = {name: number for number, name in enumerate(_devices(plan))}
    stage_of = [device[plan.placements[node]] if plan.placements else 0 for node in outline.ids]
    layouts = list(LAYOUT_WORDS)
    kinds: dict[tuple[str, float], int] = {}
    order = outline.in_order()
    number = {v: op for op, v in enumerate(order)}
    reads: list[list[int]] = [[] for _ in outline.ids]
    for source, target in outline.edge_pairs():
        reads[target].append(number[source])
    in_bytes = outline.bytes_per_cost is not None
    parameters = [v for v in order if outline.sizes[v] and in_bytes]
    position = {v: index for index, v in enumerate(parameters)}
    ops = [
        [
            outline.ids[v],
            kinds.setdefault((outline.names[v], outline.costs[v]), len(kinds)),
            stage_of[v],
            -1,
            list(dict.fromkeys(reads[v])),
            [position[v]] if v in position else [],
            layouts.index(plan.layouts[outline.ids[v]]) if plan.layouts else -1,
            -1,
        ]
        for v in order
    ]
    return {
        "cost_unit": _unit(plan),
        "kinds": [
            {"op": name, "target": "", "shape": "", "dtype": "", **dict.fromkeys(AMOUNTS, 0), "cost": cost}
            for name, cost in kinds
        ],
        "sources": [],
        "parameters": [
            {"name": outline.ids[v], "shape": "", "size_bytes": int(outline.sizes[v]), "layout": ""}
            for v in parameters
        ],
        "ops": ops,
        "layouts": list(LAYOUT_WORDS.values()),
        "tree": _tree([stage_of[v] for v in order], list(device)),
        "bridges": list(_bridges(plan, outline, stage_of, number)),
    }


def _tree(stages: list[int], devices: list[str]) -> dict[str, Any]:
    """Put neighbours on one device into a box of it, if that are a few boxes; else leave the graph flat."""
    runs = [list(run) for _, run in groupby(range(len(stages)), key=stages.__getitem__)]
    if not 1 < len(runs) <= MOST_RUNS:
        return tree_node("", "graph", [], list(range(len(stages))))
    children = [
        tree_node(f"{devices[stages[run[0]]]}, {number}", counted(len(run), "node"), [], run)
        for number, run in enumerate(runs)
        if len(run) > 1
    ]
    return tree_node("", "graph", children, [run[0] for run in runs if len(run) == 1])


def _bridges(
    plan: GraphPlan, outline: GraphOutline, stage_of: list[int], number: dict[int, int]
) -> Iterator[dict[str, Any]]:
    """Yield a bridge per node and other device that reads it, to the first reader there."""
    seen = set()
    rate, devices, unit = outline.bytes_per_cost, _devices(plan), _unit(plan)
    for source, target in outline.edge_pairs():
        if stage_of[source] == stage_of[target] or (source, stage_of[target]) in seen:
            continue
        seen.add((source, stage_of[target]))
        cost = outline.output_costs[source]
        yield {
            "from": number[source],
            "to": number[target],
            "kind": "send/recv",
            "size_bytes": 0 if rate is None else round(cost * rate),
            "gradient": False,
            "text": f"{devices[stage_of[source]]} sends {outline.ids[source]} to {devices[stage_of[target]]}",
            **({"cost": cost, "unit": unit} if rate is None else {}),
        }
