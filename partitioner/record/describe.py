"""The way from a compile's outcome to the plan a user keeps: every number with its name, nothing left implicit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import numpy as np
import torch
from torch import fx

from cost_models.cluster import ClusterSpec
from cost_models.devices import RUN_KINDS
from cost_models.precision import NAMES
from cost_models.room import FILLS
from cost_models.units import format_bytes, listed, percent
from partitioner.record.data import PlanT
from partitioner.record.describe_outline import describe_outline, describe_state, op_amounts
from partitioner.record.describe_sharding import describe_sharding, even_batches, whole_ops
from partitioner.record.file import package_version
from partitioner.record.modules import modules_of_stages
from partitioner.record.records import (
    MemoryPart,
    ModelInfo,
    Prediction,
    ProofRecord,
    RiskRecord,
    Stage,
    StageValue,
    TiedParameter,
    ViewRecord,
)
from passes.compile import Compiled
from passes.costs.unknown import unknown_costs
from passes.graph.graph import OpGraph
from passes.lower.candidate import Candidate
from passes.lower.lower import value_spec
from passes.lower.summarize import state_names_of_segments
from passes.search.certificate import Alternative
from passes.search.outcome import Label, MeshTried, Outcome, RunnerUp
from passes.search.request import Request
from passes.search.words import STRATEGY_WORDS, RecomputeMode
from passes.shard.couplings import couplings, said
from passes.trace.precision import dominant_dtype, precision_notes
from runtime.program.program import Backward, BackwardWeight, Forward, Program, SegmentGraph, Value
from runtime.simulate.simulation import Simulation

MOST_RUNNER_UPS = 5


def describe(kind: type[PlanT], graph: OpGraph, cluster: ClusterSpec, compiled: Compiled) -> PlanT:
    """Write the outcome of a compile down as a plan of class ``kind``."""
    request, outcome, realized = compiled.request, compiled.outcome, compiled.realized
    job, candidate = request.job, outcome.best.candidate
    recompute = _recompute(request, candidate)
    sizes = job.sizes(candidate.microbatches)
    on_meshes = {name for mesh in realized.meshes.values() for item in mesh.sums for name in item.parameters}
    return kind(
        partitioner_version=package_version(),
        model=model_info(graph),
        cluster=cluster,
        strategy=request.strategy,
        batch_size=job.batch_size,
        microbatches=candidate.microbatches,
        schedule=candidate.schedule,
        one_queue=candidate.one_queue,
        optimizer_memory=job.optimizer,
        precision=job.precision,
        loss_reduction=graph.loss_reduction,
        opaque=graph.opaque,
        recompute=recompute,
        splits=outcome.splits,
        stages=_stages(compiled),
        # On shards, what every rank computes for itself is not told apart.
        recomputed=tuple(sorted(realized.segmentation.recomputed)),
        tied=tuple(
            TiedParameter(name=name, ranks=group.ranks, size_bytes=realized.step.tied_bytes[name])
            for group in realized.tied
            for name in group.parameters
            if name not in on_meshes
        ),
        views=tuple(ViewRecord(name=n, owner=v.owner, view=str(v)) for n, v in sorted(graph.views.items())),
        values=tuple(_value(compiled, value, sizes[0]) for value in realized.segments.values),
        transfers=compiled.bridges,
        state_bytes={str(r): size for r, size in enumerate(realized.step.state_bytes)},
        state_parts=describe_state(realized.state),
        optimizer_seconds={str(r): s for r, s in enumerate(realized.step.optimizer_seconds)},
        update_bytes={str(r): size for r, size in enumerate(realized.step.update_bytes)},
        attention_backend=compiled.costs.attention_backend,
        prediction=_prediction(graph, cluster, compiled),
        risk=_risk(outcome, job.risk),
        certificate=outcome.certificate,
        alternatives=_alternatives(compiled),
        not_considered=STRATEGY_WORDS[request.strategy].not_considered,
        proof=ProofRecord.model_validate(compiled.proof, from_attributes=True),
        notes=(
            *graph.notes,
            *precision_notes(graph, job.precision),
            *_notes(graph, recompute, sizes),
            *unknown_costs(graph, compiled.costs),
            *whole_ops(compiled),
            *even_batches(compiled, cluster),
            *_planned_only(cluster),
        ),
        outline=describe_outline(
            outcome.judge.graph, sizes[0], op_amounts(outcome.judge.costs, sizes[0], cluster.devices[0])
        ),
    )


def tokens_per_sample(graph: OpGraph) -> int | None:
    """Count token ids per sample; None if the model has no embedding of them."""
    leaf = token_leaf(graph)
    if leaf is None:
        return None
    shape, dim = graph.example_shapes[leaf], graph.batch.batch_dims[leaf]
    return None if dim is None else math.prod(shape) // shape[dim]


def token_leaf(graph: OpGraph) -> str | None:
    """Find the first input that an embedding looks up: the token ids of a sample; None if there is none."""
    nodes = {i.name: i.node for i in graph.inputs if i.kind == "batch"}
    for name, shape in graph.example_shapes.items():
        dim = graph.batch.batch_dims.get(name)
        if dim is not None and len(shape) > 1 and name in nodes and _looked_up(graph.nodes[nodes[name]]):
            return name
    return None


def _looked_up(node: fx.Node) -> bool:
    """Tell whether an embedding reads the input, directly or after other integer ops (shifted labels, say)."""
    waiting, seen = [node], {node}
    while waiting:
        value = waiting.pop()
        for user in value.users:
            if user.target is torch.ops.aten.embedding.default and user.args[1] is value:
                return True
            result = user.meta.get("val")
            if isinstance(result, torch.Tensor) and not result.is_floating_point() and user not in seen:
                seen.add(user)
                waiting.append(user)
    return False


def model_info(graph: OpGraph) -> ModelInfo:
    """Describe the model of a trace."""
    sizes = {name: math.prod(spec.shape) for name, spec in graph.parameters.items()}
    dtype = dominant_dtype(graph)
    return ModelInfo(
        name=graph.model_name,
        fingerprint=graph.fingerprint,
        parameters=sum(sizes.values()),
        parameter_bytes=sum(spec.size_bytes for spec in graph.parameters.values()),
        dtype=None if dtype is None else NAMES.get(dtype, str(dtype)),
        trainable_parameters=sum(
            sizes[name] for name, spec in graph.parameters.items() if spec.requires_grad
        ),
        ops=len(graph),
    )


def _stages(compiled: Compiled) -> tuple[Stage, ...]:
    graph, realized, candidate = (
        compiled.outcome.judge.graph,
        compiled.realized,
        compiled.outcome.best.candidate,
    )
    paths = {node.name: str(node.meta.get("module_path", "")) for node in graph.ops}
    ordered = {
        node.name: realized.stage_of[node.name] for node in graph.ops if node.name in realized.stage_of
    }
    modules = modules_of_stages(paths, ordered, len(realized.groups))
    names = state_names_of_segments(graph, realized.segmentation)
    flying = _in_flight(realized.groups_programs.programs, realized.segments)
    ops: list[list[str]] = [[] for _ in realized.groups]
    for name, stage in ordered.items():
        ops[stage].append(name)
    blocks, shared = candidate.recomputed_blocks, candidate.shardings
    stages = []
    for segment in realized.segments.segments:
        mesh = realized.meshes.get(segment.index)
        specs = graph.parameters if mesh is None else mesh.parameters
        parameters = [specs[name] for name in names[segment.index] if name in specs]
        stages.append(
            Stage(
                devices=segment.ranks,
                ops=tuple(ops[segment.index]),
                modules=modules[segment.index],
                parameter_bytes=sum(spec.size_bytes for spec in parameters),
                **asdict(segment.cost),
                backward_seconds=segment.cost.backward_seconds,
                recomputed_blocks=blocks[segment.index] if blocks else (),
                has_backward=segment.has_backward,
                sharding=describe_sharding(compiled, segment.index) if segment.index in shared else None,
                in_flight=flying[segment.index],
            )
        )
    return tuple(stages)


def _value(compiled: Compiled, value: Value, samples: int) -> StageValue:
    """Record a value between stages, for micro-batches of ``samples``."""
    graph = compiled.outcome.judge.graph
    spec = value_spec(graph, value.name)
    return StageValue(
        name=value.name,
        producer=value.producer,
        consumers=value.consumers,
        size_bytes=value.size_bytes,
        needs_grad=value.needs_grad,
        shape=spec.concrete({**graph.example_sizes, graph.batch.batch_symbol: samples}),
        element_bytes=spec.dtype.itemsize,
    )


def _in_flight(programs: tuple[Program, ...], segments: SegmentGraph) -> list[int]:
    """Count, per segment, the most micro-batches at once whose forward is done and whose last backward half is not."""
    most = [0] * len(segments.segments)
    for rank in dict.fromkeys(segment.rank for segment in segments.segments):
        now = [0] * len(most)
        for instruction in programs[rank].instructions:
            if isinstance(instruction, Forward):
                now[instruction.segment] += 1
                most[instruction.segment] = max(most[instruction.segment], now[instruction.segment])
            elif isinstance(instruction, Backward | BackwardWeight):
                now[instruction.segment] -= 1
    return most


def _prediction(graph: OpGraph, cluster: ClusterSpec, compiled: Compiled) -> Prediction:
    simulation, batch_size = compiled.realized.simulation, compiled.request.job.batch_size
    step = simulation.step_seconds
    ranks = {rank for stage in compiled.realized.segments.segments for rank in stage.ranks}
    tokens = tokens_per_sample(graph)
    return Prediction(
        step_seconds=step,
        samples_per_second=batch_size / step,
        tokens_per_second=None if tokens is None else tokens * batch_size / step,
        mfu=_mfu(graph, cluster, compiled, ranks),
        bubble_fraction=simulation.bubble_fraction,
        peak_memory_bytes={str(rank): int(peak) for rank, peak in enumerate(simulation.peak_bytes)},
        beside_tensors=_beside_tensors(simulation),
        communication_bytes=int(sum(simulation.pair_bytes.values())),
        messages=simulation.message_count,
        collectives=_collectives(compiled),
        confidence=cluster.origin(ranks).text,
    )


def _risk(outcome: Outcome, allowed: float) -> RiskRecord:
    """Record the chance of the plan, and what devices it was kept within."""
    assert outcome.best.chance is not None
    rooms = {str(device.rank): device.room_bytes for device in outcome.judge.cluster.devices}
    return RiskRecord(allowed=allowed, chance=outcome.best.chance, room_bytes=rooms)


def _beside_tensors(simulation: Simulation) -> dict[MemoryPart, dict[str, int]]:
    """Return what of each rank's memory is no tensors'; nothing where none of it is, as on CPUs."""
    parts: dict[MemoryPart, dict[str, int]] = {
        "context": {str(rank): own.context for rank, own in enumerate(simulation.process)},
        "communicators": {str(rank): own.communicators for rank, own in enumerate(simulation.process)},
        "allocator": {str(rank): own.allocator for rank, own in enumerate(simulation.process)},
    }
    return parts if any(any(table.values()) for table in parts.values()) else {}


def _collectives(compiled: Compiled) -> int:
    """Count the collectives of a step: inside of segments, sums of gradients, what is gathered after the update."""
    realized, count = compiled.realized, compiled.outcome.best.candidate.microbatches
    inside = sum(len(own.groups) for segment in realized.segments.segments for own in segment.collectives)
    return inside * count + len(realized.tied) + sum(len(own.groups) for own in realized.step.gathers)


def _recompute(request: Request, candidate: Candidate) -> RecomputeMode:
    """Return the recomputation that was asked for; plans of which nothing was asked recompute where they must."""
    asked: RecomputeMode | None = getattr(request, "recompute", None)
    return asked or ("auto" if any(candidate.recomputed_blocks) else "none")


def _mfu(graph: OpGraph, cluster: ClusterSpec, compiled: Compiled, ranks: set[int]) -> float | None:
    """Return model FLOPs utilisation: FLOPs of forward and backward over step time times the peak rates of ``ranks``."""
    table = compiled.costs.at(compiled.request.job.batch_size)
    flops = float(np.sum(table.forward_flops + table.backward_input_flops + table.backward_weight_flops))
    model_dtype = dominant_dtype(graph)
    if not flops or model_dtype is None:
        return None
    dtype = compiled.request.job.precision.of(model_dtype).leaf
    peak = sum(cluster.devices[rank].peak_flops(dtype) for rank in ranks)
    return flops / (compiled.realized.simulation.step_seconds * peak)


def _alternatives(compiled: Compiled) -> tuple[Alternative, ...]:
    """List not partitioning at all, and the best other plans of the strategy."""
    best_seconds = compiled.outcome.best.step_seconds
    others = [
        *compiled.baselines,
        *(
            Alternative(
                str(entry.label),
                entry.fits,
                _why_not_chosen(entry, best_seconds, compiled.request.job.risk),
                entry.step_seconds,
                entry.peak_bytes,
                entry.chance,
            )
            for entry in distinct_runner_ups(compiled.outcome.runner_ups)
        ),
    ]
    if compiled.outcome.details is not None:
        others += _other_meshes(compiled.outcome)
    return tuple(others)


def _why_not_chosen(entry: RunnerUp, best_seconds: float, risk: float) -> str:
    slower = entry.step_seconds / best_seconds - 1 if best_seconds > 0 else 0.0
    if not entry.fits:
        limit = "a device" if risk >= FILLS else "what is safe"
        excess = f"exceeds {limit} by {format_bytes(entry.overflow_bytes)}"
        return f"{excess}, and is {slower:.1%} slower" if entry.named and slower > 0 else excess
    return f"{'at least ' if entry.bounded else ''}{slower:.1%} slower"


def _other_meshes(outcome: Outcome) -> list[Alternative]:
    """List the best of each other mesh and number of micro-batches looked at, by the search's own count of seconds."""
    details, chosen = outcome.details, outcome.label
    assert details is not None
    best: dict[Label, MeshTried] = {}
    for tried in sorted(details.tried, key=_at_least):
        best.setdefault(Label.of_mesh(tried.shape, tried.microbatches), tried)
    return [
        Alternative(str(label), tried.status != "infeasible", _why_not(tried, details.seconds), None, None)
        for label, tried in [pair for pair in best.items() if pair[0] != chosen][:MOST_RUNNER_UPS]
    ]


