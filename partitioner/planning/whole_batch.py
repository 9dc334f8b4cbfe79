"""Batches that stay in one piece, for the model couples samples: what cutting them all the same would bring.

a plan         its note says why, and what several micro-batches would take instead
nothing fits   the error says why, and whether several micro-batches would fit
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cost_models.cluster import ClusterSpec
from cost_models.errors import InfeasibleError, PartitionerError, TimeLimitError
from cost_models.units import counted, format_seconds
from partitioner.record.data import PlanT
from passes.costs.costs import costs_of
from passes.graph.graph import OpGraph
from passes.interrupts import may_be_lost
from passes.search.judge import Judge, Simulated
from passes.search.request import Request
from passes.search.strategies import search
from passes.search.words import STRATEGY_WORDS

OPTION = "micro_couplings=True (--micro-couplings)"


def with_price(plan: PlanT, graph: OpGraph, cluster: ClusterSpec, request: Request) -> PlanT:
    """Note in ``plan`` why its batch is in one piece, and how much faster others would be. ``request``: the plan's own.

    What is left of the search's time is spent on them.
    """
    limit, spent = request.time_limit_seconds, plan.certificate.search_seconds
    left = None if limit is None else limit - spent
    other = None
    if left is None or left > 0:
        try:
            with may_be_lost():
                other = _in_pieces(graph, cluster, request, left)
        except KeyboardInterrupt:
            left = 0.0
    took = plan.prediction.step_seconds
    if other is not None and other.candidate.microbatches > 1 and other.step_seconds < took:
        says = f"{_taking(other)} a step instead of {format_seconds(took)}, and compute that per micro-batch: {OPTION}"
    elif left is None or left > 0:
        adverb = STRATEGY_WORDS[request.strategy].adverb
        says = f"planned {adverb}, several would not be faster ({OPTION})"
    else:
        says = f"{OPTION} allows several"
    note = f"one micro-batch, for {request.whole_batch}; {says}"
    return plan.model_copy(update={"notes": (note, *plan.notes)})


def with_way_out(
    error: PartitionerError, graph: OpGraph, cluster: ClusterSpec, requests: Sequence[Request]
) -> PartitionerError:
    """Return ``error`` with the reason why the batch is in one piece, and what fits if it need not be."""
    ways = []
    for request in requests:
        other = _in_pieces(graph, cluster, request, request.time_limit_seconds)
        if other is not None:
            ways.append(f"{OPTION}: {_taking(other)} a step, and compute that per micro-batch")
            break
    because = [*error.because, f"the batch stays in one micro-batch, for {requests[0].whole_batch}"]
    return type(error)(error.what, because, [*ways, *error.suggestions])


def _taking(other: Simulated) -> str:
    count = counted(other.candidate.microbatches, "micro-batch")
    return f"{count} would take {format_seconds(other.step_seconds)}"


def _in_pieces(
    graph: OpGraph, cluster: ClusterSpec, request: Request, seconds: float | None
) -> Simulated | None:
    """Search any number of micro-batches; None if nothing fits or is found in time."""
    freed = replace(request, microbatches="auto", whole_batch="", time_limit_seconds=seconds)
    judge = Judge(graph, costs_of(graph, cluster), cluster, request.job)
    try:
        return search(graph, judge.costs, cluster, freed, judge).best
    except (InfeasibleError, TimeLimitError):
        return None
