"""Explanations of plans of several stages, and of one stage on one device.

Layer-wise and hybrid: where it runs, what that stage takes beside the slowest, and what is sent for it; what other stages
would cost takes a search, with a pin. Free: the same, and the step with it on each other device, simulated, everything
else as it is.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

import numpy as np

from cost_models.errors import UsageError
from cost_models.units import counted, format_bytes, format_seconds, percent
from partitioner.explain.explanation import Explanation
from partitioner.record.modules import shorten
from partitioner.record.rebuild import simulate_plan, split_graph
from partitioner.report.sharding import devices_text
from passes.costs.costs import GraphCosts, costs_of
from passes.graph.state import owning_units
from passes.search.feature.explain import Way
from passes.search.free.candidates import FreeCandidates
from passes.search.free.request import FreeCandidate, FreeRequest
from runtime.segment.microbatch import microbatch_sizes

MOST_DEVICES = 32
"""Of a cluster, that are tried: each is a simulation or two."""

if TYPE_CHECKING:
    from partitioner.record.data import PlanData
    from passes.graph.graph import OpGraph


def of_layers(plan: PlanData, name: str, graph: OpGraph | None) -> Explanation:
    """Of an op, or with the model a parameter or module, of a layer-wise plan."""
    ops = _ops_named(plan, name, graph)
    facts, where = _place(plan, name, ops)
    if not where:
        return Explanation(name, facts, ())
    facts["why"] = _why_cut(plan)
    other = (
        min(where[0] + 1, len(plan.stages) - 1) if where[0] + 1 < len(plan.stages) else max(where[0] - 1, 0)
    )
    if other != where[0]:
        facts["try"] = (
            f"plan again with pins={{{name!r}: {other}}} to see what stage {other} would cost"
            if graph is None or name not in graph.parameters
            else f"plan again with its module pinned to stage {other} to see what that would cost"
        )
    return Explanation(name, facts, ())


def of_free(plan: PlanData, name: str, graph: OpGraph | None) -> Explanation:
    """Of an op or block, or with the model a parameter or module, of a free plan."""
    split = None if graph is None else split_graph(plan, graph)
    ops = _ops_named(plan, name, split)
    facts, where = _place(plan, name, ops)
    if not where or split is None:
        if where:
            facts["why"] = (
                "the search chose it for all ops together; the model is needed to try other devices"
            )
        return Explanation(name, facts, ())
    moved = _moved_together(split, plan, ops)
    if moved != ops & set(plan.placements):
        facts["together"] = f"with {counted(len(moved - ops), 'op')} that must share a device with it"
    ways = _other_devices(plan, split, moved)
    facts["why"] = _why_there(ways, plan)
    return Explanation(name, facts, ways)


def _moved_together(graph: OpGraph, plan: PlanData, ops: set[str]) -> set[str]:
    """The placed ones of ``ops``, and what shares a device with them whatever the placement."""
    unit_of = owning_units(graph, frozenset(plan.recomputed))
    units = {unit_of[op] for op in ops if op in unit_of}
    return {op for op, unit in unit_of.items() if unit in units}


def _other_devices(plan: PlanData, graph: OpGraph, moved: set[str]) -> tuple[Way, ...]:
    """The step with ``moved`` on each device, fastest first; the plan's own is as it was predicted."""
    costs = costs_of(graph, plan.cluster)
    request = FreeRequest(
        plan.batch_size, plan.microbatches, optimizer=plan.optimizer_memory, precision=plan.precision
    )
    candidates = FreeCandidates(graph, costs, plan.cluster, request, frozenset(plan.recomputed))
    home = {op: ranks[0] for op, ranks in plan.placements.items()}
    here = {home[op] for op in moved}
    own = simulate_plan(plan)
    ways = []
    for rank, device in enumerate(plan.cluster.devices[:MOST_DEVICES]):
        chosen = here == {rank}
        candidate = FreeCandidate({**home, **dict.fromkeys(moved, rank)}, plan.microbatches)
        simulation = own if chosen else candidates.realized(candidate).realized.simulation
        sends = sum(transfer.end_seconds - transfer.start_seconds for transfer in simulation.transfers)
        ways.append(
            Way(
                layout=f"rank {rank} ({device.model})",
                step_seconds=simulation.step_seconds,
                computes_seconds=_computes(costs, plan, moved, rank),
                sends_seconds=sends,
                memory_bytes=simulation.peak_bytes[rank],
                chosen=chosen,
            )
        )
    if len(here) > 1:  # a module's ops, or a parameter's readers, on several devices
        spread = f"ranks {', '.join(map(str, sorted(here)))}, as planned"
        sends = sum(transfer.end_seconds - transfer.start_seconds for transfer in own.transfers)
        seconds = sum(
            _computes(costs, plan, {op for op in moved if home[op] == rank}, rank) for rank in sorted(here)
        )
        ways.append(Way(spread, own.step_seconds, seconds, sends, max(own.peak_bytes), True))
    return tuple(sorted(ways, key=lambda way: way.step_seconds))


