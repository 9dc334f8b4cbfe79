"""One plan out of the strategies: the hybrid search's, or a free placement that was started from it and is faster.

The free search is begun where it can win, in what is left of the time: not where the hybrid plan is proved good enough, no
pipeline of single devices came near it, or no part of the model can run beside another.

Where the model couples samples, the batch stays in one piece, and what cutting it all the same would bring is told:

    a plan         its note says why, and what several micro-batches would take instead
    nothing fits   the error says why, and whether several micro-batches would fit
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cost_models.cluster import ClusterSpec
from cost_models.errors import InfeasibleError, PartitionerError, TimeLimitError, UsageError
from cost_models.room import FILLS
from cost_models.units import counted, format_seconds, percent
from partitioner.record.data import PlanT
from partitioner.record.describe import describe
from passes.compile import Compiled, compile_graph
from passes.costs.costs import costs_of
from passes.graph.graph import OpGraph
from passes.interrupts import may_be_lost
from passes.search.certificate import Alternative
from passes.search.free.request import FreeRequest
from passes.search.judge import Judge, Simulated, fastest_fitting
from passes.search.layer.request import LayerRequest, branches
from passes.search.outcome import Outcome
from passes.search.request import Request
from passes.search.strategies import search
from passes.search.words import AUTO_NOT_CONSIDERED, STRATEGY_WORDS
from passes.timings import run_pass


def best_plan(kind: type[PlanT], graph: OpGraph, cluster: ClusterSpec, requests: Sequence[Request]) -> PlanT:
    """Make the plan of the fastest strategy, of class ``kind``. ``requests``: each starts from what was found before it.

    Where none is safe at their risk: the plan that there would be at any, with what would make it safe. It is searched for
    in a time of its own, so that it is found as often as without a limit of risk.

    Raises what the only strategy raises, or InfeasibleError if none fits. On Ctrl-C: of those planned so far.
    """
    risk = requests[0].job.risk
    try:
        return best_in_room(kind, graph, cluster, requests)
    except InfeasibleError as unsafe:
        if risk >= FILLS:
            raise
        filling = [replace(request, job=replace(request.job, risk=FILLS)) for request in requests]
        try:
            plan = best_in_room(kind, graph, cluster, filling)
        except InfeasibleError as error:
            raise InfeasibleError(error.what, error.because, unsafe.suggestions) from error
        assert plan.risk is not None
        ways = tuple(unsafe.suggestions) if plan.risk.chance > risk else ()
        return plan.model_copy(update={"risk": plan.risk.model_copy(update={"allowed": risk, "ways": ways})})


def best_in_room(
    kind: type[PlanT], graph: OpGraph, cluster: ClusterSpec, requests: Sequence[Request]
) -> PlanT:
    """Make the plan of the fastest strategy among those that are safe at the requests' risk, as :func:`best_plan` else."""
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
    compiled_plans: list[Compiled] = []
    failures: dict[str, PartitionerError] = {}
    stopped, left_out = False, ""
    for request in requests:
        left_out = _cannot_win(request, compiled_plans, graph, cluster)
        if left_out:
            break
        try:
            with may_be_lost(bool(compiled_plans)):
                compiled_plans.append(compile_graph(graph, cluster, _started(request, compiled_plans)))
        except KeyboardInterrupt:
            if not compiled_plans:
                raise
            stopped = True
            break
        except (InfeasibleError, TimeLimitError) as error:
            failures[STRATEGY_WORDS[request.strategy].adverb] = error
    if not compiled_plans:
        raise InfeasibleError(
            f"{graph.model_name} fits {cluster.name} by no strategy",
            [f"{name}: {reason}" for name, error in failures.items() for reason in error.because],
            [way for error in failures.values() for way in error.suggestions],
        )
    best = min(compiled_plans, key=lambda compiled: compiled.outcome.best.step_seconds)
    plan = _plan(kind, graph, cluster, best)
    others = [_alternative(compiled, best) for compiled in compiled_plans if compiled is not best]
    others += [
        Alternative(name, False, "; ".join(error.because) or error.what, None, None)
        for name, error in failures.items()
    ]
    status = "interrupted" if stopped else plan.certificate.solver_status
    return plan.model_copy(
        update={
            "alternatives": (*others, *plan.alternatives),
            "not_considered": plan.not_considered if left_out else AUTO_NOT_CONSIDERED,
            "certificate": replace(plan.certificate, solver_status=status),
            "notes": (*why_it_won(best, compiled_plans, left_out), *plan.notes),
        }
    )


