"""One plan out of several strategies: the fastest in simulation that fits; the others are its alternatives."""

from __future__ import annotations

from collections.abc import Sequence

from cost_models.cluster import ClusterSpec
from cost_models.errors import InfeasibleError, PartitionerError, TimeLimitError
from cost_models.units import counted, percent
from partitioner.record.data import PlanData, PlanT
from partitioner.record.describe import describe
from partitioner.record.records import Alternative
from passes.compile import compile_graph
from passes.graph.graph import OpGraph
from passes.interrupts import may_be_lost
from passes.search.request import Request
from passes.search.strategies import STRATEGIES
from passes.search.words import AUTO_NOT_CONSIDERED
from passes.timings import run_pass


def best_plan(kind: type[PlanT], graph: OpGraph, cluster: ClusterSpec, requests: Sequence[Request]) -> PlanT:
    """Make the plan of the fastest strategy, of class ``kind``.

    Raises what the only strategy raises, or InfeasibleError if none fits. On Ctrl-C: of those planned so far.
    """
    if len(requests) == 1:
        return _plan(kind, graph, cluster, requests[0])
    plans: list[PlanT] = []
    failures: dict[str, PartitionerError] = {}
    stopped = False
    for request in requests:
        try:
            with may_be_lost(bool(plans)):
                plans.append(_plan(kind, graph, cluster, request))
        except KeyboardInterrupt:
            if not plans:
                raise
            stopped = True
            break
        except (InfeasibleError, TimeLimitError) as error:
            failures[STRATEGIES[request.strategy].words.adverb] = error
    if not plans:
        raise InfeasibleError(
            f"{graph.model_name} fits {cluster.name} by no strategy",
            [f"{name}: {reason}" for name, error in failures.items() for reason in error.because],
            [way for error in failures.values() for way in error.suggestions],
        )
    best = min(plans, key=lambda plan: plan.prediction.step_seconds)
    others = [_alternative(plan, best) for plan in plans if plan is not best]
    others += [
        Alternative(
            strategy=name,
            feasible=False,
            reason="; ".join(error.because) or error.what,
            step_seconds=None,
            peak_memory_bytes=None,
        )
        for name, error in failures.items()
    ]
    status = "interrupted" if stopped else best.certificate.solver_status
    return best.model_copy(
        update={
            "alternatives": (*others, *best.alternatives),
            "not_considered": AUTO_NOT_CONSIDERED,
            "certificate": best.certificate.model_copy(update={"solver_status": status}),
        }
    )


def _plan(kind: type[PlanT], graph: OpGraph, cluster: ClusterSpec, request: Request) -> PlanT:
    compiled = compile_graph(graph, cluster, request)
    return run_pass(
        "describe", lambda plan: counted(len(plan.stages), "stage"), describe, kind, graph, cluster, compiled
    )


def _alternative(plan: PlanData, best: PlanData) -> Alternative:
    slower = plan.prediction.step_seconds / best.prediction.step_seconds - 1
    return Alternative(
        strategy=f"{STRATEGIES[plan.strategy].words.adverb}, the best found",
        feasible=True,
        reason=f"{percent(slower)} slower",
        step_seconds=plan.prediction.step_seconds,
        peak_memory_bytes=max(plan.prediction.peak_memory_bytes.values()),
    )
