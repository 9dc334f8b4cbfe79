"""From a saved plan back to segments and programs: the same ones that were predicted and proved.

The plan holds the stages' costs, so every rank rebuilds the same programs without searching or costing again.
"""

from __future__ import annotations

from dataclasses import dataclass

from cost_models.errors import PlanError
from partitioner.plan import Plan
from passes.compile import programs_for
from passes.graph import OpGraph
from passes.lower import crossing_values, value_spec
from passes.segment import Segmentation, by_stage
from passes.summarize import TiedGroup, tied_groups
from runtime.check import Proof, check
from runtime.program import Program, Segment, SegmentCost, SegmentGraph, Value


@dataclass(frozen=True)
class Rebuilt:
    """Everything of a plan that running it needs, checked."""

    segmentation: Segmentation
    segments: SegmentGraph
    tied: tuple[TiedGroup, ...]
    programs: tuple[Program, ...]
    proof: Proof


def rebuild(plan: Plan, graph: OpGraph, *, same_numbers: bool = True) -> Rebuilt:
    """Rebuild and check the plan's programs for ``graph``.

    ``same_numbers=False`` accepts a graph that differs in data types only (verification runs in float64).
    Raises PlanError when the plan is for another model.
    """
    refuse_other_model(plan, graph, same_numbers=same_numbers)
    stage_of = {op: index for index, stage in enumerate(plan.stages) for op in stage.ops}
    ranks = [stage.devices[0] for stage in plan.stages]
    segmentation = by_stage(graph, stage_of, ranks, frozenset(plan.recomputed))
    segments = _segment_graph(plan, graph, segmentation)
    tied = tied_groups(graph, segmentation)
    programs = programs_for(segments, plan.cluster, plan.schedule, plan.microbatches, tied)
    proof = check(
        programs, segments, plan.microbatches, tied=[(group.parameters, group.ranks) for group in tied]
    )
    return Rebuilt(segmentation, segments, tied, programs, proof)


def refuse_other_model(plan: Plan, graph: OpGraph, *, same_numbers: bool = True) -> None:
    """Raise PlanError listing how ``graph`` differs from the model the plan was made for."""
    planned = set(plan.placements) | set(plan.recomputed)
    traced = {node.name for node in graph.ops}
    differences = []
    if planned != traced:
        missing, extra = sorted(planned - traced), sorted(traced - planned)
        if missing:
            differences.append(
                f"{len(missing)} planned ops are not in the model, such as {', '.join(missing[:3])}"
            )
        if extra:
            differences.append(
                f"{len(extra)} ops of the model are not in the plan, such as {', '.join(extra[:3])}"
            )
    if same_numbers and graph.fingerprint != plan.model.fingerprint:
        differences.append(
            f"fingerprint {graph.fingerprint[:12]} differs from the plan's {plan.model.fingerprint[:12]} "
            "(ops, shapes, data types and parameter names count)"
        )
        count = sum(_elements(spec.shape) for spec in graph.parameters.values())
        if count != plan.model.parameters:
            differences.append(
                f"the model has {count:,} parameters, the plan's has {plan.model.parameters:,}"
            )
    if differences:
        raise PlanError(
            f"the plan for {plan.model.name} does not fit {graph.model_name}",
            because=differences,
            suggestions=[
                "plan this model anew",
                "give the model, sequence length and data type the plan was made with",
            ],
        )


def _segment_graph(plan: Plan, graph: OpGraph, segmentation: Segmentation) -> SegmentGraph:
    microbatch_size = -(-plan.batch_size // plan.microbatches)
    symbols = {symbol: 0 for symbol in graph.batch.symbols}
    for symbol, (leaf, dim) in graph.batch.symbols.items():
        symbols[symbol] = graph.example_shapes[leaf][dim]
    symbols[graph.batch.batch_symbol] = microbatch_size
    values = []
    for name, consumers in crossing_values(graph, segmentation).items():
        spec = value_spec(graph, name)
        size_bytes = _elements(spec.concrete(symbols)) * spec.dtype.itemsize
        producer = segmentation.segment_of[name]
        values.append(Value(name, producer, consumers, size_bytes, name in graph.needs_grad))
    owing = {v.producer for v in values if v.needs_grad} | {
        c for v in values if v.needs_grad for c in v.consumers
    }
    owing |= {segment for op, segment in segmentation.segment_of.items() if op in graph.needs_grad}
    segments = tuple(
        Segment(
            index,
            tuple(stage.devices),
            SegmentCost(
                stage.forward_seconds,
                stage.backward_seconds - stage.backward_weight_seconds,
                stage.backward_weight_seconds,
                stage.saved_bytes,
                stage.weight_saved_bytes,
            ),
            has_backward=index in owing,
        )
        for index, stage in enumerate(plan.stages)
    )
    return SegmentGraph(segments, tuple(values), plan.cluster.world_size)


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
