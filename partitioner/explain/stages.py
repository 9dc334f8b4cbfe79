"""Explanations of plans of several stages, and of one stage on one device.

Layer-wise and hybrid: where it runs, what that stage takes beside the slowest, and what is sent for it; what other stages
would cost takes a search, with a pin. Free: the same, and the step with it on each other device, simulated, everything
else as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING

import numpy as np

from cost_models.errors import UsageError
from cost_models.units import counted, format_seconds, percent
from partitioner.explain import known
from partitioner.explain.explanation import Explanation
from partitioner.record.modules import shorten
from partitioner.record.rebuild import simulate_plan, split_graph
from passes.costs.costs import costs_of
from passes.graph.state import owning_units
from passes.lower.candidate import anywhere
from passes.search.free.judge import ListJudge
from passes.search.outcome import PlacedWay
from runtime.simulate.simulation import Simulation

if TYPE_CHECKING:
    from partitioner.record.data import PlanData
    from passes.graph.graph import OpGraph

MOST_DEVICES = 32
"""Devices of a cluster that are tried: each is a simulation or two. By hand: a table of more is not read."""


def of_layers(plan: PlanData, name: str, graph: OpGraph | None) -> Explanation:
    """Explain an op, parameter or module of a layer-wise plan."""
    ops = _ops_named(plan, name, graph)
    facts, where = _place(plan, name, ops)
    if not where:
        return Explanation(name, facts, ())
    facts["why"] = known.why(plan)
    attempt = known.other_stage(plan, None if _is_parameter(plan, name, graph) else name, where[0])
    if attempt is not None:
        facts["try"] = attempt
    return Explanation(name, facts, ())


def of_free(plan: PlanData, name: str, graph: OpGraph | None) -> Explanation:
    """Explain an op, block, parameter or module of a free plan."""
    split = None if graph is None else split_graph(plan, graph)
    ops = _ops_named(plan, name, split)
    facts, where = _place(plan, name, ops)
    if not where or split is None:
        if where:
            facts["why"] = known.why(plan)
        return Explanation(name, facts, ())
    judge = ListJudge(split, costs_of(split, plan.cluster), plan.cluster, plan.job)
    moved = _moved_together(judge, ops)
    if moved != ops & set(plan.placements):
        facts["together"] = f"with {counted(len(moved - ops), 'op')} that must share a device with it"
    rank_of = {op: ranks[0] for op, ranks in plan.placements.items()}
    ways = _ways_elsewhere(judge, rank_of, plan.microbatches, moved, simulate_plan(plan))
    facts["why"] = _why_there(ways, plan)
    return Explanation(name, facts, ways)


def _moved_together(judge: ListJudge, ops: Collection[str]) -> set[str]:
    """Return the placed ones of ``ops``, with all ops that share their device in every placement."""
    unit_of = owning_units(judge.graph, judge.recomputed)
    units = {unit_of[op] for op in ops if op in unit_of}
    return {op for op, unit in unit_of.items() if unit in units}


def _ways_elsewhere(
    judge: ListJudge,
    rank_of: Mapping[str, int],
    microbatches: int,
    moved: Collection[str],
    planned: Simulation,
) -> tuple[PlacedWay, ...]:
    """Simulate the step with ``moved`` on each device, fastest first. ``planned``: the step as it is."""
    devices = judge.cluster.devices
    here = sorted({rank_of[op] for op in moved})
    ways = []
    for rank, device in enumerate(devices[:MOST_DEVICES]):
        chosen = here == [rank]
        elsewhere = anywhere({**rank_of, **dict.fromkeys(moved, rank)}, len(devices), microbatches)
        simulation = planned if chosen else judge.finished(elsewhere).realized.simulation
        ways.append(
            PlacedWay(
                layout=f"rank {rank} ({device.model})",
                step_seconds=simulation.step_seconds,
                computes_seconds=_computes_seconds(judge, moved, rank, microbatches),
                sends_seconds=_sends_seconds(simulation),
                memory_bytes=simulation.peak_bytes[rank],
                chosen=chosen,
            )
        )
    if len(here) > 1:  # a module's ops, or a parameter's readers, on several devices
        seconds = sum(
            _computes_seconds(judge, [op for op in moved if rank_of[op] == rank], rank, microbatches)
            for rank in here
        )
        spread = f"ranks {', '.join(map(str, here))}, as planned"
        peak = max(planned.peak_bytes)
        ways.append(PlacedWay(spread, planned.step_seconds, seconds, _sends_seconds(planned), peak, True))
    return tuple(sorted(ways, key=lambda way: way.step_seconds))


def _sends_seconds(simulation: Simulation) -> float:
    return sum(transfer.end_seconds - transfer.start_seconds for transfer in simulation.transfers)


def _computes_seconds(judge: ListJudge, ops: Collection[str], rank: int, microbatches: int) -> float:
    """Sum the seconds of ``ops`` on a device in a step."""
    size = judge.job.sizes(microbatches)[0]
    indices = np.array([i for i, name in enumerate(judge.costs.ops) if name in ops], dtype=np.int64)
    seconds = judge.costs.segment_seconds(indices, size, judge.cluster.devices[rank])
    return microbatches * (seconds.forward + seconds.backward_input + seconds.backward_weight)


def _why_there(ways: tuple[PlacedWay, ...], plan: PlanData) -> str:
    """Compare the device with the others."""
    chosen = next(way for way in ways if way.chosen)
    others = [way for way in ways if not way.chosen]
    if not others:
        return "there is no other device"
    best = others[0]
    difference = best.step_seconds - chosen.step_seconds
    if difference < 0:
        fits = best.memory_bytes <= min(plan.room_bytes)
        how = "a pin, or the search ended before it was tried" if fits else "it may not fit"
        return f"{best.layout} would save {format_seconds(-difference)} a step: {how}"
    if difference <= 1e-9 * chosen.step_seconds:
        return f"the step is as long with it on {best.layout}: other ops decide how long it takes"
    share = percent(difference / chosen.step_seconds)
    more = f"{format_seconds(difference)} ({share})"
    return f"the best of {len(ways)} places, everything else as it is: {best.layout} adds {more}"


def _place(plan: PlanData, name: str, ops: set[str]) -> tuple[dict[str, str], list[int]]:
    """Say where ops run and what is sent for them, in words; and return their stages."""
    where = sorted({index for index, stage in enumerate(plan.stages) if ops & set(stage.ops)})
    everywhere = sorted(ops & set(plan.recomputed))
    facts = {"explained": f"{name}, {counted(len(ops), 'op')}" if ops != {name} else f"{name}, an op"}
    if not where:
        return {**facts, "why": known.COMPUTED_EVERYWHERE}, where
    named, rest = where[: known.MOST_NAMED], len(where) - known.MOST_NAMED
    facts["runs in"] = "; ".join(known.runs_in(plan, i) for i in named)
    if rest > 0:
        facts["runs in"] += f" and {rest} more stages"
    facts["slowest"] = known.slowest(plan)
    layouts = [text for i in named for text in _layouts(plan, i, name, ops)]
    if layouts:
        facts["layout"] = "; ".join(layouts)
    crossing = [value for value in plan.values if value.name in ops]
    if crossing:
        facts["sent"] = known.sent(crossing[: known.MOST_NAMED])
    if everywhere:
        facts["everywhere"] = f"{shorten(everywhere, 60)}: cheap, computed by every stage that reads it"
    return facts, where


def _is_parameter(plan: PlanData, name: str, graph: OpGraph | None) -> bool:
    if graph is not None:
        return name in graph.parameters
    inputs = () if plan.outline is None else plan.outline.inputs
    return any(source.kind == "parameter" and source.name == name for source in inputs)


def _layouts(plan: PlanData, index: int, name: str, ops: set[str]) -> list[str]:
    """Say how a sharded stage keeps the parameter of that name and runs its ops; nothing for a stage on one device."""
    sharding = plan.stages[index].sharding
    if sharding is None:
        return []
    kept = [f"stored {sharding.stored[name]}"] if name in sharding.stored else []
    run = [f"{op} {' | '.join(sharding.choices[op])}" for op in sorted(ops & sharding.choices.keys())[:3]]
    return [f"stage {index}: {', '.join([*kept, *run])}"] if kept or run else []


def _ops_named(plan: PlanData, name: str, graph: OpGraph | None) -> set[str]:
    """Find the op of that name, those that read the parameter, or those of the module."""
    ops = {*plan.placements, *plan.recomputed}
    if name in ops:
        return {name}
    named: set[str] = set()
    names: list[str] = list(ops)
    if graph is not None:
        for source in graph.inputs:
            names.append(source.name)
            whole = graph.parts[source.name].whole if source.name in graph.parts else source.name
            if name in (source.name, whole):
                named |= {user.name for user in graph.nodes[source.node].users if user.name in ops}
        for node in graph.ops:
            path = str(node.meta.get("module_path", ""))
            names.append(path)
            if path == name or path.startswith(f"{name}."):
                named.add(node.name)
    elif plan.outline is not None:
        outline = plan.outline
        names += [*outline.modules, *(source.name for source in outline.inputs)]
        for op, module, reads in zip(outline.names, outline.module_of, outline.reads_of(), strict=True):
            path = outline.modules[module]
            inside = path == name or path.startswith(f"{name}.")
            if op in ops and (inside or any(r < 0 and outline.inputs[-1 - r].name == name for r in reads)):
                named.add(op)
    if named:
        return named
    close = get_close_matches(name, dict.fromkeys(names), n=3, cutoff=0.4)
    suggestions = [f"did you mean {', '.join(close)}?"] if close else []
    if graph is None and plan.outline is None:
        suggestions.append("parameters and modules are known with the model: give `model=` (`--model`)")
    raise UsageError(
        f"there is no op{'' if graph is None and plan.outline is None else ', parameter or module'} {name!r} to explain",
        [f"the plan is for {plan.model.name} with {len(ops)} ops"],
        suggestions,
    )
