"""The placement that a solved feature-wise problem chose, where its choices come from, and the work that it replicates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cost_models.layout import Replicate
from passes.search.feature.bound import bridge_seconds, wire_table
from passes.search.feature.graph import leaving_name
from passes.search.feature.options import Options
from passes.search.feature.problem import FeatureProblem
from passes.search.outcome import ChoiceOrigins
from passes.shard.discover import Discovery
from passes.shard.words import Choice, FeaturePlacement, Placements


def assemble(problem: FeatureProblem, options: Sequence[int]) -> FeaturePlacement:
    """The placement that one option per unit (indices into ``detail``) says."""
    graph = problem.space.graph
    ops: dict[str, tuple[Choice, ...]] = {}
    stored: dict[str, Placements] = {}
    state: dict[str, Placements] = {}
    batch: dict[str, Placements] = {}
    values: dict[str, Placements] = {}
    returned: dict[str, Placements] = {}
    for unit, numbers, option in zip(problem.space.units, problem.units, options, strict=True):
        detail = numbers.detail
        if unit.kind == "output":
            continue
        if isinstance(detail, Options):
            per_axis = detail.per_axis(option)
            if unit.kind == "op":
                ops |= dict.fromkeys(unit.members, per_axis)
                continue
            if unit.kind == "leaving":
                leaving = tuple(choice.inputs[0].placement for choice in per_axis)
                values |= {name.removeprefix(leaving_name("")): leaving for name in unit.members}
                continue
            layout = tuple(choice.outputs[0] for choice in per_axis)
            target = batch if unit.kind == "batch" else stored
            target |= {graph.input_of[node].name: layout for node in unit.members}
            continue
        kept = tuple(choice.stored for choice in detail[option])
        owned = tuple(choice.state for choice in detail[option])
        layouts, others = (values, returned) if unit.kind == "value" else (stored, state)
        for node in unit.members:
            name = graph.input_of[node].name
            layouts[name] = kept
            if owned != kept:
                others[name] = owned
    order = {node.name: i for i, node in enumerate(graph.ops)}
    ops = dict(sorted(ops.items(), key=lambda item: order[item[0]]))
    whole = (Replicate(),) * len(problem.mesh.shape)
    for given in graph.inputs:
        if given.kind == "batch":
            batch.setdefault(given.name, whole)
        elif given.kind in ("parameter", "buffer"):
            stored.setdefault(given.name, whole)
    return FeaturePlacement(problem.mesh, ops, stored, batch, problem.microbatches, state, values, returned)


@dataclass(frozen=True)
class SolvedPart:
    """A part of a sharded model: its problem, and the options chosen.

    ``names``: of its ops, where they stand for others.
    """

    problem: FeatureProblem
    options: Sequence[int]
    """One per unit, indices into ``detail``."""
    names: Mapping[str, str]


@dataclass(frozen=True)
class _PartOrigins:
    """The same of one part. ``flops``: of products, in ops that some axis does not split, and in all."""

    ops: Mapping[str, Sequence[str]]
    replicated_seconds: float
    whole: Mapping[str, float]
    flops: tuple[float, float]


def origins_of(discovery: Discovery, parts: Sequence[SolvedPart]) -> ChoiceOrigins:
    """Sum the origins of several parts up."""
    ops: dict[str, list[str]] = {"rule": [], "discovered": [], "replicated": []}
    whole: dict[str, float] = {}
    seconds = unsplit = total = 0.0
    known: dict[tuple[int, tuple[int, ...]], _PartOrigins] = {}
    for part in parts:
        key = id(part.problem), tuple(part.options)
        if key not in known:
            known[key] = _of_part(discovery, part)
        own = known[key]
        for how, names in own.ops.items():
            ops[how] += [part.names.get(name, name) for name in names]
        whole |= {part.names.get(name, name): taken for name, taken in own.whole.items()}
        seconds += own.replicated_seconds
        unsplit, total = unsplit + own.flops[0], total + own.flops[1]
    share = unsplit / total if total else 0.0
    return ChoiceOrigins(
        len(ops["rule"]), len(ops["discovered"]), tuple(ops["replicated"]), seconds, share, whole
    )


def _of_part(discovery: Discovery, part: SolvedPart) -> _PartOrigins:
    ops: dict[str, list[str]] = {"rule": [], "discovered": [], "replicated": []}
    seconds, problem = 0.0, part.problem
    whole: dict[str, float] = {}
    chosen = [n.index.tolist().index(k) for n, k in zip(problem.units, part.options, strict=True)]
    for unit, numbers in zip(problem.space.units, problem.units, strict=True):
        if unit.kind != "op":
            continue
        how = discovery.find(problem.space.graph.nodes[unit.name]).how
        ops[how] += unit.members
        own = float(numbers.seconds[chosen[unit.index]])
        if how == "replicated":
            seconds += own
        if unit.only_whole and math.prod(problem.mesh.shape) > 1:
            sent = _sent_seconds(problem, chosen, unit.index)
            whole |= dict.fromkeys(unit.members, (own + sent) / len(unit.members))
    return _PartOrigins(ops, seconds, whole, _replicated_flops(problem, part.options))


def _sent_seconds(problem: FeatureProblem, chosen: Sequence[int], unit: int) -> float:
    """Sum the seconds of the bridges to and from a unit."""
    return math.fsum(
        bridge_seconds(problem, wire, wire_table(problem, w), chosen)
        for w, wire in enumerate(problem.space.wires)
        if wire.producer == unit or any(reader == unit for reader, _ in wire.readers)
    )


def _replicated_flops(problem: FeatureProblem, options: Sequence[int]) -> tuple[float, float]:
    """FLOPs of matrix products, convolutions and attention: in ops that some axis does not split, and in all."""
    costs = problem.space.costs.exact(problem.samples)
    table = costs.at(problem.samples)
    flops = table.forward_flops + table.backward_input_flops + table.backward_weight_flops
    ranks = math.prod(problem.mesh.shape)
    total = whole = 0.0
    for unit, numbers, option in zip(problem.space.units, problem.units, options, strict=True):
        if unit.kind != "op" or not isinstance(numbers.detail, Options):
            continue
        index = problem.space.op_index[unit.name]
        if costs.op_class(index) == "memory":
            continue
        own = float(flops[index]) * len(unit.members)
        total += own
        whole += own if numbers.detail.work_share[option] > 1.001 / ranks else 0.0
    return whole, total
