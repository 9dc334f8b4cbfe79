"""The evaluation graphs of a deployed model: traced when first needed, placed where training is, kept.

    eval_step(batch)   the model in evaluation mode, and its loss      traced with the plan's own example where the batch
                                                                       is like it, else with the batch
    forward(batch)     the model in evaluation mode, of what the       traced with the batch
                       batch has

A graph serves every batch with the same tensors (of any number of samples) and the same plain values. All ranks make the
same graph at the same call: they compare what they trace before they do.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from cost_models.errors import RankFailureError, UsageError
from partitioner.absent_batch import AbsentBatch, refuse_absent
from partitioner.engine_batch import same_constant
from partitioner.plan import Plan
from passes.batch import flatten_batch, forward_arguments, forward_constants, forward_names
from passes.evaluation_graph import without_writes
from passes.evaluation_outputs import evaluation_outputs
from passes.graph import OpGraph
from passes.inference import inference_programs, inference_segments
from passes.least_samples import least_samples
from passes.lower import lower
from passes.reuse_placement import reuse_placement
from passes.segment import Segmentation
from passes.token_counts import user_leaves
from passes.trace import trace
from passes.verify_graph import verify_graph
from runtime.check import check
from runtime.execute import Executor
from runtime.gather_outputs import OutputPlace
from runtime.loaded import Loaded
from runtime.meeting import Meeting
from runtime.microbatch import microbatch_sizes, mismatch
from runtime.program import Program
from runtime.rank_state import RankState
from runtime.relabel import RankMap, relabelled_programs, relabelled_segments

LossFunction = Callable[..., Any]


@dataclass(frozen=True)
class Deployed:
    """What was deployed on this rank: everything that evaluation graphs are made from."""

    plan: Plan
    model: nn.Module
    loss_fn: LossFunction | None
    example: Any
    """The batch that training was traced with."""
    dynamic_dims: Mapping[str, list[int]] | None
    training: OpGraph
    ranks: RankMap
    executor: Executor
    state: RankState


@dataclass(frozen=True)
class EvaluationGraph:
    """One evaluation graph, ready to run on this rank."""

    graph: OpGraph
    loaded: Loaded
    places: tuple[OutputPlace, ...]
    """The model's outputs."""
    output_names: tuple[str, ...]
    """In the model's own order."""
    metric_names: tuple[str, ...]
    least_samples: tuple[int, str]
    constants: Mapping[str, object]
    """Plain values that it was traced with."""


@dataclass(frozen=True)
class _Given:
    """A batch as evaluation sees it. ``inputs``: what is traced with it; ``read``: leaves that forward gets.

    ``optional``: arguments that forward does not need. Without one, the batch is another one; without any other leaf, it
    is one that this rank did not load wholly.
    """

    inputs: Any
    leaves: Mapping[str, Tensor]
    read: frozenset[str]
    constants: Mapping[str, object]
    optional: frozenset[str]

    def is_like(self, graph: OpGraph, constants: Mapping[str, object]) -> bool:
        """Whether ``graph``, traced with ``constants``, is what this batch would be traced to."""
        spec = user_leaves(graph.batch, graph.token_counts)
        fits = all(
            not mismatch(name, self.leaves[name], leaf)
            if name in self.leaves
            else name.split(".")[0] not in self.optional
            for name, leaf in spec.leaves.items()
        )
        return (
            fits
            and self.read <= spec.batch_dims.keys()
            and self.constants.keys() == constants.keys()
            and all(same_constant(value, constants[name]) for name, value in self.constants.items())
        )


