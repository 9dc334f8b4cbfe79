"""Variants: the model's graph as it is, or with ops split into blocks of neurons for the devices, each placed.

``passes.search.free.rounds`` says which are made, and when.

The layer-wise plan is a feasible start for all of them, and the answer where nothing beats it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from cost_models.cluster import ClusterSpec
from cost_models.errors import InfeasibleError, TimeLimitError
from passes.costs.costs import GraphCosts, cost_graph, costs_of
from passes.graph.graph import OpGraph
from passes.lower.candidate import Candidate, Origin, Trail, anywhere
from passes.search.free.judge import ListJudge
from passes.search.free.place import place_free
from passes.search.free.request import FreeRequest
from passes.search.free.shapes import BlockChoice
from passes.search.judge import Carried, Judge
from passes.search.layer.request import LayerRequest
from passes.search.outcome import Label, Outcome
from passes.search.pins import matches
from passes.search.place import place_stages
from passes.split.split import Split, split_neurons

log = logging.getLogger("partitioner")


@dataclass(frozen=True)
class TimeBudget:
    """Time that is left of a request, for one search after the other."""

    deadline: float

    @staticmethod
    def of(request: FreeRequest) -> TimeBudget:
        """Begin now; without end where the request has no limit."""
        limit = request.time_limit_seconds
        return TimeBudget(math.inf if limit is None else time.perf_counter() + limit)

    @property
    def left_seconds(self) -> float:
        """Seconds until the end; 0 after it."""
        return max(0.0, self.deadline - time.perf_counter())

    def part(self, request: FreeRequest, share: float) -> FreeRequest:
        """Return ``request`` with a share of the time that is left, half a second at least."""
        if math.isinf(self.deadline):
            return request
        return replace(request, time_limit_seconds=max(0.5, share * self.left_seconds))


@dataclass(frozen=True, eq=False)
class Variant:
    """A graph to place, with its costs. ``splits``: ops of the model's graph that it has in blocks.

    ``shape``: the search's choice of blocks; None for the graph as it is, or if the user chose.
    """

    graph: OpGraph
    costs: GraphCosts
    splits: tuple[Split, ...] = ()
    shape: BlockChoice | None = None


def means_something(glob: str, graph: OpGraph) -> bool:
    """Tell whether ``glob`` pins any op: blocks of an op have other names than the op had."""
    return any(matches(glob, node.name, str(node.meta.get("module_path", ""))) for node in graph.ops)


def split_variant(
    graph: OpGraph, cluster: ClusterSpec, splits: tuple[Split, ...], size: int | None = None
) -> Variant:
    """Split a graph and cost it. ``size``: the only micro-batch size that is costed, in a fifth of the time of all."""
    split = split_neurons(graph, splits)
    log.info("%d ops split into blocks: %d ops instead of %d", len(splits), len(split), len(graph))
    if size is None:
        return Variant(split, costs_of(split, cluster), splits)
    return Variant(
        split, cost_graph(split, device_kind=cluster.devices[0].counted_as, only_size=size), splits
    )


def layer_start(request: FreeRequest, judge: Judge) -> Outcome | None:
    """Plan the same request layer-wise; None where there is no such plan, or it breaks a pin."""
    if request.splits:
        return None
    if request.start is not None:
        return request.start
    one_batch = request.objective == "latency" and request.microbatches == "auto"
    layers = LayerRequest(
        request.job,
        microbatches=1 if one_batch else request.microbatches,
        time_limit_seconds=request.time_limit_seconds,
    )
    try:
        placed = place_stages(layers, judge)
    except (InfeasibleError, TimeLimitError) as error:
        log.info("no layer-wise plan to start from: %s", error.what)
        return None
    rank_of = placed.best.candidate.rank_of
    for node in judge.graph.ops:
        path = str(node.meta.get("module_path", ""))
        for glob, rank in request.pins.items():
            if matches(glob, node.name, path) and rank_of.get(node.name, rank) != rank:
                return None
    return placed


@dataclass(frozen=True, eq=False)
class Attempt:
    """The best placement of a variant, with its segments as they are."""

    variant: Variant
    judge: ListJudge
    search: Outcome
    carried: Carried

    @property
    def label(self) -> Label:
        """Label of the attempt in comparisons of plans."""
        count = self.search.best.candidate.microbatches
        return Label.of_variant(len(self.carried.realized.groups), count, len(self.variant.splits))


def place_variant(
    variant: Variant,
    cluster: ClusterSpec,
    request: FreeRequest,
    start: Outcome | None,
    before: Sequence[Candidate],
    budget: TimeBudget,
) -> Attempt:
    """Search the best placement of a variant. ``before``: placements of other variants to begin with too."""
    graph, costs = variant.graph, variant.costs
    judge = ListJudge(graph, costs, cluster, request.job)
    starts = list(_starts(variant, cluster, judge.recomputed, start, before))
    search = place_free(graph, costs, cluster, request, judge, starts)
    return Attempt(variant, judge, search, judge.finished(search.best.candidate, budget.left_seconds))


def _starts(
    variant: Variant,
    cluster: ClusterSpec,
    recomputed: frozenset[str],
    start: Outcome | None,
    before: Sequence[Candidate],
) -> Iterator[Candidate]:
    """Yield placements to start from, with blocks apart in all of them.

    The layer-wise plan; placements of other variants; everything but blocks on the fastest device.
    """
    shape = variant.shape
    ranks = tuple(range(cluster.world_size)) if shape is None else shape.ranks
    m = None if shape is None else shape.microbatches
    origin, world = Origin.BLOCKS_APART if variant.splits else Origin.LAYER_WISE, cluster.world_size
    if start is not None:
        known = start.best.candidate
        placed = _with_blocks(variant.graph, recomputed, known.rank_of, ranks)
        yield anywhere(placed, world, m or known.microbatches, Trail.of(origin))
    for candidate in before:
        placed = _with_blocks(variant.graph, recomputed, candidate.stage_of, ranks)
        yield anywhere(placed, world, m or candidate.microbatches, candidate.trail.then(origin))
    if shape is not None:
        together = {
            node.name: ranks[0] for node in variant.graph.ops if node.name not in variant.graph.blocks
        }
        placed = _with_blocks(variant.graph, recomputed, together, ranks)
        yield anywhere(placed, world, shape.microbatches, Trail.of(origin))


def _with_blocks(
    graph: OpGraph, recomputed: frozenset[str], known: Mapping[str, int], ranks: Sequence[int]
) -> dict[str, int]:
    """Place ops as ``known`` says, block k on ``ranks[k]``, and other new ops beside what they read."""
    rank_of: dict[str, int] = {}
    for node in graph.ops:
        if node.name in recomputed:
            continue
        sources = [rank_of[source.name] for source in node.all_input_nodes if source.name in rank_of]
        if node.name in known:
            rank_of[node.name] = known[node.name]
        elif node.name in graph.blocks:
            _, number = graph.blocks[node.name]
            rank_of[node.name] = ranks[number % len(ranks)]
        else:
            rank_of[node.name] = sources[-1] if sources else ranks[0]
    return rank_of