def _computes(costs: GraphCosts, plan: PlanData, ops: set[str], rank: int) -> float:
    """Seconds of ``ops`` on a device in a step."""
    size = microbatch_sizes(plan.batch_size, plan.microbatches)[0]
    indices = np.array([i for i, name in enumerate(costs.ops) if name in ops], dtype=np.int64)
    seconds = costs.segment_seconds(indices, size, plan.cluster.devices[rank])
    return plan.microbatches * (seconds.forward + seconds.backward_input + seconds.backward_weight)


def _why_there(ways: tuple[Way, ...], plan: PlanData) -> str:
    """How the device compares with the others."""
    chosen = next(way for way in ways if way.chosen)
    others = [way for way in ways if not way.chosen]
    if not others:
        return "there is no other device"
    best = others[0]
    difference = best.step_seconds - chosen.step_seconds
    if difference < 0:
        fits = best.memory_bytes <= min(device.memory_bytes for device in plan.cluster.devices)
        how = "a pin, or the search ended before it was tried" if fits else "it may not fit"
        return f"{best.layout} would save {format_seconds(-difference)} a step: {how}"
    if difference <= 1e-9 * chosen.step_seconds:
        return f"the step is as long with it on {best.layout}: other ops decide how long it takes"
    share = percent(difference / chosen.step_seconds)
    more = f"{format_seconds(difference)} ({share})"
    return f"the best of {len(ways)} places, everything else as it is: {best.layout} adds {more}"


def _place(plan: PlanData, name: str, ops: set[str]) -> tuple[dict[str, str], list[int]]:
    """Where ops run and what is sent for them, in words; and their stages."""
    where = sorted({index for index, stage in enumerate(plan.stages) if ops & set(stage.ops)})
    everywhere = sorted(ops & set(plan.recomputed))
    facts = {"explained": f"{name}, {counted(len(ops), 'op')}" if ops != {name} else f"{name}, an op"}
    if not where:
        why = "it is cheap and depends on inputs only, so every stage that reads it computes it itself"
        return {**facts, "why": why}, where
    slowest = max(range(len(plan.stages)), key=lambda i: _seconds(plan, i))
    facts["runs in"] = "; ".join(
        f"stage {i} on {devices_text(plan.stages[i].devices)} ({shorten(plan.stages[i].modules, 40)}), "
        f"{format_seconds(_seconds(plan, i))} a micro-batch"
        for i in where[:4]
    ) + (f" and {len(where) - 4} more stages" if len(where) > 4 else "")
    facts["slowest"] = f"stage {slowest}, {format_seconds(_seconds(plan, slowest))} a micro-batch"
    layouts = [text for i in where[:4] for text in _layouts(plan, i, name, ops)]
    if layouts:
        facts["layout"] = "; ".join(layouts)
    crossing = [value for value in plan.values if value.name in ops]
    if crossing:
        facts["sent"] = ", ".join(
            f"{value.name} ({format_bytes(value.size_bytes)}) to stage {','.join(map(str, value.consumers))}"
            for value in crossing[:4]
        )
    if everywhere:
        facts["everywhere"] = f"{shorten(everywhere, 60)}: cheap, computed by every stage that reads it"
    return facts, where


def _layouts(plan: PlanData, index: int, name: str, ops: set[str]) -> list[str]:
    """How a sharded stage keeps the parameter of that name and runs its ops; nothing of a stage on one device."""
    sharding = plan.stages[index].sharding
    if sharding is None:
        return []
    kept = [f"stored {sharding.stored[name]}"] if name in sharding.stored else []
    run = [f"{op} {' | '.join(sharding.choices[op])}" for op in sorted(ops & sharding.choices.keys())[:3]]
    return [f"stage {index}: {', '.join([*kept, *run])}"] if kept or run else []


def _why_cut(plan: PlanData) -> str:
    certificate = plan.certificate
    text = "each device has one contiguous run of the program; where runs are cut was decided for all ops together: "
    if certificate.gap < 5e-5:
        return f"{text}no other cuts of the space searched cost less by the surrogate"
    return f"{text}other cuts could cost up to {percent(certificate.gap)} less by the surrogate"


def _seconds(plan: PlanData, index: int) -> float:
    stage = plan.stages[index]
    return stage.forward_seconds + stage.backward_seconds


def _ops_named(plan: PlanData, name: str, graph: OpGraph | None) -> set[str]:
    """The op of that name, those that read the parameter, or those of the module."""
    known = {*plan.placements, *plan.recomputed}
    if name in known:
        return {name}
    found: set[str] = set()
    names: list[str] = list(known)
    if graph is not None:
        for given in graph.inputs:
            names.append(given.name)
            whole = graph.parts[given.name].whole if given.name in graph.parts else given.name
            if name in (given.name, whole):
                found |= {user.name for user in graph.nodes[given.node].users if user.name in known}
        for node in graph.ops:
            path = str(node.meta.get("module_path", ""))
            names.append(path)
            if path == name or path.startswith(f"{name}."):
                found.add(node.name)
    if found:
        return found
    close = get_close_matches(name, dict.fromkeys(names), n=3, cutoff=0.4)
    suggestions = [f"did you mean {', '.join(close)}?"] if close else []
    if graph is None:
        suggestions.append("parameters and modules are known with the model: give `model=` (`--model`)")
    raise UsageError(
        f"there is no op{', parameter or module' if graph is not None else ''} {name!r} to explain",
        [f"the plan is for {plan.model.name} with {len(known)} ops"],
        suggestions,
    )
