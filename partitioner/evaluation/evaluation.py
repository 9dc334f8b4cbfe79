"""Evaluation of a deployed model: its loss, metrics and outputs, in evaluation mode, of batches of any size.

    batch of 21, planned: 8 samples in 4 micro-batches      rounds 2 2 2 2 | 2 2 2 2 | 2 2 1

No micro-batch is larger than the planned ones, and no more of them run at once than the plan has: so a batch needs about
the memory that the plan's batches need, plus that of the outputs where they are wanted. A rank that is done with its part
of a round begins the next. Nothing of the model, the optimizer, the step counter or the random generators changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from torch import Tensor

from cost_models.errors import UsageError
from partitioner.batches.part_batch import PartBatch, leaves_in_part, normalized
from partitioner.batches.step import refuse_autocast, share_results
from partitioner.evaluation.graphs import EvaluationGraph, EvaluationGraphs
from partitioner.evaluation.placed import Deployed
from passes.graph.token_counts import valid_tokens
from passes.trace.loss.reduction import loss_weights, samples_in
from runtime.execute.context import StepSums
from runtime.execute.gather_outputs import (
    Gather,
    gather_outputs,
    joined,
    memory_of,
    refuse_unjoinable,
    whole_shape,
)
from runtime.segment.microbatch import Microbatches, cut_at, symbol_sizes


@dataclass(frozen=True)
class EvalOutput:
    """The results of an evaluation. ``loss``, ``metrics``, ``tokens`` are on every rank: float64 tensors of shape ()."""

    loss: Tensor
    metrics: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor] | None
    """The model's outputs without the loss, by name, on this rank's device; None where they were not gathered."""
    samples: int
    tokens: Tensor | None
    """The labels that count, if the loss is a mean over them (``token_mean``), else None. ``loss`` times this adds up."""


class Evaluator:
    """The object behind ``engine.eval_step`` and ``engine.forward``."""

    def __init__(self, deployed: Deployed) -> None:
        self._deployed = deployed
        self._graphs = EvaluationGraphs(deployed)

    def eval_step(self, batch: Any, gather: Gather | None = None) -> EvalOutput:
        """See ``Engine.eval_step``."""
        self._check("eval_step", gather, (None, *get_args(Gather)))
        executor = self._deployed.executor
        with executor.reported(call=True):
            with executor.needed():
                made, leaves = self._graphs.for_loss(batch)
                run = self._run(made, batch, leaves, gather is not None)
            sums, names = _with_tokens(made, batch, leaves, run.sums)
            results = share_results(sums, names, run.weights, executor.collectives)
            outputs = None if gather is None else self._gather(made, leaves, run, gather)
            loss, metrics = results.wait()
            tokens = metrics.pop(_TOKENS, None)
            return EvalOutput(loss, metrics, outputs, sum(run.sizes), tokens)

    def forward(self, batch: Any, gather: Gather = "rank0") -> Mapping[str, Tensor] | None:
        """See ``Engine.forward``."""
        self._check("forward", gather, get_args(Gather))
        executor = self._deployed.executor
        with executor.reported(call=True):
            with executor.needed():
                made, leaves = self._graphs.without_loss(batch)
                run = self._run(made, batch, leaves, True)
            return self._gather(made, leaves, run, gather)

    def _check(self, method: str, gather: object, known: Sequence[object]) -> None:
        refuse_autocast(method, self._deployed.executor.device.type)
        if gather not in known:
            raise UsageError(
                f"engine.{method} cannot gather {gather!r}",
                suggestions=[f"gather is one of {', '.join(map(repr, known))}"],
            )

    def _run(
        self, made: EvaluationGraph, batch: Any, leaves: Mapping[str, Tensor], keep_outputs: bool
    ) -> _Evaluated:
        """Run every micro-batch of the batch, in rounds."""
        plan, executor, graph = self._deployed.plan, self._deployed.executor, made.graph
        needed = made.runs.leaf_names
        part = batch if isinstance(batch, PartBatch) else None
        samples = samples_in(graph, leaves, needed)
        shared, alone = self._sizes(made, samples if part is None else part.samples)
        sizes = (*shared, *alone)
        place = self._deployed.place
        in_part = () if part is None else leaves_in_part(part, leaves, graph.batch, sizes, place)
        if keep_outputs:
            refuse_unjoinable(made.runs.places, len(sizes))
        weights = loss_weights(graph.loss_reduction, sizes)
        filled = normalized(graph, leaves, sizes, needed, batch, executor.collectives)
        rounds = [
            *_rounds(range(len(shared)), plan.microbatches),
            *_rounds(range(len(shared), len(sizes)), plan.microbatches),
        ]
        ends = [sum(sizes[: numbers.stop]) for numbers in rounds]
        parts = 1 if part is None else part.place.world
        pieces = {
            name: cut_at(filled[name], dim, [end // parts if name in leaves else end for end in ends])
            for name, dim in graph.batch.batch_dims.items()
            if name in filled
        }
        found = []
        for at, numbers in enumerate(rounds):
            found.append(
                executor.evaluate(
                    {name: parts[at] for name, parts in pieces.items()},
                    Microbatches(sizes[numbers.start : numbers.stop]),
                    weights=weights[numbers.start : numbers.stop],
                    loaded=made.runs.load(outputs=keep_outputs, shared=numbers.start < len(shared)),
                    keep_outputs=keep_outputs,
                    in_part=in_part,
                )
            )
        return _Evaluated(_summed(found), weights, sizes)

    def _sizes(self, made: EvaluationGraph, samples: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the sizes of micro-batches that ranks may share, and of those that they may not: ``BatchCuts``."""
        plan = self._deployed.plan
        least, reason = made.least_samples
        if samples < least:
            raise UsageError(
                f"cannot evaluate {plan.model.name} on {samples} samples", [f"{reason} needs {least} at once"]
            )
        return replace(self._deployed.place.cuts, least=least).shared_and_rest(samples)

    def _gather(
        self, made: EvaluationGraph, leaves: Mapping[str, Tensor], run: _Evaluated, gather: Gather
    ) -> dict[str, Tensor] | None:
        state, executor = self._deployed.state, self._deployed.executor
        given = {name: tuple(leaf.shape) for name, leaf in leaves.items()}
        symbols = [symbol_sizes(made.graph.batch, given, size) for size in run.sizes]
        held = {
            **leaves,
            **{n: tensor for loaded in made.runs.loaded for n, tensor in loaded.own.state.items()},
        }
        foreign = frozenset(memory_of(tensor) for tensor in held.values())
        own: dict[str, Tensor] = {}
        for place in made.runs.places:
            name = place.names[0]
            if place.held:
                if place.rank in (None, state.rank) and place.held in held:
                    own[name] = held[place.held].detach().to(executor.device, copy=True)
            elif run.sums.outputs and place.rank in (None, state.rank):
                own[name] = joined(place, [found[name] for found in run.sums.outputs], foreign)
        shapes = [whole_shape(place, symbols) for place in made.runs.places]
        found = gather_outputs(made.runs.places, own, shapes, gather, state.rank, executor.collectives)
        return None if found is None else {name: found[name] for name in made.names("output")}


