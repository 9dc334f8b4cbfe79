"""The loss of the batch from those of its micro-batches, as declared or as the model's own loss says.

    "mean"        Σ (samples in it / samples) · loss           each micro-batch counts by its samples
    "sum"         Σ loss                                       the loss is a sum over samples (or divided by a number
                                                               that comes with the batch, as num_items_in_batch)
    "token_mean"  Σ over valid tokens / valid tokens           of the whole batch (``passes.trace.loss.token_mean``)

Undeclared, a loss of means over samples alone means "mean", one of sums alone "sum"; with a mean over labels, with anything
else that is divided by what the batch decides, and with sums beside means it is "token_mean". Terms of which none of them
makes the whole batch's are ``OpGraph.unlike_whole``: where they were not declared to be averaged, the batch is not cut.
Whatever runs a step asks ``with_normalizers`` for the leaves and ``loss_weights`` for the weights.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from torch import Tensor, fx

from cost_models.errors import ModelError, UsageError
from passes.graph.nodes import copy_graph, new_module
from passes.graph.token_counts import TokenCounts, filled, user_leaves
from passes.trace.build import Converted
from passes.trace.loss.dependence import ancestors
from passes.trace.loss.leaves import MadeLeaves
from passes.trace.loss.terms import LossTerms, loss_terms
from passes.trace.loss.token_mean import token_mean
from passes.trace.loss.totals import with_totals
from runtime.segment.code import BatchSpec
from runtime.segment.microbatch import batch_size_of, microbatch_sizes

if TYPE_CHECKING:
    from passes.graph.graph import OpGraph

LossReduction: TypeAlias = Literal["mean", "sum", "token_mean"]
LOSS_REDUCTIONS: tuple[LossReduction, ...] = get_args(LossReduction)


@dataclass(frozen=True)
class Reduced:
    """The traced graph under a loss reduction. ``unlike_whole``: names of the terms that it does not put together right."""

    traced: Converted
    batch: BatchSpec
    reduction: LossReduction
    counts: TokenCounts | None
    notes: tuple[str, ...]
    unlike_whole: tuple[str, ...] = ()


def reduce_loss(
    traced: Converted, spec: BatchSpec, declared: LossReduction | None, model_name: str
) -> Reduced:
    """Apply the declared reduction, or the one that the loss itself asks for. Raises ModelError where a declared token
    mean cannot be had.
    """
    unchanged = Reduced(traced, spec, declared or "mean", None, ())
    found = loss_terms(traced, spec)
    if found is None:
        return replace(unchanged, notes=_summed_metrics(traced, unchanged.reduction))
    totals: Mapping[str, fx.Node] = {}
    if declared in (None, "token_mean"):
        traced, leaves, totals, found = _with_totals(traced, spec)
    reduction = declared or _own(found, totals)
    if declared == "token_mean":
        _refuse_without_terms(found, totals, model_name)
    notes = _summed_metrics(traced, reduction)
    if declared is None:
        notes += tuple(
            f"several micro-batches would average the loss by samples: {p}" for p in found.problems
        )
    unlike = tuple(node.name for node in found.unlike(reduction))
    unchanged = replace(unchanged, reduction=reduction, notes=notes, unlike_whole=unlike)
    if reduction != "token_mean":
        return unchanged
    traced, spec, counts = token_mean(traced, leaves, totals, found)
    return replace(unchanged, traced=traced, batch=spec, counts=counts)


def checked_reduction(declared: str | None) -> LossReduction | None:
    """Return ``declared``; raise UsageError if it is a word that is no reduction."""
    for known in LOSS_REDUCTIONS:
        if declared == known:
            return known
    if declared is None:
        return None
    raise UsageError(
        f"there is no loss reduction {declared!r}",
        suggestions=[f"one of {', '.join(LOSS_REDUCTIONS)}; without any, as the model's loss is made"],
    )


def refuse_other_reduction(graph: OpGraph, declared: str | None) -> None:
    """Raise UsageError where a finished trace has another reduction than what is declared now."""
    if checked_reduction(declared) not in (None, graph.loss_reduction):
        raise UsageError(
            f"{graph.model_name} is traced with another loss reduction",
            [f"the trace has {graph.loss_reduction!r}, declared is {declared!r}"],
            [f"trace(..., loss_reduction={declared!r})", "leave loss_reduction out"],
        )


def _summed_metrics(traced: Converted, reduction: LossReduction) -> tuple[str, ...]:
    """Remark on means among metrics that are summed: they grow with the number of micro-batches."""
    names = [output.name for output in traced.outputs if output.kind == "metric"]
    if reduction != "sum" or not names:
        return ()
    return (
        f"metrics are summed over micro-batches as the loss is ({', '.join(names)}): let loss_fn return counts and "
        "sums, not means",
    )


def _with_totals(
    traced: Converted, spec: BatchSpec
) -> tuple[Converted, MadeLeaves, Mapping[str, fx.Node], LossTerms]:
    """Let the loss read totals of the whole batch, but for those of terms that only the whole batch has: where such a batch
    is cut all the same, each micro-batch computes its own term.
    """
    left = set[str]()
    while True:
        copied = replace(traced, module=new_module(traced.module, copy_graph(traced.module.graph)))
        leaves = MadeLeaves(copied, spec)
        made, totals = with_totals(copied, leaves, left)
        found = loss_terms(made, leaves.spec())
        assert found is not None
        behind_others = set(ancestors(*found.others))
        more = {node.name for leaf, node in totals.items() if leaves.nodes[leaf] in behind_others}
        if not more:
            return made, leaves, totals, found
        left |= more


def _own(found: LossTerms, totals: Mapping[str, fx.Node]) -> LossReduction:
    """Return the reduction that the loss asks for by its own form."""
    if found.means or totals:
        return "token_mean"
    if not found.sums:
        return "mean"
    return "token_mean" if found.averages or found.others or found.adds_constant else "sum"


def _refuse_without_terms(found: LossTerms, totals: Mapping[str, fx.Node], model_name: str) -> None:
    if found.means or found.sums or totals:
        return
    raise ModelError(
        f"the loss of {model_name} cannot be a mean over the batch's tokens",
        found.problems or ["it holds no cross-entropy or masked sum that is divided by a count of tokens"],
        [
            'loss_reduction="mean" averages micro-batches by their samples',
            'loss_reduction="sum" with a loss that is a sum over tokens',
            "add the cross-entropies' means, times numbers, and nothing that is not linear in them",
        ],
    )


# --------------------------------------------------------------------------------------------------
# Questions of everything that runs a step


def samples_in(graph: OpGraph, batch: Mapping[str, Tensor], needed: Collection[str] | None = None) -> int:
    """Count the samples in a user's batch. Raises UsageError if it is not like the traced one.

    ``needed``: leaves that this rank reads (default: all); it may lack the others.
    """
    if graph.token_counts is not None and needed is not None:
        made = graph.token_counts.made
        needed = {*needed, *(graph.token_counts.leaves if made & set(needed) else ())}
    return batch_size_of(batch, user_leaves(graph.batch, graph.token_counts), needed)


def with_normalizers(
    graph: OpGraph,
    batch: Mapping[str, Tensor],
    microbatches: int | Sequence[int],
    needed: Collection[str] | None = None,
    numbers: Tensor | None = None,
) -> Mapping[str, Tensor]:
    """Add the leaves that a token mean reads to ``batch`` (the whole one); unchanged if there are none.

    ``microbatches``: their number, or the samples of each. ``needed``: leaves that this rank reads (default: all); others
    are not made. ``numbers``: those of ``token_counts.counted`` for the whole batch, if ``batch`` is a part of it.
    """
    counts = graph.token_counts
    if counts is None or (needed is not None and not counts.made & set(needed)):
        return batch
    samples = samples_in(graph, batch, needed)
    return filled(counts, graph.batch, batch, _sizes(microbatches, samples), numbers)


def step_batch(
    graph: OpGraph, leaves: Mapping[str, Tensor], microbatches: int | Sequence[int]
) -> Mapping[str, Tensor]:
    """Choose, out of all of a user's leaves, those that an executor of ``graph`` reads."""
    spec = user_leaves(graph.batch, graph.token_counts)
    return with_normalizers(graph, {name: leaves[name] for name in spec.batch_dims}, microbatches)


def step_weights(graph: OpGraph, leaves: Mapping[str, Tensor], microbatches: int) -> tuple[float, ...]:
    """Compute ``loss_weights`` for a batch of ``leaves``."""
    return tuple(loss_weights(graph.loss_reduction, _sizes(microbatches, samples_in(graph, leaves))))


def _sizes(microbatches: int | Sequence[int], samples: int) -> Sequence[int]:
    return microbatch_sizes(samples, microbatches) if isinstance(microbatches, int) else microbatches


def loss_weights(reduction: LossReduction, sizes: Sequence[int]) -> list[float]:
    """Weigh each micro-batch's loss, gradient and metrics: ``Executor.train_step(weights=...)``. ``sizes``: samples.

    So metrics aggregate like the loss: under "mean" by samples, under "sum" summed, under "token_mean" by valid tokens
    (the graph has multiplied them by the ratio of the two; of the loss's first term, not weighted by class).
    """
    if reduction == "sum":
        return [1.0] * len(sizes)
    samples = sum(sizes)
    return [size / samples for size in sizes]