def _plan(kind: type[PlanT], graph: OpGraph, cluster: ClusterSpec, compiled: Compiled) -> PlanT:
    return run_pass(
        "describe", lambda plan: counted(len(plan.stages), "stage"), describe, kind, graph, cluster, compiled
    )


def _started(request: Request, compiled_plans: Sequence[Compiled]) -> Request:
    """Let a free search begin with the fastest pipeline of single devices that was simulated, in the time that is left."""
    if not compiled_plans or not isinstance(request, FreeRequest):
        return request
    outcome, left = compiled_plans[0].outcome, _seconds_left(request, compiled_plans)
    alone = _fastest_of(outcome, "devices")
    start = None if alone is None else replace(outcome, best=alone)
    return replace(request, start=start, time_limit_seconds=left)


def _seconds_left(request: Request, compiled_plans: Sequence[Compiled]) -> float | None:
    limit = request.time_limit_seconds
    spent = sum(compiled.outcome.certificate.search_seconds for compiled in compiled_plans)
    return None if limit is None else limit - spent


def _cannot_win(
    request: Request, compiled_plans: Sequence[Compiled], graph: OpGraph, cluster: ClusterSpec
) -> str:
    """Say why a free search after the plans so far would find nothing faster; nothing where it may."""
    if not compiled_plans or not isinstance(request, FreeRequest):
        return ""
    outcome, left = compiled_plans[0].outcome, _seconds_left(request, compiled_plans)
    certificate, step = outcome.certificate, outcome.best.step_seconds
    if certificate.gap <= request.gap:
        return f"this one is proved to be within {percent(request.gap)} of the best pipelines and shardings"
    if certificate.simulated_lower_bound_seconds >= step * (1 - request.gap):
        return f"no plan at all is faster by more than {percent(request.gap)}"
    if _fastest_of(outcome, "devices") is None:
        return f"no {FAMILIES['devices']} came near"
    if left is not None and left <= 0:
        return "the time was up"
    if not branches(graph, costs_of(graph, cluster), cluster, LayerRequest(request.job)):
        return "no part of the model can run beside another, pipelines and shardings have all of it"
    return ""


def _alternative(compiled: Compiled, best: Compiled) -> Alternative:
    other = compiled.outcome.best
    name = f"{STRATEGY_WORDS[compiled.request.strategy].adverb}, the best found"
    slower = _slower(other, best.outcome.best)
    return Alternative(name, True, slower, other.step_seconds, max(other.peak_bytes), other.chance)


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


def why_it_won(best: Compiled, compiled_plans: Sequence[Compiled], left_out: str) -> list[str]:
    """Say in two sentences what the best is, and how much faster than the best of every other kind.

    ``left_out``: why no free placement was looked for, if it was not.
    """
    first, won = compiled_plans[0].outcome, best.outcome.best
    others = [family for family in FAMILIES if best is not compiled_plans[0] or family != _family(won)]
    compared, too_slow = [], []
    for family in others:
        rival = _fastest_of(first, family)
        if rival is None:
            too_slow.append(f"no {FAMILIES[family]}")
        else:
            compared.append(f"the best {FAMILIES[family]} that was simulated is {_slower(rival, won)}")
    sentence = f"{best.outcome.label}, takes {format_seconds(won.step_seconds)} a step: {', '.join(compared)}"
    if too_slow:
        sentence += (
            f"{'; ' if compared else ''}{' and '.join(too_slow)} that fits came near enough to be simulated"
        )
    sentences = [f"{sentence}."]
    if left_out:
        sentences.append(f"Placements op by op were not looked for: {left_out}.")
    for compiled in compiled_plans[1:]:
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
        return search(freed, judge).best
    except (InfeasibleError, TimeLimitError):
        return None