class EvaluationGraphs:
    """Finds the graph for a batch, or makes it (collective then)."""

    def __init__(self, deployed: Deployed) -> None:
        self._deployed = deployed
        self._with_loss: list[EvaluationGraph] = []
        self._without_loss: list[EvaluationGraph] = []

    def for_loss(self, batch: Any) -> tuple[EvaluationGraph, Mapping[str, Tensor]]:
        """The graph that computes the loss of ``batch`` and the model's outputs, and the leaves of the batch."""
        made = self._deployed
        if isinstance(batch, AbsentBatch):
            example = self._given(made.example, made.loss_fn)
            found = self._find(self._with_loss, example, True)
            refuse_absent(found.loaded.leaf_names)
            return found, batch.leaves
        given = self._given(batch, made.loss_fn)
        return self._find(self._with_loss, given, True), given.leaves

    def without_loss(self, batch: Any) -> tuple[EvaluationGraph, Mapping[str, Tensor]]:
        """The graph that computes the model's outputs from those parts of ``batch`` that forward takes."""
        if isinstance(batch, AbsentBatch):
            raise UsageError(
                "forward needs the batch on every rank",
                ["this rank did not load it"],
                ["engine.dataloader(..., everywhere=True) loads every batch on every rank"],
            )
        made = self._deployed
        args, kwargs = forward_arguments(made.model, batch, made.loss_fn is not None)
        given = self._given(kwargs or args, None)
        return self._find(self._without_loss, given, False), given.leaves

    def _given(self, batch: Any, loss_fn: LossFunction | None) -> _Given:
        model, has_loss_fn = self._deployed.model, loss_fn is not None
        names = forward_names(model)
        args, kwargs = forward_arguments(model, batch, has_loss_fn, partial=True)
        parameters = inspect.signature(model.forward).parameters.values()
        return _Given(
            batch,
            flatten_batch(batch, names),
            frozenset(flatten_batch(kwargs or args, names)),
            forward_constants(model, batch, has_loss_fn, partial=True),
            frozenset(p.name for p in parameters if p.default is not inspect.Parameter.empty),
        )

    def _find(self, known: list[EvaluationGraph], given: _Given, with_loss: bool) -> EvaluationGraph:
        for found in reversed(known):
            if given.is_like(found.graph, found.constants):
                return found
        source = given
        if with_loss:
            example = self._given(self._deployed.example, self._deployed.loss_fn)
            # Ranks that did not load the batch know the example only.
            if given.is_like(self._deployed.training, example.constants):
                source = example
        known.append(self._make(source, with_loss, same_everywhere=source is not given))
        return known[-1]

    def _make(self, given: _Given, with_loss: bool, *, same_everywhere: bool) -> EvaluationGraph:
        meeting = Meeting.join()
        signature = "the plan's example" if same_everywhere else _signature(given)
        limit = self._deployed.executor.timeout_seconds
        try:
            differences = meeting.decide("batch to trace", [with_loss, signature], _differences, limit)
        except RankFailureError as error:
            raise RankFailureError(error.what, error.because, [error.suggestions[0], *_ALONE]) from error
        if differences:
            raise UsageError(
                "ranks cannot agree on what to evaluate",
                differences,
                ["call eval_step and forward on every rank, with the same batch"],
            )
        with meeting.all_or_none("evaluation"):
            made = _traced(self._deployed, given, with_loss)
        return _loaded(self._deployed, *made, given)


_ALONE = (
    "call eval_step and forward on every rank, with the same batch",
    "a batch unlike the plan's example is traced, by every rank: engine.dataloader(..., everywhere=True) loads it there",
)


def _signature(given: _Given) -> str:
    leaves = [f"{name}: {tuple(leaf.shape)} {leaf.dtype}" for name, leaf in sorted(given.leaves.items())]
    constants = [f"{name}={value!r}" for name, value in sorted(given.constants.items())]
    return ", ".join((*leaves, *constants))


def _differences(said: list[Any]) -> list[str]:
    """What ranks say that is not what rank 0 says."""
    texts = [f"{'eval_step' if with_loss else 'forward'} of a batch of {what}" for with_loss, what in said]
    if len(set(texts)) == 1:
        return []
    return [f"rank {rank}: {text}" for rank, text in enumerate(texts)]


# --------------------------------------------------------------------------------------------------
# From a batch to a graph that this rank can run


