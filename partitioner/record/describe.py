"""From a compile's outcome to the plan a user keeps: every number with its name, nothing left implicit."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
import torch
from torch import fx

from cost_models.cluster import ClusterSpec
from cost_models.precision import NAMES
from cost_models.units import counted, format_bytes, percent
from partitioner.record.base import package_version
from partitioner.record.data import PlanT
from partitioner.record.describe_sharding import describe_sharding
from partitioner.record.modules import modules_of_stages
from partitioner.record.records import (
    Alternative,
    CertificateRecord,
    ModelInfo,
    Prediction,
    ProofRecord,
    SplitRecord,
    Stage,
    StageValue,
    TiedParameter,
    Transfer,
)
from passes.compile import Compiled, Request
from passes.graph.graph import OpGraph
from passes.lower.summarize import state_names_of_segments
from passes.search.baselines import Baseline, data_parallel, one_device
from passes.search.feature.place import FeatureResult, Tried
from passes.search.layer.options import RecomputeMode
from passes.search.layer.place import LayerRequest, RunnerUp
from passes.search.placed import Placed
from passes.trace.precision import dominant_dtype, precision_notes
from runtime.program.program import Backward, BackwardWeight, Forward, Program, SegmentGraph

NOT_CONSIDERED = {
    "layer": ("data parallelism", "tensor parallelism", "ZeRO sharding"),
    "feature": ("pipeline stages", "recomputing activations", "overlap of communication with computing"),
    "free": ("data parallelism", "ZeRO sharding", "recomputing activations, but in the layer-wise plan"),
    "auto": ("pipeline stages that are sharded inside", "recomputing activations of shards"),
}
"""What a strategy does not look at; an expert should hear it from the plan itself."""
MOST_RUNNER_UPS = 5


def describe(
    kind: type[PlanT], graph: OpGraph, cluster: ClusterSpec, request: Request, compiled: Compiled
) -> PlanT:
    """Write the outcome of a compile down as a plan of class ``kind``."""
    placed, realized = compiled.placed, compiled.placed.realized
    # A free plan that is the layer-wise one may compute blocks again; it was not asked for anything else.
    anew: RecomputeMode = "auto" if any(placed.recomputed_blocks) else "none"
    recompute = request.recompute if isinstance(request, LayerRequest) else anew
    return kind(
        partitioner_version=package_version(),
        model=_model(graph),
        cluster=cluster,
        strategy=placed.strategy,
        batch_size=request.batch_size,
        microbatches=placed.microbatches,
        schedule=placed.schedule,
        optimizer_memory=request.optimizer,
        precision=request.precision,
        loss_reduction=graph.loss_reduction,
        recompute=recompute,
        splits=tuple(SplitRecord(op=s.op, dim=s.dim, sizes=s.sizes) for s in placed.splits),
        stages=_stages(placed.graph, compiled),
        placements={name: placed.groups[stage] for name, stage in placed.stage_of.items()},
        recomputed=tuple(sorted(placed.recomputed)),
        tied=tuple(
            TiedParameter(name=name, ranks=group.ranks, size_bytes=realized.step.tied_bytes[name])
            for group in (realized.tied if placed.sharded is None else ())
            for name in group.parameters
        ),
        values=tuple(
            StageValue(
                name=value.name,
                producer=value.producer,
                consumers=value.consumers,
                size_bytes=value.size_bytes,
                needs_grad=value.needs_grad,
            )
            for value in realized.segments.values
        ),
        transfers=_transfers(compiled),
        state_bytes={str(r): size for r, size in enumerate(realized.step.state_bytes)},
        optimizer_seconds={str(r): s for r, s in enumerate(realized.step.optimizer_seconds)},
        attention_backend=compiled.costs.attention_backend,
        prediction=_prediction(graph, cluster, request, compiled),
        certificate=_certificate(compiled),
        alternatives=_alternatives(graph, cluster, request, compiled),
        not_considered=NOT_CONSIDERED[placed.strategy],
        proof=ProofRecord(
            instructions=compiled.proof.instructions,
            messages=compiled.proof.messages,
            rules=compiled.proof.rules,
        ),
        notes=(*graph.notes, *precision_notes(graph, request.precision), *_notes(graph, recompute)),
    )


def tokens_per_sample(graph: OpGraph) -> int | None:
    """Token ids per sample; None if the model has no embedding of them."""
    leaf = token_leaf(graph)
    if leaf is None:
        return None
    shape, dim = graph.example_shapes[leaf], graph.batch.batch_dims[leaf]
    return None if dim is None else math.prod(shape) // shape[dim]


def token_leaf(graph: OpGraph) -> str | None:
    """The first input that an embedding looks up: the token ids of a sample; None if there is none."""
    nodes = {i.name: i.node for i in graph.inputs if i.kind == "batch"}
    for name, shape in graph.example_shapes.items():
        dim = graph.batch.batch_dims.get(name)
        if dim is not None and len(shape) > 1 and name in nodes and _looked_up(graph.nodes[nodes[name]]):
            return name
    return None


def _looked_up(node: fx.Node) -> bool:
    """Whether an embedding reads the input, directly or after other integer ops (shifted labels, say)."""
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


def _model(graph: OpGraph) -> ModelInfo:
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


def _stages(graph: OpGraph, compiled: Compiled) -> tuple[Stage, ...]:
    placed, realized = compiled.placed, compiled.placed.realized
    paths = {node.name: str(node.meta.get("module_path", "")) for node in graph.ops}
    ordered = {node.name: placed.stage_of[node.name] for node in graph.ops if node.name in placed.stage_of}
    modules = modules_of_stages(paths, ordered, len(placed.groups))
    local = graph if placed.sharded is None else placed.sharded.graph
    names = state_names_of_segments(local, realized.segmentation)
    flying = _in_flight(realized.programs, realized.segments)
    ops: list[list[str]] = [[] for _ in placed.groups]
    for name, stage in ordered.items():
        ops[stage].append(name)
    blocks = placed.recomputed_blocks
    stages = []
    for segment in realized.segments.segments:
        cost = segment.cost
        parameters = [local.parameters[name] for name in names[segment.index] if name in local.parameters]
        stages.append(
            Stage(
                devices=segment.ranks,
                ops=tuple(ops[segment.index]),
                modules=modules[segment.index],
                parameter_bytes=sum(spec.size_bytes for spec in parameters),
                forward_seconds=cost.forward_seconds,
                backward_seconds=cost.backward_seconds,
                backward_input_seconds=cost.backward_input_seconds,
                backward_weight_seconds=cost.backward_weight_seconds,
                saved_bytes=cost.saved_bytes,
                weight_saved_bytes=cost.weight_saved_bytes,
                recomputed_blocks=blocks[segment.index] if blocks else (),
                transient_bytes=cost.transient_bytes,
                has_backward=segment.has_backward,
                sharding=describe_sharding(graph, compiled.costs, placed)
                if placed.sharded is not None
                else None,
                in_flight=flying[segment.index],
            )
        )
    return tuple(stages)


def _in_flight(programs: tuple[Program, ...], segments: SegmentGraph) -> list[int]:
    """Per segment, the most micro-batches at once whose forward is done and whose last backward half is not."""
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


def _transfers(compiled: Compiled) -> tuple[Transfer, ...]:
    size_of = {value.name: value.size_bytes for value in compiled.placed.realized.segments.values}
    return tuple(
        Transfer(
            value=bridge.value,
            kind=bridge.kind,
            source=bridge.source.ranks[0],
            target=bridge.target.ranks[0],
            size_bytes=size_of[bridge.value],
            gradient=bridge.needs_grad,
        )
        for bridge in compiled.placed.bridges
    )


def _prediction(graph: OpGraph, cluster: ClusterSpec, request: Request, compiled: Compiled) -> Prediction:
    simulation = compiled.placed.realized.simulation
    step = simulation.step_seconds
    tokens = tokens_per_sample(graph)
    return Prediction(
        step_seconds=step,
        samples_per_second=request.batch_size / step,
        tokens_per_second=None if tokens is None else tokens * request.batch_size / step,
        mfu=_mfu(graph, cluster, request, compiled),
        bubble_fraction=simulation.bubble_fraction,
        peak_memory_bytes={str(rank): int(peak) for rank, peak in enumerate(simulation.peak_bytes)},
        communication_bytes=int(sum(simulation.pair_bytes.values())),
        messages=simulation.message_count,
        collectives=_collectives(compiled.placed),
        confidence=cluster.provenance,
    )


def _collectives(placed: Placed) -> int:
    """Collectives of a step: inside of segments, sums of gradients, what is gathered after the update."""
    realized = placed.realized
    inside = sum(len(segment.collectives) for segment in realized.segments.segments)
    return inside * placed.microbatches + len(realized.tied) + len(realized.step.gathers)


def _certificate(compiled: Compiled) -> CertificateRecord:
    found = compiled.placed.certificate
    return CertificateRecord(
        objective=found.objective,
        objective_seconds=found.objective_seconds,
        bound_seconds=found.bound_seconds,
        gap=found.gap,
        simulated_lower_bound_seconds=found.simulated_lower_bound_seconds,
        space=_well_counted(found.space),
        method=found.method,
        solver_status=found.solver_status,
        search_seconds=found.search_seconds,
    )


def _mfu(graph: OpGraph, cluster: ClusterSpec, request: Request, compiled: Compiled) -> float | None:
    """Model FLOPs utilisation: FLOPs of forward and backward over step time times the used devices' peak rates."""
    table = compiled.costs.at(request.batch_size)
    flops = float(np.sum(table.forward_flops + table.backward_input_flops + table.backward_weight_flops))
    own = dominant_dtype(graph)
    if not flops or own is None:
        return None
    dtype = request.precision.of(own).leaf
    ranks = {rank for stage in compiled.placed.realized.segments.segments for rank in stage.ranks}
    peak = sum(cluster.devices[rank].peak_flops(dtype) for rank in ranks)
    return flops / (compiled.placed.realized.simulation.step_seconds * peak)


