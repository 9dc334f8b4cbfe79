"""``plan.explain(name)``: what else an op, a parameter or an input could have been, what that costs, and why it is not so.

Feature-wise: every layout, with everything else as it is (``passes.feature_explain``). Layer-wise: where it runs, what
that stage takes beside the slowest, and what is sent for it; what other stages would cost takes a search, with a pin.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from cost_models.errors import UsageError
from cost_models.units import format_bytes, format_seconds
from partitioner.modules import range_of, shorten
from partitioner.plan_model import graph_of
from partitioner.rebuild import refuse_wrong_choices
from partitioner.report.sharding import mesh_text
from partitioner.report.text import columns, counted, labelled, percent, printable
from passes.costs import costs_of
from passes.discover import Discovery
from passes.feature_explain import Alternatives, Way, alternatives
from passes.feature_problem import Setting

if TYPE_CHECKING:
    from partitioner.api import ModelOrTrace
    from partitioner.plan import Plan
    from passes.graph import OpGraph

MOST_WAYS = 20
"""Ways that the text shows; ``ways`` has all."""


@dataclass(frozen=True)
class Explanation:
    """``str()`` is what the command prints. ``ways``: cheapest first; none for layer-wise plans, which fix nothing but the
    stage. ``facts``: label and text, why among them."""

    name: str
    facts: Mapping[str, str]
    ways: tuple[Way, ...]

    @property
    def why(self) -> str:
        """Why it is as it is, in words."""
        return self.facts["why"]

    def __str__(self) -> str:
        lines = [labelled(label, text) for label, text in self.facts.items()]
        table = _table(self.ways) if self.ways else ""
        return printable("\n\n".join(["\n".join(lines), table]) if table else "\n".join(lines))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {
            "name": self.name,
            "facts": dict(self.facts),
            "ways": [{**asdict(way), "possible": way.possible} for way in self.ways],
        }


def explain_plan(plan: Plan, name: str, model: ModelOrTrace | None, options: dict[str, Any]) -> Explanation:
    """Of an op, a parameter or an input of the plan's model."""
    if plan.strategy != "feature":
        graph = None
        if model is not None or plan._made_with.graph is not None:
            graph = graph_of(plan, model, f"explain {name}", options)
        return _of_layers(plan, name, graph)
    graph = graph_of(plan, model, f"explain {name}", options)
    return _of_shards(plan, graph.aliases.get(name, name), graph)  # a tied parameter goes by any of its names


# --------------------------------------------------------------------------------------------------
# Feature-wise


def _of_shards(plan: Plan, name: str, graph: OpGraph) -> Explanation:
    (stage,) = plan.stages
    assert stage.sharding is not None
    placement = stage.sharding.placement(stage.devices, plan.microbatches)
    refuse_wrong_choices(plan.model.name, graph, placement)
    setting = Setting(plan.cluster, plan.batch_size, plan.optimizer_memory, plan.precision)
    found = alternatives(graph, costs_of(graph, plan.cluster), placement, setting, name, Discovery.stored())
    equals = [other for other in found.equals if other != name]
    facts = {
        "explained": f"{name}, {found.what}",
        "together": f"with {counted(len(equals), 'equal one')} of other blocks: {range_of(equals) or shorten(equals, 70)}",
        "mesh": f"{mesh_text(stage.sharding)}, {counted(plan.microbatches, 'micro-batch')}; everything else as it is",
        "chosen": found.chosen.layout,
        "why": _why(found),
        "left out": f"{'; '.join(found.left_out)}: no axis of the mesh divides a dimension that these split",
    }
    if not equals:
        del facts["together"]
    if not found.left_out:
        del facts["left out"]
    return Explanation(name, facts, found.ways)


def _why(found: Alternatives) -> str:
    chosen, cheaper = found.chosen, found.cheaper
    others = [way for way in found.ways if not way.chosen]
    if not others:
        return (
            "nothing else is known to be right: no rule allows another, and none was found by trying"
            if found.kind == "op"
            else "nothing else divides"
        )
    fitting = [way for way in cheaper if found.fits(way)]
    if fitting:
        best = fitting[0]
        return (
            f"it was fixed by a pin, or the search ended early: {best.layout} would save "
            f"{format_seconds(chosen.step_seconds - best.step_seconds)} a step"
        )
    if cheaper:
        least = min(way.memory_bytes for way in cheaper)
        return (
            f"the cheapest that fits: {counted(len(cheaper), 'way')} would be faster, by up to "
            f"{format_seconds(chosen.step_seconds - cheaper[0].step_seconds)} a step, but would hold "
            f"{format_bytes(int(least))} or more of {format_bytes(int(found.capacity_bytes))} on a device"
        )
    return f"the cheapest of {len(found.ways)} ways. {_next_best(chosen, others)}"


