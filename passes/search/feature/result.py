"""The placement that a solved feature-wise problem chose, and the share of the work that it replicates."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cost_models.layout import Replicate
from passes.search.feature.graph import leaving_name
from passes.search.feature.options import Options
from passes.search.feature.problem import FeatureProblem
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


def replicated_share(problem: FeatureProblem, options: Sequence[int]) -> float:
    """Share of the FLOPs of matrix products, convolutions and attention in ops that some axis does not split."""
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
    return whole / total if total else 0.0
