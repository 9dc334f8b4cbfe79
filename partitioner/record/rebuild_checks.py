"""Checks of a plan against the model itself: a plan that would train other numbers is refused.

A plan file holds what crosses between stages and whose gradients are summed, so that it can be simulated without the model.
Whoever runs it has the model, and looks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from cost_models.errors import PlanError
from cost_models.units import listed
from passes.graph.graph import OpGraph
from passes.graph.recomputed import recomputed_ops
from passes.graph.state import colocated
from passes.lower.lower import crossing_values, value_spec
from passes.lower.segment import Segmentation
from passes.lower.summarize import tied_groups

if TYPE_CHECKING:
    from partitioner.record.data import PlanData

MOST_REPORTED = 8


def refuse_wrong_stages(plan: PlanData, graph: OpGraph) -> None:
    """Raise PlanError where the plan's stages would not compute what ``graph`` does.

    ``graph``: the model's, with the ops in blocks that the plan has in blocks.
    """
    stage_of = {op: index for index, stage in enumerate(plan.stages) for op in stage.ops}
    problems = [*_misplaced(plan, graph, stage_of)]
    if not problems:
        ranks = tuple(stage.devices for stage in plan.stages)
        segmentation = Segmentation(stage_of, ranks, frozenset(plan.recomputed))
        problems = [*_values(plan, graph, segmentation), *_tied(plan, graph, segmentation)]
        problems += [] if problems else [*_extents(plan, graph)]
    if problems:
        more = [f"… and {len(problems) - MOST_REPORTED} more"] if len(problems) > MOST_REPORTED else []
        raise PlanError(
            f"the plan for {plan.model.name} would not compute what the model does",
            [*problems[:MOST_REPORTED], *more],
            ["plan this model anew; plans are not meant to be edited"],
        )


def _misplaced(plan: PlanData, graph: OpGraph, stage_of: dict[str, int]) -> Iterator[str]:
    """Name ops that read from later stages, that must be together and are not, that may not run more than once."""
    for node in graph.ops:
        for user in node.users:
            if stage_of.get(user.name, len(plan.stages)) < stage_of.get(node.name, 0):
                yield (
                    f"{user.name} in stage {stage_of[user.name]} reads {node.name} of the later stage {stage_of[node.name]}"
                )
    for group in colocated(graph):
        stages = sorted({stage_of[op] for op in group if op in stage_of})
        if len(stages) > 1:
            yield f"{', '.join(sorted(group)[:3])} must share a stage, and are in {listed(stages)}"
    costly = sorted(set(plan.recomputed) - recomputed_ops(graph))
    if costly:
        yield f"{listed(costly[:3])} may not be computed by every stage for itself"


def _values(plan: PlanData, graph: OpGraph, segmentation: Segmentation) -> Iterator[str]:
    """Compare what crosses between stages."""
    needed = {
        name: (segmentation.segment_of[name], consumers, name in graph.needs_grad)
        for name, consumers in crossing_values(graph, segmentation).items()
    }
    planned = {v.name: (v.producer, tuple(sorted(v.consumers)), v.needs_grad) for v in plan.values}
    for name in sorted(needed.keys() | planned.keys()):
        if name not in planned:
            yield f"values: {name} goes from stage {needed[name][0]} to {listed(needed[name][1])}, and is missing"
        elif name not in needed:
            yield f"values: nothing called {name} crosses between stages"
        elif planned[name] != needed[name]:
            (source, targets, gradient), (s, t, g) = needed[name], planned[name]
            yield (
                f"values: {name} goes from stage {source} to {listed(targets)}"
                f"{' and its gradient back' if gradient else ', without a gradient'}; the plan says {s}, {listed(t)}"
                f"{' and back' if g else ', without a gradient'}"
            )


def _extents(plan: PlanData, graph: OpGraph) -> Iterator[str]:
    """Compare the shapes of values between groups of devices: from them follows who sends which piece."""
    samples = plan.microbatch_sizes[0]
    sizes = {**graph.example_sizes, graph.batch.batch_symbol: samples}
    for value in plan.values if any(stage.sharding is not None for stage in plan.stages) else ():
        needed = value_spec(graph, value.name).concrete(sizes)
        if needed != value.shape:
            yield f"values: {value.name} has shape {needed}; the plan says {value.shape}"


def _tied(plan: PlanData, graph: OpGraph, segmentation: Segmentation) -> Iterator[str]:
    """Compare the parameters whose gradients are summed, and the ranks that they are summed over."""
    needed = {name: group.ranks for group in tied_groups(graph, segmentation) for name in group.parameters}
    planned = {tied.name: tuple(sorted(tied.ranks)) for tied in plan.tied}
    for name in sorted(needed.keys() | planned.keys()):
        if needed.get(name) != planned.get(name):
            holders = f"ranks {listed(needed[name])}" if name in needed else "one rank at most"
            says = f"ranks {listed(planned[name])}" if name in planned else "nothing of it"
            yield f"tied: {name} gets its gradient from {holders}; the plan says {says}"