def _alternatives(
    graph: OpGraph, cluster: ClusterSpec, request: Request, compiled: Compiled
) -> tuple[Alternative, ...]:
    """Not partitioning at all, and the best other layer-wise plans."""
    others = [_baseline(one_device(graph, compiled.costs, cluster, request), "")]
    if cluster.world_size > 1:
        replicas = data_parallel(graph, compiled.costs, cluster, request)
        others.append(_baseline(replicas, " on each device"))
    others += [
        Alternative(
            strategy=_well_counted(entry.description),
            feasible=entry.feasible,
            reason=_readable_sizes(entry.reason),
            step_seconds=entry.step_seconds,
            peak_memory_bytes=entry.peak_memory_bytes,
        )
        for entry in distinct_runner_ups(compiled.placed.runner_ups)
    ]
    if isinstance(compiled.placed.search, FeatureResult):
        others += _other_meshes(compiled.placed.search)
    return tuple(others)


def _other_meshes(search: FeatureResult) -> list[Alternative]:
    """The best of each other mesh and number of micro-batches, as far as the search looked: by its own count of seconds."""
    chosen = (search.placement.mesh.shape, search.placement.microbatches)
    own = search.cost.seconds
    best: dict[tuple[tuple[int, ...], int], Tried] = {}
    for tried in sorted(search.tried, key=_at_least):
        best.setdefault((tried.shape, tried.microbatches), tried)
    best.pop(chosen, None)
    return [
        Alternative(
            strategy=f"mesh {'×'.join(map(str, shape))}, {counted(count, 'micro-batch')}",
            feasible=tried.status != "infeasible",
            reason=_why_not(tried, own),
            step_seconds=None,
            peak_memory_bytes=None,
        )
        for (shape, count), tried in list(best.items())[:MOST_RUNNER_UPS]
    ]