def _at_least(tried: MeshTried) -> float:
    """Return the seconds that its best choice takes, or a bound below them."""
    return tried.seconds if math.isfinite(tried.seconds) else tried.bound_seconds


def _why_not(tried: MeshTried, own_seconds: float) -> str:
    if tried.status == "infeasible":
        return "does not fit by the search's count"
    slower = max(0.0, _at_least(tried) / own_seconds - 1)
    if tried.status == "time limit":
        return "not searched to the end"
    if slower == 0:
        return "no faster by the search's count"
    least = "" if math.isfinite(tried.seconds) else "at least "
    return f"{least}{percent(slower)} slower by the search's count"


def distinct_runner_ups(runner_ups: Sequence[RunnerUp]) -> list[RunnerUp]:
    """Choose the best of each kind, a few: neighbours of one split teach nothing new."""
    best: dict[object, RunnerUp] = {}
    for entry in sorted(runner_ups, key=lambda entry: (not entry.fits, entry.step_seconds)):
        best.setdefault(entry.label.kind, entry)
    chosen = sorted(best.values(), key=lambda entry: not entry.named)[:MOST_RUNNER_UPS]
    return [entry for entry in best.values() if entry in chosen]


def _planned_only(cluster: ClusterSpec) -> Iterator[str]:
    """Note the kinds of devices on which no plan was ever run."""
    kinds = sorted({device.kind for device in cluster.devices} - RUN_KINDS)
    if kinds:
        yield (
            f"planned for only: no plan was ever run on {listed(kinds)} devices; "
            "their costs are counted by the formulas of CUDA devices, and this plan is not run on them"
        )


def _notes(graph: OpGraph, recompute: str, sizes: Sequence[int]) -> tuple[str, ...]:
    """Note what a user must know about the semantics of this model's training. ``sizes``: samples of each micro-batch."""
    notes = []
    if not any(spec.requires_grad for spec in graph.parameters.values()):
        notes.append("nothing is trained: no parameter requires a gradient")
    elif not graph.needs_grad:
        notes.append("nothing is trained: the loss reaches no parameter through differentiable operations")
    if graph.checkpointing and recompute == "full":
        notes.append(f"{graph.checkpointing}: every block is computed again in backward")
    elif graph.checkpointing:
        notes.append(f"{graph.checkpointing}, but recompute {recompute!r} was asked for, and that is done")
    if len(sizes) > 1:
        notes += said(couplings(graph), sizes[0])
    return tuple(notes)
