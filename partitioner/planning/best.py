"""One plan out of the strategies: the hybrid search's, or a free placement that was started from it and is faster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cost_models.cluster import ClusterSpec
from cost_models.errors import InfeasibleError, PartitionerError, TimeLimitError, UsageError
from cost_models.units import counted, format_seconds, percent
from partitioner.planning.whole_batch import with_price, with_way_out
from partitioner.record.data import PlanT
from partitioner.record.describe import describe
from partitioner.record.records import Alternative
from passes.compile import Compiled, compile_graph
from passes.graph.graph import OpGraph
from passes.interrupts import may_be_lost
from passes.search.free.request import FreeRequest
from passes.search.judge import Simulated, fastest_fitting
from passes.search.outcome import Outcome
from passes.search.request import Request
from passes.search.words import AUTO_NOT_CONSIDERED, STRATEGY_WORDS
from passes.timings import run_pass


def best_plan(kind: type[PlanT], graph: OpGraph, cluster: ClusterSpec, requests: Sequence[Request]) -> PlanT:
    """Make the plan of the fastest strategy, of class ``kind``. ``requests``: each starts from what was found before it.

    Raises what the only strategy raises, or InfeasibleError if none fits. On Ctrl-C: of those planned so far.
    """
    if not requests[0].whole_batch:
        return _fastest_plan(kind, graph, cluster, requests)
    try:
        plan = _fastest_plan(kind, graph, cluster, requests)
    except (InfeasibleError, UsageError) as error:
        raise with_way_out(error, graph, cluster, requests) from error
    return with_price(plan, graph, cluster, next(r for r in requests if r.strategy == plan.strategy))


def _fastest_plan(
    kind: type[PlanT], graph: OpGraph, cluster: ClusterSpec, requests: Sequence[Request]
) -> PlanT:
    if len(requests) == 1:
        return _plan(kind, graph, cluster, compile_graph(graph, cluster, requests[0]))
    found: list[Compiled] = []
    failures: dict[str, PartitionerError] = {}
    stopped = False
    for request in requests:
        try:
            with may_be_lost(bool(found)):
                found.append(compile_graph(graph, cluster, _started(request, found)))
        except KeyboardInterrupt:
            if not found:
                raise
            stopped = True
            break
        except (InfeasibleError, TimeLimitError) as error:
            failures[STRATEGY_WORDS[request.strategy].adverb] = error
    if not found:
        raise InfeasibleError(
            f"{graph.model_name} fits {cluster.name} by no strategy",
            [f"{name}: {reason}" for name, error in failures.items() for reason in error.because],
            [way for error in failures.values() for way in error.suggestions],
        )
    best = min(found, key=lambda compiled: compiled.outcome.best.step_seconds)
    plan = _plan(kind, graph, cluster, best)
    others = [_alternative(compiled, best) for compiled in found if compiled is not best]
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
    status = "interrupted" if stopped else plan.certificate.solver_status
    return plan.model_copy(
        update={
            "alternatives": (*others, *plan.alternatives),
            "not_considered": AUTO_NOT_CONSIDERED,
            "certificate": replace(plan.certificate, solver_status=status),
            "notes": (*why_it_won(best, found), *plan.notes),
        }
    )


def _plan(kind: type[PlanT], graph: OpGraph, cluster: ClusterSpec, compiled: Compiled) -> PlanT:
    return run_pass(
        "describe", lambda plan: counted(len(plan.stages), "stage"), describe, kind, graph, cluster, compiled
    )


def _started(request: Request, found: Sequence[Compiled]) -> Request:
    """Let a free search begin with the fastest pipeline of single devices that was simulated."""
    if not found or not isinstance(request, FreeRequest):
        return request
    outcome = found[0].outcome
    alone = fastest_fitting([s for s in outcome.judge.tried if not s.candidate.shardings])
    return request if alone is None else replace(request, start=replace(outcome, best=alone))


def _alternative(compiled: Compiled, best: Compiled) -> Alternative:
    own = compiled.outcome.best
    return Alternative(
        strategy=f"{STRATEGY_WORDS[compiled.request.strategy].adverb}, the best found",
        feasible=True,
        reason=_slower(own, best.outcome.best),
        step_seconds=own.step_seconds,
        peak_memory_bytes=max(own.peak_bytes),
    )


def _slower(other: Simulated, best: Simulated) -> str:
    return f"{percent(other.step_seconds / best.step_seconds - 1)} slower"


FAMILIES = {
    "devices": "pipeline of single devices",
    "mesh": "sharding over all devices",
    "groups": "pipeline of device groups",
}
"""The kinds of plans that the hybrid search compares, in words."""


def _family(simulated: Simulated) -> str:
    candidate = simulated.candidate
    if not candidate.shardings:
        return "devices"
    return "mesh" if len(candidate.groups) == 1 else "groups"


def why_it_won(best: Compiled, found: Sequence[Compiled]) -> list[str]:
    """Say in two sentences what the best is, and how much faster than the best of every other kind."""
    first, won = found[0].outcome, best.outcome.best
    others = [family for family in FAMILIES if best is not found[0] or family != _family(won)]
    compared, left_out = [], []
    for family in others:
        own = _fastest_of(first, family)
        if own is None:
            left_out.append(f"no {FAMILIES[family]}")
        else:
            compared.append(f"the best {FAMILIES[family]} is {_slower(own, won)}")
    sentence = f"{best.outcome.label}, takes {format_seconds(won.step_seconds)} a step: {', '.join(compared)}"
    if left_out:
        sentence += (
            f"{'; ' if compared else ''}{' and '.join(left_out)} that fits came near enough to be simulated"
        )
    sentences = [f"{sentence}."]
    for compiled in found[1:]:
        adverb = STRATEGY_WORDS[compiled.request.strategy].adverb
        if compiled is best:
            sentences.append(
                f"It is {adverb}, op by op, and was looked for from the fastest pipeline of single devices."
            )
        else:
            sentences.append(
                f"A {adverb} placement, op by op, is {_slower(compiled.outcome.best, won)} at best."
            )
    return sentences


def _fastest_of(outcome: Outcome, family: str) -> Simulated | None:
    return fastest_fitting([s for s in outcome.judge.tried if _family(s) == family])