def _at_least(tried: Tried) -> float:
    """Seconds that its best choice takes, or no less than."""
    return tried.seconds if math.isfinite(tried.seconds) else tried.bound_seconds


def _why_not(tried: Tried, own_seconds: float) -> str:
    if tried.status == "infeasible":
        return "does not fit (proved)"
    slower = max(0.0, _at_least(tried) / own_seconds - 1)
    if tried.status == "time limit":
        return "not searched to the end"
    return (
        f"{'' if math.isfinite(tried.seconds) else 'at least '}{percent(slower)} slower by the search's count"
    )


def _baseline(baseline: Baseline, where: str) -> Alternative:
    fits = f"fits in {counted(baseline.microbatches, 'micro-batch')}"
    short = format_bytes(baseline.peak_memory_bytes - baseline.capacity_bytes)
    return Alternative(
        strategy=baseline.strategy,
        feasible=baseline.feasible,
        reason=fits if baseline.feasible else f"does not fit: {short} short{where}",
        step_seconds=baseline.step_seconds,
        peak_memory_bytes=baseline.peak_memory_bytes,
    )


def distinct_runner_ups(runner_ups: Sequence[RunnerUp]) -> list[RunnerUp]:
    """The best of each (schedule, micro-batches), a few: neighbours of one split teach nothing new."""
    best: dict[str, RunnerUp] = {}
    for entry in sorted(runner_ups, key=lambda entry: (not entry.feasible, entry.step_seconds)):
        key = ", ".join(
            entry.description.split(", ")[1:3]
        )  # of "2 stages, 1f1b, 8 micro-batches, 1 stages recompute"
        best.setdefault(key, entry)
    return list(best.values())[:MOST_RUNNER_UPS]


def _well_counted(description: str) -> str:
    """ "1 stages, 1f1b, 1 micro-batches" -> "1 stage, 1f1b, 1 micro-batch"."""
    return re.sub(r"\b1 (stage|micro-batch)(?:es|s)\b", r"1 \1", description)


def _readable_sizes(reason: str) -> str:
    """ "exceeds a device by 1,048,576 bytes" -> "exceeds a device by 1.00 MiB"."""
    return re.sub(r"([\d,]+) bytes", lambda size: format_bytes(int(size[1].replace(",", ""))), reason)


def _notes(graph: OpGraph, recompute: str) -> tuple[str, ...]:
    """What a user must know about the semantics of this model's training."""
    notes = []
    if not any(spec.requires_grad for spec in graph.parameters.values()):
        notes.append("nothing is trained: no parameter requires a gradient")
    elif not graph.needs_grad:
        notes.append("nothing is trained: the loss reaches no parameter through differentiable operations")
    if graph.checkpointing and recompute == "full":
        notes.append(f"{graph.checkpointing}: every block is computed again in backward")
    elif graph.checkpointing:
        notes.append(f"{graph.checkpointing}, but recompute {recompute!r} was asked for, and that is done")
    batch_norms = sum(1 for node in graph.ops if "batch_norm" in str(node.target))
    if batch_norms:
        notes.append(
            f"{counted(batch_norms, 'batch norm')}: statistics of one micro-batch at a time; running ones advance with each"
        )
    return tuple(notes)
