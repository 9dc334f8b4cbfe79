"""Rounds of the free search: the model's graph first, then the shape of blocks that may win.

    the layer-wise plan ─► as it is (half of the time) ─► the best shape ─► the fastest of all

Shapes are estimated before a graph is rewritten (``passes.search.free.shapes``); none is made that the estimate puts far
behind what is known, or that would not be ready in time.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from cost_models.cluster import ClusterSpec
from cost_models.errors import InfeasibleError
from passes.costs.costs import GraphCosts
from passes.graph.graph import OpGraph
from passes.graph.verify import verify_graph
from passes.search.certificate import Certificate, relative_gap
from passes.search.free.request import FreeRequest, counts_to_try
from passes.search.free.shapes import BlockChoice, shapes
from passes.search.free.splits import automatic_families, given_splits
from passes.search.free.variants import (
    Attempt,
    TimeBudget,
    Variant,
    layer_start,
    means_something,
    place_variant,
    split_variant,
)
from passes.search.judge import Judge
from passes.search.outcome import Label, Outcome, RunnerUp

log = logging.getLogger("partitioner")

WHOLE_SHARE = 0.55
"""Share of the time after the layer-wise plan for the graph as it is, where a shape may come after it."""
PROMISING = 1.15
"""Multiple of the best known step beyond which the estimate keeps a shape from being made."""
MAKING_SECONDS_PER_OP = 1.5e-3
"""Seconds that splitting and costs take per op of the graph that is made. Measured."""
LEAST_SECONDS = 0.3
"""Seconds below which a search of a shape is not begun."""


def place_anywhere(request: FreeRequest, judge: Judge) -> Outcome:
    """Choose the fastest of everything; in simulation never slower than the layer-wise plan.

    Raises InfeasibleError where nothing fits.
    """
    budget = TimeBudget.of(request)
    # With all of the time, as layer-wise planning would have it: with less, the plan may be worse than layer-wise.
    start = layer_start(request, judge)
    return place_rounds(judge.graph, judge.costs, judge.cluster, request, start, budget)


def place_rounds(
    graph: OpGraph,
    costs: GraphCosts,
    cluster: ClusterSpec,
    request: FreeRequest,
    start: Outcome | None,
    budget: TimeBudget,
) -> Outcome:
    """Choose the fastest of all variants and the layer-wise plan ``start``. Raises InfeasibleError where nothing fits."""
    rounds = _Rounds(graph, costs, cluster, request, start, budget)
    if request.splits:
        rounds.attempt(split_variant(graph, cluster, given_splits(graph, request.splits)), 1.0)
    else:
        rounds.run()
    if not rounds.attempts and start is None:
        raise rounds.failures[0]
    return _fastest(rounds.attempts, start)


@dataclass(eq=False)
class _Rounds:
    graph: OpGraph
    costs: GraphCosts
    cluster: ClusterSpec
    request: FreeRequest
    start: Outcome | None
    budget: TimeBudget
    attempts: list[Attempt] = field(default_factory=list)
    failures: list[InfeasibleError] = field(default_factory=list)

    def run(self) -> None:
        """Place the graph as it is, then the best shape."""
        ranked = self.ranked()
        may_win = bool(ranked) and ranked[0].seconds < PROMISING * self.best_seconds
        self.attempt(Variant(self.graph, self.costs), WHOLE_SHARE if may_win else 1.0)
        if not ranked:
            return
        text = "the best of %d shapes of blocks: %.4g s estimated, %.4g s known"
        log.info(text, len(ranked), ranked[0].seconds, self.best_seconds)
        if ranked[0].seconds < PROMISING * self.best_seconds:
            self.shape(ranked[0])

    def ranked(self) -> list[BlockChoice]:
        """List all shapes, best estimated first; none where nothing is to be split."""
        if not self.request.split:
            return []
        chosen = automatic_families(self.graph, self.costs, self.cluster)
        if not chosen:
            return []
        counts = counts_to_try(self.graph, self.request)
        return shapes(self.graph, self.costs, self.cluster, self.request, counts, chosen)

    @property
    def best_seconds(self) -> float:
        """Seconds of the fastest known step."""
        known = [attempt.carried.seconds for attempt in self.attempts]
        return min(
            known if self.start is None else [*known, self.start.best.step_seconds],
            default=math.inf,
        )

    def shape(self, shape: BlockChoice) -> None:
        """Place a shape, unless there is no time, or a pin names nothing of it."""
        blocks = sum(
            len(family.ops) * len(sizes) for family, sizes in zip(shape.families, shape.sizes, strict=True)
        )
        making = MAKING_SECONDS_PER_OP * (len(self.graph) + 4 * blocks)
        if self.budget.left_seconds < 1.5 * making + LEAST_SECONDS:
            return
        alone = self.request.job.batch_size % shape.microbatches == 0
        size = self.request.job.batch_size // shape.microbatches if alone else None
        variant = replace(split_variant(self.graph, self.cluster, shape.splits, size), shape=shape)
        if all(means_something(glob, variant.graph) for glob in self.request.pins):
            self.attempt(variant, 1.0)

    def attempt(self, variant: Variant, share: float) -> None:
        """Place a variant in a share of the time that is left."""
        verify_graph(variant.graph, after="split")
        request = self.budget.part(self.request, share)
        if variant.shape is not None:
            request = replace(request, microbatches=variant.shape.microbatches)
        before = [attempt.search.best.candidate for attempt in self.attempts]
        try:
            attempt = place_variant(variant, self.cluster, request, self.start, before, self.budget)
        except InfeasibleError as error:
            self.failures.append(error)
            return
        self.attempts.append(attempt)
        log.info("%s: step %.4g s", attempt.label, attempt.carried.seconds)


def _fastest(attempts: Sequence[Attempt], start: Outcome | None) -> Outcome:
    """Choose the fastest in simulation of all variants; the layer-wise plan where that is as fast."""
    best = min(attempts, key=lambda attempt: attempt.carried.seconds, default=None)
    if best is not None and (start is None or best.carried.seconds < start.best.step_seconds):
        best.judge.choose(best.carried)
        certificate = best.search.certificate
        if best.variant.splits:  # its ops are blocks: that they are whole says nothing of the model's
            certificate = replace(certificate, whole_ops_bound_seconds=0.0)
        return replace(
            best.search,
            certificate=certificate,
            best=best.judge.simulated(best.carried.candidate, best.carried.realized),
            splits=best.variant.splits,
            runner_ups=(
                *_others([attempt for attempt in attempts if attempt is not best], start),
                *best.search.runner_ups,
            ),
        )
    assert start is not None
    runner_ups = (*_others(attempts, None), *start.runner_ups)
    return replace(start, certificate=_unbeaten(start, attempts), runner_ups=runner_ups)


def _unbeaten(start: Outcome, attempts: Sequence[Attempt]) -> Certificate:
    """Certify the layer-wise plan among all placements: its own certificate is about contiguous ones only."""
    whole = next((attempt.search.certificate for attempt in attempts if not attempt.variant.splits), None)
    if whole is None:
        return replace(start.certificate, space=f"nothing found beats: {start.certificate.space}", terms=None)
    seconds = start.best.step_seconds
    lower = min(whole.whole_ops_bound_seconds, start.certificate.whole_ops_bound_seconds)
    bound = min(lower, seconds)
    gap = relative_gap(seconds, bound)
    return replace(
        whole,
        objective="simulated step",
        objective_seconds=seconds,
        bound_seconds=bound,
        whole_ops_bound_seconds=lower,
        gap=gap,
        space=f"the layer-wise plan, unbeaten: {whole.space}",
        method=f"layer-wise: {start.certificate.method}; bound: work, longest path, largest op",
        solver_status="optimal" if gap <= 1e-6 else "stalled",
        search_seconds=start.certificate.search_seconds + whole.search_seconds,
    )


def _others(attempts: Sequence[Attempt], start: Outcome | None) -> tuple[RunnerUp, ...]:
    """List the other variants' best, and the layer-wise plan."""
    others = [
        RunnerUp.of(
            attempt.label, attempt.judge.simulated(attempt.carried.candidate, attempt.carried.realized)
        )
        for attempt in attempts
    ]
    if start is not None:
        label = Label.of_layer_wise(start.best.candidate)
        others.append(replace(RunnerUp.of(label, start.best), named=True))
    return tuple(others)
