"""The placement that a solved feature-wise problem chose, where its choices come from, and the work that it replicates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cost_models.layout import Replicate
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


def origins_of(discovery: Discovery, parts: Sequence[SolvedPart]) -> ChoiceOrigins:
    """Sum the origins of several parts up."""
    ops: dict[str, list[str]] = {"rule": [], "discovered": [], "replicated": []}
    seconds = whole = total = 0.0
    known: dict[tuple[int, tuple[int, ...]], tuple[dict[str, list[str]], float, float, float]] = {}
    for part in parts:
        key = id(part.problem), tuple(part.options)
        if key not in known:
            known[key] = _of_part(discovery, part)
        own, its_seconds, its_whole, its_total = known[key]
        for how, names in own.items():
            ops[how] += [part.names.get(name, name) for name in names]
        seconds, whole, total = seconds + its_seconds, whole + its_whole, total + its_total
    share = whole / total if total else 0.0
    return ChoiceOrigins(len(ops["rule"]), len(ops["discovered"]), tuple(ops["replicated"]), seconds, share)


def _of_part(discovery: Discovery, part: SolvedPart) -> tuple[dict[str, list[str]], float, float, float]:
    """Return ops by origin, seconds of those that are replicated, FLOPs of products not split by some axis, and of all."""
    ops: dict[str, list[str]] = {"rule": [], "discovered": [], "replicated": []}
    seconds, problem = 0.0, part.problem
    for unit, numbers, option in zip(problem.space.units, problem.units, part.options, strict=True):
        if unit.kind == "op":
            how = discovery.find(problem.space.graph.nodes[unit.name]).how
            ops[how] += unit.members
            if how == "replicated":
                seconds += float(numbers.seconds[numbers.index.tolist().index(option)])
    return (ops, seconds, *_replicated_flops(problem, part.options))


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