def _next_best(chosen: Way, others: list[Way]) -> str:
    """How the others compare: what more they compute and send."""
    rest = [way for way in others if way.possible]
    if not rest:
        return "No other can be bridged to what is around it"
    best = rest[0]
    more = best.step_seconds - chosen.step_seconds
    if more <= 1e-9 * chosen.step_seconds:
        return f"{best.layout} costs the same"
    computes = best.computes_seconds - chosen.computes_seconds
    sends = best.sends_seconds - chosen.sends_seconds
    parts = [f"{_signed(computes)} computing", f"{_signed(sends)} sending and summing"]
    return (
        f"The next, {best.layout}, adds {format_seconds(more)} ({percent(more / chosen.step_seconds)}) to the step: "
        f"{', '.join(parts)}"
    )


def _signed(seconds: float) -> str:
    return f"{'-' if seconds < 0 else '+'}{format_seconds(abs(seconds))}"


def _table(ways: tuple[Way, ...]) -> str:
    chosen = next(way for way in ways if way.chosen)
    shown = list(ways[:MOST_WAYS])
    if chosen not in shown:
        shown[-1] = chosen
    header = ("", "layout", "step", "to chosen", "computes", "sends", "on a device")
    rows = [
        [
            "*" if way.chosen else "",
            way.layout,
            format_seconds(way.step_seconds) if way.possible else "-",
            f"{_signed(way.step_seconds - chosen.step_seconds)}" if way.possible and not way.chosen else "",
            format_seconds(way.computes_seconds),
            format_seconds(way.sends_seconds) if way.possible else "no bridge",
            format_bytes(int(way.memory_bytes)),
        ]
        for way in shown
    ]
    hidden = len(ways) - len(shown)
    if hidden:
        rows.append(["", f"({hidden} more)", *[""] * 5])
    return columns(header, rows, left=("", "layout"))


# --------------------------------------------------------------------------------------------------
# Layer-wise


def _of_layers(plan: Plan, name: str, graph: OpGraph | None) -> Explanation:
    ops = _ops_named(plan, name, graph)
    where = sorted({index for index, stage in enumerate(plan.stages) if ops & set(stage.ops)})
    everywhere = sorted(ops & set(plan.recomputed))
    facts = {"explained": f"{name}, {counted(len(ops), 'op')}" if ops != {name} else f"{name}, an op"}
    if not where:
        why = "it is cheap and depends on inputs only, so every stage that reads it computes it itself"
        return Explanation(name, {**facts, "why": why}, ())
    slowest = max(range(len(plan.stages)), key=lambda i: _seconds(plan, i))
    facts["runs in"] = "; ".join(
        f"stage {i} on rank {plan.stages[i].devices[0]} ({shorten(plan.stages[i].modules, 40)}), "
        f"{format_seconds(_seconds(plan, i))} a micro-batch"
        for i in where[:4]
    ) + (f" and {len(where) - 4} more stages" if len(where) > 4 else "")
    facts["slowest"] = f"stage {slowest}, {format_seconds(_seconds(plan, slowest))} a micro-batch"
    crossing = [value for value in plan.values if value.name in ops]
    if crossing:
        facts["sent"] = ", ".join(
            f"{value.name} ({format_bytes(value.size_bytes)}) to stage {','.join(map(str, value.consumers))}"
            for value in crossing[:4]
        )
    if everywhere:
        facts["everywhere"] = f"{shorten(everywhere, 60)}: cheap, computed by every stage that reads it"
    facts["why"] = _why_there(plan)
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


def _why_there(plan: Plan) -> str:
    certificate = plan.certificate
    text = "each device has one contiguous run of the program; where runs are cut was decided for all ops together: "
    if certificate.gap < 5e-5:
        return f"{text}no other cuts of the space searched cost less by the surrogate"
    return f"{text}other cuts could cost up to {percent(certificate.gap)} less by the surrogate"


def _seconds(plan: Plan, index: int) -> float:
    stage = plan.stages[index]
    return stage.forward_seconds + stage.backward_seconds


def _ops_named(plan: Plan, name: str, graph: OpGraph | None) -> set[str]:
    """The op of that name, those that read the parameter, or those of the module."""
    known = {*plan.placements, *plan.recomputed}
    if name in known:
        return {name}
    found: set[str] = set()
    names: list[str] = list(known)
    if graph is not None:
        for given in graph.inputs:
            names.append(given.name)
            if given.name == name:
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
