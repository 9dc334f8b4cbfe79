"""Rounds of the free search: the model's graph first, then shapes of blocks that may win, then their sizes anew.

    the layer-wise plan ─► as it is (half of the time) ─► the best shapes, each cut again by how busy its devices were
                        ─► the fastest of all, its segments merged

Shapes are estimated before a graph is rewritten (``passes.search.free.shapes``); none is made that the estimate puts far
behind what is known, or that would not be ready in time.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from cost_models.cluster import ClusterSpec
from cost_models.errors import InfeasibleError
from passes.costs.costs import GraphCosts
from passes.graph.graph import OpGraph
from passes.graph.verify import verify_graph
from passes.search.free.choices import counts_to_try
from passes.search.free.outcome import fastest
from passes.search.free.request import FreeRequest
from passes.search.free.shapes import Shape, equalized, family_seconds, shapes
from passes.search.free.splits import automatic_families, given_splits, proportional
from passes.search.free.tuning import FreeTuning
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
from passes.search.outcome import Outcome

log = logging.getLogger("partitioner")


def place_anywhere(
    graph: OpGraph, costs: GraphCosts, cluster: ClusterSpec, request: FreeRequest, judge: Judge
) -> Outcome:
    """Choose the fastest of everything; in simulation never slower than the layer-wise plan.

    Raises InfeasibleError where nothing fits.
    """
    budget = TimeBudget.of(request)
    # With all of the time, as layer-wise planning would have it: with less, the plan may be worse than layer-wise.
    return place_rounds(graph, costs, cluster, request, layer_start(request, judge), budget)


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
        rounds.attempt(
            split_variant(graph, cluster, given_splits(graph, request.splits)), request.tuning.alone_share
        )
    else:
        rounds.run()
    if not rounds.found and start is None:
        raise rounds.failures[0]
    return fastest(rounds.found, start, budget)


@dataclass(eq=False)
class _Rounds:
    graph: OpGraph
    costs: GraphCosts
    cluster: ClusterSpec
    request: FreeRequest
    start: Outcome | None
    budget: TimeBudget
    found: list[Attempt] = field(default_factory=list)
    failures: list[InfeasibleError] = field(default_factory=list)
    making_per_op: float = field(init=False)

    def __post_init__(self) -> None:
        self.making_per_op = self.tuning.making_per_op

    @property
    def tuning(self) -> FreeTuning:
        return self.request.tuning

    def run(self) -> None:
        """Place the graph as it is, then shapes, each with other sizes too."""
        tuning = self.tuning
        ranked = self.ranked()
        known = self.best_seconds
        may_win = [shape for shape in ranked if shape.seconds < tuning.promising * known]
        self.attempt(Variant(self.graph, self.costs), tuning.whole_share if may_win else tuning.alone_share)
        worth = [shape for shape in may_win if shape.seconds < tuning.promising * self.best_seconds]
        if ranked:
            text = "%d of %d shapes of blocks may win: %.4g s estimated, %.4g s known"
            log.info(text, len(worth), len(ranked), ranked[0].seconds, self.best_seconds)
        first: dict[object, Shape] = {}
        for shape in worth:  # those that differ in sizes alone are cut again
            first.setdefault((shape.families, shape.ranks), shape)
        most = tuning.most_shapes if self.budget.limited else tuning.few_shapes
        for shape in list(first.values())[:most]:
            if shape.seconds >= tuning.promising * self.best_seconds:
                break
            found = self.shape(shape, tuning.shape_share)
            for _ in range(tuning.most_recuts):
                if found is None or found.carried.seconds > tuning.recut_within * self.best_seconds:
                    break
                again = self.cut_again(found)
                other = None if again is None else self.shape(again, tuning.shape_share, found)
                found = other if other is not None and other.carried.seconds < found.carried.seconds else None

    def ranked(self) -> list[Shape]:
        """List all shapes, best estimated first; none where nothing is to be split."""
        if not self.request.split:
            return []
        chosen = automatic_families(self.graph, self.costs, self.cluster, self.tuning)
        if not chosen:
            return []
        counts = counts_to_try(self.graph, self.request)
        return shapes(self.graph, self.costs, self.cluster, self.request, counts, chosen)

    @property
    def best_seconds(self) -> float:
        """Seconds of the fastest known step."""
        known = [attempt.carried.seconds for attempt in self.found]
        return min(
            known if self.start is None else [*known, self.start.best.step_seconds],
            default=math.inf,
        )

    def shape(self, shape: Shape, share: float, like: Attempt | None = None) -> Attempt | None:
        """Place a shape; None where there is no time, no placement, or a pin names nothing of it."""
        blocks = sum(
            len(family.ops) * len(sizes) for family, sizes in zip(shape.families, shape.sizes, strict=True)
        )
        making = self.making_per_op * (len(self.graph) + 4 * blocks)
        if self.budget.left_seconds < 1.5 * making + self.tuning.shape_least_seconds / share:
            return None
        began = time.perf_counter()
        alone = self.request.job.batch_size % shape.microbatches == 0
        size = self.request.job.batch_size // shape.microbatches if alone else None
        variant = replace(split_variant(self.graph, self.cluster, shape.splits, size), shape=shape)
        self.making_per_op = (time.perf_counter() - began) / len(variant.graph)
        if not all(means_something(glob, variant.graph) for glob in self.request.pins):
            return None
        return self.attempt(variant, share, like)

    def attempt(self, variant: Variant, share: float, like: Attempt | None = None) -> Attempt | None:
        """Place a variant in a share of the time that is left."""
        verify_graph(variant.graph, after="split")
        request = self.budget.part(self.request, share)
        if variant.shape is not None:
            request = replace(request, microbatches=variant.shape.microbatches)
        whole = next((attempt for attempt in self.found if not attempt.variant.splits), None)
        before = [a.search.best.candidate for a in (like, whole) if a is not None]
        try:
            found = place_variant(variant, self.cluster, request, self.start, before, self.budget)
        except InfeasibleError as error:
            self.failures.append(error)
            return None
        self.found.append(found)
        log.info("%s: step %.4g s", found.label, found.carried.seconds)
        return found

    def cut_again(self, attempt: Attempt) -> Shape | None:
        """Choose sizes with which all devices would be equally busy, if only blocks changed; None if they are.

        busy[k] = x[k]·ΣT[f, k] + fixed[k] as simulated.
        """
        shape = attempt.variant.shape
        if shape is None:
            return None
        seconds = family_seconds(
            self.graph, self.costs, self.cluster, self.request, shape.microbatches, shape.families
        )
        total = seconds.whole.sum(axis=0)[list(shape.ranks)]
        units = np.array([family.units for family in shape.families])
        share = np.mean([_shares(sizes, len(shape.ranks)) for sizes in shape.sizes], axis=0)
        busy = np.array(attempt.carried.realized.simulation.busy_seconds)[list(shape.ranks)]
        wanted = equalized(total.tolist(), np.maximum(busy - share * total, 0.0).tolist())
        if np.abs(np.array(wanted) - share).max() < self.tuning.least_change:
            return None
        kept = [max(x, 1e-9) for x in wanted]
        sizes = tuple(proportional(int(n), kept) for n in units)
        return None if sizes == shape.sizes else replace(shape, sizes=sizes)


def _shares(sizes: Sequence[int], count: int) -> list[float]:
    return [size / sum(sizes) for size in sizes] + [0.0] * (count - len(sizes))
