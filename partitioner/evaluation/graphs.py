"""The evaluation graphs of a deployed model: traced when first needed, placed where training is, kept.

    eval_step(batch)   the model in evaluation mode, and its loss      traced with the plan's own example where the batch
                                                                       is like it, else with the batch
    forward(batch)     the model in evaluation mode, of what the       traced with the batch
                       batch has

A graph serves every batch with the same tensors (of any number of samples) and the same plain values. A rank may have
loaded a part of the batch, or nothing, so at each call ranks agree on the graph (``partitioner.evaluation.choice``).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cost_models.errors import UsageError
from partitioner.batches.part_batch import AbsentBatch, PartBatch, refuse_absent
from partitioner.evaluation.choice import (
    EVERYWHERE,
    GivenBatch,
    Wanted,
    chosen,
    completed,
    described,
    put_together,
    refuse_other_constants,
    votes,
)
from partitioner.evaluation.placed import Deployed, PlacedEvaluation
from partitioner.evaluation.placement import without_writes
from passes.graph.graph import OpGraph
from passes.graph.least_samples import least_samples
from passes.graph.token_counts import user_leaves
from passes.trace.batch import flatten_batch, forward_constants, forward_names, forward_part, takes_whole
from passes.trace.trace import trace
from runtime.ranks.meeting import Meeting

logger = logging.getLogger("partitioner")

MOST_GRAPHS = 8
"""The most graphs that are kept: each has programs, code and constants of its own."""


@dataclass(frozen=True)
class EvaluationGraph:
    """One evaluation graph, ready to run on this rank."""

    runs: PlacedEvaluation
    wanted: Wanted
    """The batch that it was traced with."""

    @property
    def graph(self) -> OpGraph:
        """The graph as one rank would run it."""
        return self.runs.graph

    @cached_property
    def least_samples(self) -> tuple[int, str]:
        """The fewest samples that a micro-batch needs, and the op that needs as many."""
        return least_samples(self.graph)

    def names(self, kind: str) -> tuple[str, ...]:
        """List the outputs of a kind, in the model's own order."""
        return tuple(output.name for output in self.graph.outputs if output.kind == kind)