def _traced(deployed: Deployed, given: _Given, with_loss: bool) -> tuple[OpGraph, Segmentation]:
    """The placed evaluation graph; its segments on the devices of the plan."""
    training, plan = deployed.training, deployed.plan
    dims = user_leaves(training.batch, training.token_counts).batch_dims
    known = {name: dim for name, dim in dims.items() if name in given.leaves}
    graph = trace(
        deployed.model,
        given.inputs,
        loss_fn=deployed.loss_fn if with_loss else None,
        training=False,
        batch_dims=known if any(dim is not None for dim in known.values()) else None,
        dynamic_dims=_open_dims(deployed.dynamic_dims, given.leaves),
        precision=plan.precision,
        loss_reduction=training.loss_reduction if with_loss else None,
        name=plan.model.name,
    )
    if with_loss and graph.loss is None:
        raise UsageError(
            f"{plan.model.name} computes no loss of this batch in evaluation mode",
            [f"the batch has {', '.join(given.leaves)}"],
            ["give it labels", "pass loss_fn to deploy", "engine.forward(batch) needs no loss"],
        )
    stage_of = {op: index for index, stage in enumerate(plan.stages) for op in stage.ops}
    devices = deployed.ranks.device_of_rank
    holders = {name: {devices[rank] for rank in ranks} for name, ranks in deployed.state.holders.items()}
    reused = reuse_placement(
        training, stage_of, without_writes(graph), [stage.devices[0] for stage in plan.stages], holders
    )
    verify_graph(reused.graph, after="reuse_placement")
    return reused.graph, reused.segmentation


def _open_dims(
    dynamic_dims: Mapping[str, list[int]] | None, leaves: Mapping[str, Tensor]
) -> dict[str, list[int]]:
    """``dynamic_dims`` as far as the batch has these tensors; a size of 1 cannot be left open."""
    return {
        name: [dim for dim in dims if leaves[name].shape[dim] > 1]
        for name, dims in (dynamic_dims or {}).items()
        if name in leaves
    }


def _loaded(deployed: Deployed, graph: OpGraph, segmentation: Segmentation, given: _Given) -> EvaluationGraph:
    """Programs and code, in the executor. Collective."""
    plan, ranks, state, executor = deployed.plan, deployed.ranks, deployed.state, deployed.executor
    sizes = microbatch_sizes(plan.batch_size, plan.microbatches)
    op_seconds = sum(stage.forward_seconds for stage in plan.stages) / max(1, plan.model.ops)
    planned = inference_segments(graph, segmentation, plan.cluster.world_size, sizes[0], op_seconds)
    segments = relabelled_segments(planned, ranks)

    def programs_of(microbatches: int) -> Sequence[Program]:
        programs = relabelled_programs(inference_programs(planned, plan.cluster, microbatches), ranks)
        check(programs, segments, microbatches, training=False)
        return programs

    programs = programs_of(plan.microbatches)
    mine = frozenset(segment.index for segment in segments.segments if state.rank in segment.ranks)
    leaves = {
        name: state.leaves[name] for name in (*graph.parameters, *graph.buffers) if name in state.leaves
    }
    constants = {name: constant.to(executor.device) for name, constant in graph.constants.items()}
    loaded = executor.load(
        programs[state.rank],
        lower(graph, segmentation, device=str(executor.device), only=mine),
        segments,
        {**leaves, **constants},
        graph.batch,
        programs=programs,
        replan=programs_of,
    )
    launched = Segmentation(
        segmentation.segment_of, tuple(s.ranks for s in segments.segments), segmentation.recomputed
    )
    return EvaluationGraph(
        graph=graph,
        loaded=loaded,
        places=evaluation_outputs(graph, launched, state.holders),
        output_names=tuple(output.name for output in graph.outputs if output.kind == "output"),
        metric_names=tuple(output.name for output in graph.outputs if output.kind == "metric"),
        least_samples=least_samples(graph),
        constants=given.constants,
    )


__all__ = ["Deployed", "EvaluationGraph", "EvaluationGraphs"]
