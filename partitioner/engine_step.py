"""One training step as numbers: into how many micro-batches it is cut, and what every rank learns of it.

Loss and metrics of a batch are Σ weight · (that of a micro-batch). Some ranks compute a result, some do not, some
compute the same one (shards) or their part of it (replicas), so each rank brings a pair, all pairs are summed over the
ranks in one small all-reduce, and

    result = Σ weight · result of a micro-batch   ·   (Σ weights of the batch) / (Σ weights that were brought)

where the factor is exactly 1 when each micro-batch's result was brought once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cost_models.errors import PlanError
from partitioner.plan import Plan
from passes.graph import OpGraph
from passes.loss_reduction import aggregate_metric, metric_weights, with_normalizers
from passes.token_counts import user_leaves
from runtime.collective import Collectives, Pending
from runtime.microbatch import batch_size_of
from runtime.results import StepSums


@dataclass(frozen=True)
class StepInfo:
    """What a training step did, the same on every rank; ``engine.last_step``. Tensors are of shape (), float64."""

    loss: Tensor
    grad_norm: Tensor | None
    """Before clipping; None where gradients were not clipped."""
    metrics: Mapping[str, Tensor]
    samples: int
    tokens: int | None
    """Token ids in the batch, padding included; None if the model has no embedding of token ids."""
    seconds: float
    """Of this rank, from the call to its return."""
    step: int
    """Number of the step, from 1."""
    skipped: bool = False
    """Whether gradients overflowed under the loss scale and were dropped on all ranks: nothing was updated."""


@dataclass(frozen=True)
class SharedResults:
    """Loss and metrics of a batch on their way to every rank."""

    _pending: Pending
    _names: Sequence[str]
    _weight: float

    def wait(self) -> tuple[Tensor, dict[str, Tensor]]:
        """(loss, metrics), float64 tensors of shape (). On a GPU nobody waits but the stream."""
        pairs = self._pending.wait().view(-1, 2)
        loss, *metrics = (pairs[:, 0] * (self._weight / pairs[:, 1])).unbind()
        return loss, dict(zip(self._names, metrics, strict=True))


def share_results(
    loss: Tensor | None,
    metrics: Mapping[str, Tensor],
    metric_names: Sequence[str],
    weights: Sequence[float],
    collectives: Collectives,
) -> SharedResults:
    """Start to sum what every rank brings. Collective.

    ``loss``, ``metrics``: those of this rank's micro-batches, weighted; ``weights``: the loss's, of the whole batch.
    """
    brought: list[Tensor | None] = [loss, *(metrics.get(name) for name in metric_names)]
    own = sum(weights)
    pairs = [number for result in brought for number in (0.0, 0.0 if result is None else own)]
    vector = torch.tensor(pairs, dtype=torch.float64).to(collectives.device, non_blocking=True)
    for at, result in enumerate(brought):
        if result is not None:
            vector[2 * at] = result
    return SharedResults(collectives.all_reduce(vector, "the loss"), metric_names, own)


class StepLeaves:
    """The leaves that a rank runs a step with: those of the user's batch, and those made from them.

    ``needed``: the leaves that the rank's segments read. Others may be missing in its batches.
    """

    def __init__(self, graph: OpGraph, needed: Collection[str]) -> None:
        self._graph = graph
        self._spec = user_leaves(graph.batch, graph.token_counts)
        counts = graph.token_counts
        made = frozenset[str]() if counts is None else counts.made
        self._makes = bool(made & set(needed))
        self._needed = set(needed) - made
        if counts is not None and self._makes:
            self._needed |= set(counts.leaves)

    def samples(self, leaves: Mapping[str, Tensor]) -> int:
        """Samples in the user's batch. Raises UsageError where it lacks a leaf, or is not as it was traced."""
        return batch_size_of(leaves, self._spec, self._needed)

    def made(self, leaves: Mapping[str, Tensor], microbatches: int) -> Mapping[str, Tensor]:
        """``leaves`` and those that a token mean divides by, where this rank reads any."""
        return with_normalizers(self._graph, leaves, microbatches) if self._makes else leaves


def weighted_metrics(
    graph: OpGraph, leaves: Mapping[str, Tensor], sums: StepSums, microbatches: int
) -> dict[str, Tensor]:
    """The batch's metrics, as far as this rank computes them; () float64 each."""
    if not sums.metrics:
        return {}
    weights = metric_weights(graph, leaves, microbatches)
    return {name: aggregate_metric(values, weights) for name, values in sums.metrics.items()}


def microbatches_for(plan: Plan, samples: int, least_samples: int, reason: str) -> int:
    """Into how many micro-batches a batch of ``samples`` is cut: the plan's number, or as many as it is enough for.

        plan: 8 samples, 4 micro-batches      samples 8 -> 2 2 2 2    5 -> 2 1 1 1    3 -> 1 1 1

    A function of the batch alone, so all ranks decide alike. ``least_samples``: what a micro-batch needs, for
    ``reason``. Raises PlanError for more samples than were planned: their memory was not.
    """
    title = f"this batch does not fit the plan for {plan.model.name}"
    if samples > plan.batch_size:
        raise PlanError(
            title,
            because=[
                f"it has {samples} samples, the plan is made for {plan.batch_size} a step, "
                "and memory for more was not planned"
            ],
            suggestions=[
                f"give batches of at most {plan.batch_size}",
                f"plan again with batch_size={samples}",
            ],
        )
    if samples < least_samples:
        raise PlanError(
            title,
            because=[f"it has {samples} samples, and {reason or 'a step'} needs {least_samples}"],
            suggestions=["drop the last batch: drop_last=True"],
        )
    return min(plan.microbatches, samples // least_samples)


def replanned(plan: Plan, microbatches: int) -> Plan:
    """The same plan for fewer micro-batches; for its programs only, its predictions are of the whole batch."""
    return plan.model_copy(update={"microbatches": microbatches})
