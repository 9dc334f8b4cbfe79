"""Other layouts that an op, parameter or input of a feature-wise placement could have had, everything else as it is.

    placement, graph, cluster ─► the search's problem of its one mesh and micro-batch count, each unit held at what the
    placement says ─► the named unit let go ─► every way it could run, what each costs, why this one

Nothing is searched, so a plan from a file can be explained as well as one that was just made. Equal ops of equal blocks
change together, as in the search. Where another way leaves parts of a parameter's gradient on ranks (or no longer does),
that parameter's sum at the end of the step comes with it (or goes).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from difflib import get_close_matches

import numpy as np

from cost_models.errors import UsageError
from cost_models.layout import Mesh, Replicate
from passes.costs.costs import GraphCosts
from passes.graph.graph import OpGraph
from passes.search.feature.bound import WireTable, bridge_seconds, price, wire_tables
from passes.search.feature.codes import DEFERRED, WHOLE
from passes.search.feature.graph import FeatureGraph, Unit, UnitKind, feature_graph, leaving_name
from passes.search.feature.options import Options, StoredChoice, UnitNumbers
from passes.search.feature.problem import FeatureProblem, build_problem
from passes.search.feature.setting import Setting
from passes.search.feature.ties import axes_of_parts
from passes.search.feature.tuning import TUNING
from passes.search.outcome import PlacedWay
from passes.shard.discover import Discovery
from passes.shard.words import FeaturePlacement, Placements, choice_text, crossing_text, placements_text


@dataclass(frozen=True)
class Alternatives:
    """``ways``: cheapest first. ``equals``: what changes with it, itself included. ``left_out``: one-axis choices that the
    mesh allows on no axis."""

    name: str
    kind: UnitKind
    what: str
    equals: tuple[str, ...]
    mesh: Mesh
    ways: tuple[PlacedWay, ...]
    capacity_bytes: float
    left_out: tuple[str, ...] = field(default=())

    @property
    def chosen(self) -> PlacedWay:
        return next(way for way in self.ways if way.chosen)

    @property
    def cheaper(self) -> tuple[PlacedWay, ...]:
        """Ways that would make the step shorter, whether they fit or not."""
        limit = self.chosen.step_seconds * (1 - TUNING.alike)
        return tuple(way for way in self.ways if way.step_seconds < limit)

    def fits(self, way: PlacedWay) -> bool:
        """Tell whether a way fits the memory of the smallest device."""
        return way.possible and way.memory_bytes <= self.capacity_bytes


def alternatives(
    graph: OpGraph,
    costs: GraphCosts,
    placement: FeaturePlacement,
    setting: Setting,
    name: str,
    discovery: Discovery | None = None,
) -> Alternatives:
    """List the ways of the op, parameter or leaf ``name``. Raises UsageError if there is none, or nothing to choose."""
    discovery = discovery or Discovery()
    marks = _marks(graph, placement)
    space = feature_graph(graph, costs, discovery.choices, marks, setting.again)
    unit = _unit(space, name)
    near = _parameters_beside(space, unit)

    def restrict(other: Unit, numbers: UnitNumbers) -> UnitNumbers:
        if other.index == unit.index:
            return numbers
        held = [k for k in range(len(numbers.seconds)) if _is_held(graph, placement, other, numbers, k)]
        if not held:
            raise _unknown_way(name, other.name)
        return numbers.keep(np.array(held, dtype=np.intp))

    mesh = placement.mesh
    problem = build_problem(space, mesh, placement.microbatches, setting, restrict=restrict)
    ways = _ways(problem, unit, near, placement)
    labels = [way.layout for way in ways if way.chosen]
    if len(labels) != 1:
        raise _unknown_way(name, "it")
    return Alternatives(
        name,
        unit.kind,
        _what(graph, unit),
        tuple(graph.input_of[m].name if m in graph.input_of else m for m in unit.members),
        mesh,
        ways,
        problem.capacity_bytes + problem.floor_bytes,
        _left_out(unit, problem.units[unit.index]),
    )


def _unknown_way(name: str, what: str) -> UsageError:
    return UsageError(
        f"cannot explain {name}",
        [f"{what} is placed in a way that the search does not know"],
        ["plans are not meant to be edited: plan this model anew"],
    )


# --------------------------------------------------------------------------------------------------
# Whom it is about


def _marks(graph: OpGraph, placement: FeaturePlacement) -> dict[str, str]:
    """Equal nodes that are placed alike stay one unit."""
    marks = {op: "; ".join(map(choice_text, ways)) for op, ways in placement.choices.items()}
    for given in graph.inputs:
        layouts = (placement.stored, placement.sharded_state, placement.batch)
        texts = [placements_text(layout[given.name]) if given.name in layout else "" for layout in layouts]
        marks[given.node] = " | ".join(texts)
    return marks


def _unit(space: FeatureGraph, name: str) -> Unit:
    graph = space.graph
    node_of = {given.name: given.node for given in graph.inputs}
    found = space.unit_of.get(name, space.unit_of.get(node_of.get(name, "")))
    unit = None if found is None else space.units[found]
    if unit is not None and unit.kind in ("op", "parameter", "batch", "value"):
        return unit
    if unit is not None or name in graph.nodes or name in node_of:
        why = "buffers, constants and sizes are whole on every device, and a part of a result is as the result is"
        raise UsageError(f"there is nothing to choose about {name!r}", [why])
    inside = [
        node.name
        for node in graph.ops
        if node.name in space.unit_of and str(node.meta.get("module_path", "")) == name
    ]
    inside += [given for given in graph.parameters if given.rpartition(".")[0] == name]
    if inside:
        raise UsageError(
            f"{name!r} is a module of {len(inside)} ops and parameters",
            [", ".join(inside[:12])],
            [f"explain {inside[0]}"],
        )
    known = [*space.unit_of, *node_of]
    close = get_close_matches(name, known, n=3, cutoff=0.4)
    raise UsageError(
        f"there is no op, parameter or input {name!r} to explain",
        [f"{graph.model_name} has {len(graph.ops)} ops and {len(graph.parameters)} parameters"],
        [f"did you mean {', '.join(close)}?"]
        if close
        else ["the names that `partitioner graph MODEL` shows"],
    )


def _what(graph: OpGraph, unit: Unit) -> str:
    """ "linear in transformer.h.0.mlp.c_fc", "parameter"."""
    node = graph.nodes[unit.name]
    if unit.kind != "op":
        return {"batch": "input", "value": "value of another stage"}.get(unit.kind, unit.kind)
    path = str(node.meta.get("module_path", ""))
    op = str(node.target).removeprefix("aten.").partition(".")[0]
    return f"{op} in {path}" if path else op


def _parameters_beside(space: FeatureGraph, unit: Unit) -> frozenset[int]:
    """Parameters that the op reads."""
    return frozenset(
        wire.producer
        for wire in space.wires
        if space.units[wire.producer].kind == "parameter" and any(u == unit.index for u, _ in wire.readers)
    )


def _left_out(unit: Unit, numbers: UnitNumbers) -> tuple[str, ...]:
    if unit.kind != "op" or not isinstance(numbers.detail, Options):
        return ()
    used = set(numbers.detail.axes.flatten().tolist())
    return tuple(choice_text(choice) for k, choice in enumerate(numbers.detail.choices) if k not in used)


# --------------------------------------------------------------------------------------------------
# What the placement says of a unit


def _is_held(graph: OpGraph, placement: FeaturePlacement, unit: Unit, numbers: UnitNumbers, k: int) -> bool:
    """Tell whether option ``k`` of the unit is what the placement says: of a parameter in its layouts, whenever it is
    summed."""
    if unit.kind == "output":
        return True
    detail, option = numbers.detail, int(numbers.index[k])
    whole: Placements = (Replicate(),) * len(placement.mesh.shape)
    if isinstance(detail, Options):
        ways = detail.per_axis(option)
        if unit.kind == "op":
            return ways == placement.choices.get(unit.name, ways)
        if unit.kind == "leaving":
            left = tuple(way.inputs[0].placement for way in ways)
            return left == placement.values.get(unit.name.removeprefix(leaving_name("")), whole)
        layouts: Mapping[str, Placements] = placement.batch if unit.kind == "batch" else placement.stored
        if unit.kind == "state":
            return True
        return tuple(way.outputs[0] for way in ways) == layouts.get(graph.input_of[unit.name].name, whole)
    name = graph.input_of[unit.name].name
    layouts, others = (placement.stored, placement.sharded_state)
    if unit.kind == "value":
        layouts, others = (placement.values, placement.returned)
    kept, stored = detail[option], layouts.get(name, whole)
    return tuple(way.stored for way in kept) == stored and tuple(way.state for way in kept) == others.get(
        name, stored
    )


# --------------------------------------------------------------------------------------------------
# What each way costs


def _ways(
    problem: FeatureProblem, unit: Unit, near: frozenset[int], placement: FeaturePlacement
) -> tuple[PlacedWay, ...]:
    tables = wire_tables(problem)
    graph = problem.space.graph
    numbers = problem.units[unit.index]
    several = {u for u, other in enumerate(problem.units) if len(other.seconds) > 1}
    base = _settled(problem, tables, [0] * len(problem.units), several - {unit.index})
    best: dict[str, PlacedWay] = {}
    parts = axes_of_parts(problem, base).get(unit.index, frozenset())
    for k in range(len(numbers.seconds)):
        if unit.kind == "parameter" and not _is_summed_once(numbers, k, parts):
            continue
        chosen = [*base[: unit.index], k, *base[unit.index + 1 :]]
        chosen = _settled(problem, tables, chosen, near)
        cost = price(problem, tables, chosen)
        computes, sends = _shares(problem, tables, unit, near, chosen)
        way = PlacedWay(
            layout=_layout(unit, numbers.detail, int(numbers.index[k])),
            step_seconds=cost.seconds,
            computes_seconds=computes,
            sends_seconds=sends,
            memory_bytes=cost.bytes + problem.floor_bytes,
            chosen=_is_held(graph, placement, unit, numbers, k),
            possible=cost.seconds < TUNING.forbidden_seconds,
        )
        known = best.get(way.layout)
        if known is None or way.step_seconds < known.step_seconds:
            best[way.layout] = way
    return tuple(sorted(best.values(), key=lambda way: (way.step_seconds, not way.chosen, way.layout)))


def _is_summed_once(numbers: UnitNumbers, k: int, parts: frozenset[int]) -> bool:
    """Tell whether a parameter's gradient is summed at the step's end just where there are parts of it."""
    if isinstance(numbers.detail, Options) or not numbers.detail:
        return True
    ways = numbers.detail[int(numbers.index[k])]
    return all(
        (way.code == DEFERRED) == (axis in parts)
        for axis, way in enumerate(ways)
        if way.code in (WHOLE, DEFERRED)
    )


def _settled(
    problem: FeatureProblem, tables: Sequence[WireTable], chosen: Sequence[int], parameters: Set[int]
) -> list[int]:
    """Settle when gradients of ``parameters`` are summed, in the cheapest way; they do not touch each other."""
    found = list(chosen)
    for u in sorted(parameters):
        trials = [[*found[:u], k, *found[u + 1 :]] for k in range(len(problem.units[u].seconds))]
        seconds = [_near_seconds(problem, tables, u, trial) for trial in trials]
        found = trials[int(np.argmin(seconds))]
    return found


def _near_seconds(
    problem: FeatureProblem, tables: Sequence[WireTable], unit: int, chosen: Sequence[int]
) -> float:
    """Seconds of a unit and the bridges at it."""
    bridges = [
        bridge_seconds(problem, wire, known, chosen)
        for wire, known in zip(problem.space.wires, tables, strict=True)
        if wire.producer == unit or any(u == unit for u, _ in wire.readers)
    ]
    return float(problem.units[unit].seconds[chosen[unit]]) + math.fsum(bridges)


def _shares(
    problem: FeatureProblem,
    tables: Sequence[WireTable],
    unit: Unit,
    near: frozenset[int],
    chosen: Sequence[int],
) -> tuple[float, float]:
    """(seconds of the unit's own work, seconds of what is sent for it)."""
    own = float(problem.units[unit.index].seconds[chosen[unit.index]])
    bridges = _near_seconds(problem, tables, unit.index, chosen) - own
    sums = math.fsum(float(problem.units[u].seconds[chosen[u]]) for u in near)
    return (own, bridges + sums) if unit.kind == "op" else (0.0, own + bridges)


def _layout(unit: Unit, detail: object, option: int) -> str:
    """One part per mesh axis."""
    if isinstance(detail, Options):
        ways = detail.per_axis(option)
        if ways and not ways[0].inputs and len(ways[0].outputs) == 1:
            return placements_text(tuple(way.outputs[0] for way in ways))
        return " | ".join(choice_text(way) for way in ways)
    assert isinstance(detail, tuple)
    if unit.kind == "value":
        ways = detail[option]
        return crossing_text(tuple(way.stored for way in ways), tuple(way.state for way in ways))
    return _stored_text(detail[option])


def _stored_text(ways: Sequence[StoredChoice]) -> str:
    """ "stored R S0, state S1 S0": when the gradient is summed follows from its readers."""
    stored, state = tuple(way.stored for way in ways), tuple(way.state for way in ways)
    text = f"stored {placements_text(stored)}"
    return text if state == stored else f"{text}, gradient and state {placements_text(state)}"
