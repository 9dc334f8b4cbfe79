"""``plan.explain(name)``: all that an op, a parameter or an input could have been, what each costs, and why it is not so.

One sharded stage: every layout, with everything else as it is. Plans of several stages: ``partitioner.explain.stages``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cost_models.room import FILLS, at_risk
from cost_models.units import counted, format_bytes, format_seconds, percent
from partitioner.explain.explanation import Explanation, signed
from partitioner.explain.graph_of_plan import graph_of
from partitioner.explain.stages import of_free, of_layers
from partitioner.record.modules import range_of, shorten
from partitioner.record.rebuild import refuse_wrong_choices
from partitioner.report.intervals import allowed_text
from partitioner.report.sharding import devices_text, mesh_text
from passes.costs.costs import costs_of
from passes.graph.blocks import regions_of_stages
from passes.graph.part import part_of
from passes.search.feature.explain import Alternatives, alternatives
from passes.search.feature.setting import PartPlace, Setting
from passes.search.outcome import PlacedWay
from passes.search.recomputed import Regions
from passes.search.words import STRATEGY_WORDS
from passes.shard.discover import Discovery

if TYPE_CHECKING:
    from partitioner.models.as_graph import ModelOrTrace
    from partitioner.record.data import PlanData
    from partitioner.record.records import Stage
    from partitioner.record.sharding import StageSharding
    from passes.graph.graph import OpGraph


def explain_plan(
    plan: PlanData, name: str, model: ModelOrTrace | None, options: dict[str, Any]
) -> Explanation:
    """Explain an op, a parameter or an input of the plan's model.

    The cost of other layouts is known if the plan is one sharded stage.
    """
    words = STRATEGY_WORDS.get(plan.strategy)
    one = len(plan.stages) == 1 and plan.stages[0].sharding is not None
    graph = None
    if one or model is not None or plan._made_with.graph is not None:
        graph = graph_of(plan, model, f"explain {name}", options)
    if words is not None and words.stages == "pieces":
        return of_free(plan, name, graph)
    if graph is None:
        return of_layers(plan, name, graph)
    name = graph.aliases.get(name, name)  # a tied parameter goes by any of its names
    stage = plan.stages[0] if one else _sharded_stage(plan, name, graph)
    if stage is None or stage.sharding is None:
        return of_layers(plan, name, graph)
    again = regions_of_stages(graph, dict.fromkeys(stage.ops, 0), [stage.recomputed_blocks])
    part_graph = graph if one else part_of(graph, stage.ops, plan.recomputed)
    shared = frozenset() if one else frozenset(tied.name for tied in plan.tied)
    everywhere = one and len(stage.devices) == plan.cluster.world_size
    part = None if everywhere else PartPlace(stage.devices, shared=shared)
    explained = _of_shards(plan, stage, stage.sharding, name, part_graph, again[0] if again else (), part)
    if one:
        return explained
    where = f"stage {plan.stages.index(stage)} on {devices_text(stage.devices)}; the others as they are"
    return replace(explained, facts={**explained.facts, "stage": where})


def _sharded_stage(plan: PlanData, name: str, graph: OpGraph) -> Stage | None:
    """Return the first sharded stage that runs the op, or reads the parameter or input; None if there is none."""
    node = next((source.node for source in graph.inputs if source.name == name), name)
    readers = {user.name for user in graph.nodes[node].users} if node in graph.input_of else {name}
    return next((s for s in plan.stages if s.sharding is not None and readers & set(s.ops)), None)


# --------------------------------------------------------------------------------------------------
# A sharded stage


def _of_shards(
    plan: PlanData,
    stage: Stage,
    sharding: StageSharding,
    name: str,
    graph: OpGraph,
    again: Regions,
    part: PartPlace | None,
) -> Explanation:
    """Explain what devices share as ``sharding`` says. ``graph``: the stage's own, or the model's if it is the only one."""
    placement = sharding.placement(stage.devices, plan.microbatches)
    refuse_wrong_choices(plan.model.name, graph, stage.ops, placement)
    setting = Setting(at_risk(plan.cluster, plan.job.risk), plan.job, again=again, part=part)
    choices = alternatives(graph, costs_of(graph, plan.cluster), placement, setting, name, Discovery.stored())
    equals = [other for other in choices.equals if other != name]
    facts = {"explained": f"{name}, {choices.what}"}
    if equals:
        names = range_of(equals) or shorten(equals, 70)
        facts["together"] = f"with {counted(len(equals), 'equal one')} of other blocks: {names}"
    facts |= {
        "mesh": f"{mesh_text(sharding)}, {counted(plan.microbatches, 'micro-batch')}; everything else as it is",
        "chosen": choices.chosen.layout,
        "why": _why(choices, plan.job.risk),
    }
    if choices.left_out:
        left = "; ".join(choices.left_out)
        facts["left out"] = f"{left}: no axis of the mesh divides a dimension that these split"
    return Explanation(name, facts, choices.ways)


def _why(choices: Alternatives, risk: float) -> str:
    chosen, cheaper = choices.chosen, choices.cheaper
    others = [way for way in choices.ways if not way.chosen]
    if not others:
        return (
            "nothing else is known to be right: no rule allows another, and none was found by trying"
            if choices.kind == "op"
            else "nothing else divides"
        )
    fitting = [way for way in cheaper if choices.fits(way)]
    if fitting:
        best = fitting[0]
        return (
            f"it was fixed by a pin, or the search ended early: {best.layout} would save "
            f"{format_seconds(chosen.step_seconds - best.step_seconds)} a step"
        )
    if cheaper:
        least, room = min(way.memory_bytes for way in cheaper), format_bytes(int(choices.capacity_bytes))
        leaves = f"on a device, where {allowed_text(risk)} risk leaves room for {room}"
        return (
            f"the cheapest that fits: {counted(len(cheaper), 'way')} would be faster, by up to "
            f"{format_seconds(chosen.step_seconds - cheaper[0].step_seconds)} a step, but would hold "
            f"{format_bytes(int(least))} or more {f'of {room} on a device' if risk >= FILLS else leaves}"
        )
    return f"the cheapest of {len(choices.ways)} ways. {_next_best(chosen, others)}"


def _next_best(chosen: PlacedWay, others: list[PlacedWay]) -> str:
    """Compare the others with the chosen one: what more they compute and send."""
    rest = [way for way in others if way.possible]
    if not rest:
        return "No other can be bridged to what is around it"
    best = rest[0]
    more = best.step_seconds - chosen.step_seconds
    if more <= 1e-9 * chosen.step_seconds:
        return f"{best.layout} costs the same"
    computes = best.computes_seconds - chosen.computes_seconds
    sends = best.sends_seconds - chosen.sends_seconds
    parts = [f"{signed(computes)} computing", f"{signed(sends)} sending and summing"]
    return (
        f"The next, {best.layout}, adds {format_seconds(more)} ({percent(more / chosen.step_seconds)}) to the step: "
        f"{', '.join(parts)}"
    )