@dataclass(frozen=True)
class _Evaluated:
    """The results of this rank. ``weights``, ``sizes``: one per micro-batch of the whole batch."""

    sums: StepSums
    weights: Sequence[float]
    sizes: Sequence[int]


_TOKENS = "(valid tokens)"
"""The name of the valid tokens, which travel with the metrics."""


def _with_tokens(
    made: EvaluationGraph, batch: Any, leaves: Mapping[str, Tensor], sums: StepSums
) -> tuple[StepSums, Sequence[str]]:
    """Add the batch's valid tokens as one more metric, which ranks that have the labels bring: (sums, names of metrics)."""
    counts = made.graph.token_counts
    if counts is None or counts.shared_by is None:
        return sums, made.names("metric")
    if counts.made & made.runs.leaf_names:  # it counted them for the loss
        parts = batch.place.world if isinstance(batch, PartBatch) else 1
        found = valid_tokens(counts, leaves) * (sums.share * parts)
        sums = replace(sums, metrics={**sums.metrics, _TOKENS: found})
    return sums, (*made.names("metric"), _TOKENS)


def _rounds(numbers: range, most: int) -> list[range]:
    """Cut the numbers of micro-batches into those that run together."""
    return [numbers[first : first + most] for first in range(0, len(numbers), most)]


def _summed(rounds: Sequence[StepSums]) -> StepSums:
    """Sum up the rounds of a batch as if they had been one."""
    losses = [found.loss for found in rounds if found.loss is not None]
    names = rounds[0].metrics
    return StepSums(
        loss=sum(losses[1:], losses[0]) if losses else None,
        metrics={name: sum((r.metrics[name] for r in rounds[1:]), rounds[0].metrics[name]) for name in names},
        weights=tuple(weight for found in rounds for weight in found.weights),
        outputs=[outputs for found in rounds for outputs in found.outputs],
        share=rounds[0].share,
    )