class EvaluationGraphs:
    """The graphs made so far, and the way to the one for a batch. Collective: ranks agree on which one."""

    def __init__(self, deployed: Deployed) -> None:
        self._deployed = deployed
        self._known: list[EvaluationGraph] = []
        """The graphs in the order of their last use; alike on all ranks."""
        parameters = inspect.signature(deployed.workload.model.forward).parameters.values()
        self._optional = frozenset(p.name for p in parameters if p.default is not inspect.Parameter.empty)
        self._told = False

    def for_loss(self, batch: Any) -> tuple[EvaluationGraph, Mapping[str, Tensor]]:
        """Return the graph that computes the loss of ``batch`` and the model's outputs, and the leaves of the batch."""
        if isinstance(batch, AbsentBatch):
            found = self._find(None, True)
            refuse_absent(found.runs.leaf_names)
            return found, batch.leaves_of(found.wanted.spec)
        batch = batch.batch if isinstance(batch, PartBatch) else batch
        given = self._given(batch, self._deployed.workload.loss_fn)
        return self._find(given, True), given.leaves

    def without_loss(self, batch: Any) -> tuple[EvaluationGraph, Mapping[str, Tensor]]:
        """Return the graph that computes the model's outputs from those parts of ``batch`` that forward takes."""
        if isinstance(batch, AbsentBatch):
            raise UsageError(
                "forward needs the batch on every rank", ["this rank did not load it"], [EVERYWHERE]
            )
        workload, batch = self._deployed.workload, batch.batch if isinstance(batch, PartBatch) else batch
        given = self._given(forward_part(workload.model, batch, workload.loss_fn is not None), None)
        return self._find(given, False), given.leaves

    def _given(self, batch: Any, loss_fn: Callable[..., Any] | None) -> GivenBatch:
        model, has_loss_fn = self._deployed.workload.model, loss_fn is not None
        names = forward_names(model)
        # A forward that takes the mapping itself lacks nothing of a part of it.
        partial = not takes_whole(model, self._deployed.workload.example_inputs)
        return GivenBatch(
            batch,
            flatten_batch(batch, names),
            frozenset(flatten_batch(forward_part(model, batch, has_loss_fn, partial=partial), names)),
            forward_constants(model, batch, has_loss_fn, partial=partial),
        )

    def _find(self, given: GivenBatch | None, with_loss: bool) -> EvaluationGraph:
        """Find the graph, or make it. ``given``: None if this rank did not load the batch."""
        made = self._deployed
        example = self._given(made.workload.example_inputs, made.workload.loss_fn)
        training = user_leaves(made.training.batch, made.training.token_counts)
        candidates = [Wanted(True, training, example.constants), *(known.wanted for known in self._known)]
        number = self._agree(candidates, given, with_loss)
        if number:
            found = self._known.pop(number - 1)
        elif number == 0:  # like the plan's example, which all ranks have
            found = self._make(example, with_loss)
        else:
            found = self._make(self._whole(given, with_loss), with_loss)
        self._known.append(found)
        while len(self._known) > MOST_GRAPHS:
            self._forget(self._known.pop(0))
        return found

    def _agree(self, candidates: Sequence[Wanted], given: GivenBatch | None, with_loss: bool) -> int | None:
        """Choose the candidate that the ranks together want, with one small all-reduce."""
        collectives = self._deployed.executor.collectives
        own = votes(candidates, given, with_loss, self._optional)
        numbers = torch.tensor(own, dtype=torch.int32, device=collectives.device)
        most = collectives.all_reduce(numbers, "which graph evaluates this batch", dist.ReduceOp.MAX).wait()
        return chosen(candidates, most.tolist(), self._optional)

    def _whole(self, given: GivenBatch | None, with_loss: bool) -> GivenBatch:
        """Return what this rank traces with: the batch, of which it may know nothing or a part."""
        made = self._deployed
        meeting = Meeting.join()
        whole = meeting.decide(
            "batch to trace", described(given, with_loss), put_together, made.executor.timeout_seconds
        )
        if whole["differences"]:
            raise UsageError(
                "ranks cannot agree on what to evaluate",
                whole["differences"],
                ["call eval_step and forward on every rank, with the same batch"],
            )
        workload = made.workload
        loss_fn = workload.loss_fn if with_loss else None
        with meeting.all_or_none("evaluation of a batch in parts"):
            own = None if given is None else given.inputs
            names = forward_names(workload.model)
            found = self._given(completed(own, workload.example_inputs, whole, names), loss_fn)
            refuse_other_constants(found.constants, whole)
        return found

    def _make(self, given: GivenBatch, with_loss: bool) -> EvaluationGraph:
        with Meeting.join().all_or_none("evaluation"):
            graph = _traced(self._deployed, given, with_loss)
            placed = PlacedEvaluation.of(self._deployed, graph)
        spec = user_leaves(placed.graph.batch, placed.graph.token_counts)
        return EvaluationGraph(placed, Wanted(with_loss, spec, given.constants))

    def _forget(self, graph: EvaluationGraph) -> None:
        for loaded in graph.runs.loaded:
            self._deployed.executor.unload(loaded)
        if not self._told:
            self._told = True
            logger.warning(
                "evaluation keeps the %d graphs that it used last, and traces others again: batches of many shapes "
                "are better padded to a few lengths, or planned with dynamic_dims",
                MOST_GRAPHS,
            )


# --------------------------------------------------------------------------------------------------
# From a batch to a graph that this rank can run


def _traced(deployed: Deployed, given: GivenBatch, with_loss: bool) -> OpGraph:
    """Trace the evaluation graph, which writes nothing."""
    training, plan = deployed.training, deployed.plan
    dims = user_leaves(training.batch, training.token_counts).batch_dims
    known = {name: dim for name, dim in dims.items() if name in given.leaves}
    graph = trace(
        deployed.workload.model,
        given.inputs,
        loss_fn=deployed.workload.loss_fn if with_loss else None,
        training=False,
        batch_dims=known if any(dim is not None for dim in known.values()) else None,
        dynamic_dims=_open_dims(deployed.dynamic_dims, given.leaves),
        precision=plan.precision,
        loss_reduction=training.loss_reduction if with_loss else None,
        opaque=training.opaque,
        name=plan.model.name,
    )
    if with_loss and graph.loss is None:
        raise UsageError(
            f"{plan.model.name} computes no loss of this batch in evaluation mode",
            [f"the batch has {', '.join(given.leaves)}"],
            ["give it labels", "pass loss_fn to deploy", "engine.forward(batch) needs no loss"],
        )
    return without_writes(graph)


def _open_dims(
    dynamic_dims: Mapping[str, list[int]] | None, leaves: Mapping[str, Tensor]
) -> dict[str, list[int]]:
    """Return ``dynamic_dims`` as far as the batch has these tensors; a size of 1 cannot be left open."""
    return {
        name: [dim for dim in dims if leaves[name].shape[dim] > 1]
        for name, dims in (dynamic_dims or {}).items()
        if name in leaves
    }
