"""The free search: any op on any device.

    OpGraph ─► units ─► placements by cuts, moves and integer programs ─► the best simulated as programs
            ─► moved while the simulated step gets shorter ─► the best that fits is the plan, with its certificate

The layer-wise plan and whatever else is given as a start are candidates too: the plan is never worse than they are.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from cost_models.cluster import ClusterSpec
from cost_models.units import counted
from passes.costs.costs import GraphCosts
from passes.graph.graph import OpGraph
from passes.lower.candidate import Candidate, Origin, Trail
from passes.progress import report_option
from passes.search.bound import Bound, BoundMethod, PhaseTimes, whole_ops_bound
from passes.search.certificate import Certificate, relative_gap
from passes.search.free.choices import counts_to_try, infeasible, resolved_pins, usable_starts
from passes.search.free.judge import FreeJudge
from passes.search.free.model import FreeModel, read_free_model
from passes.search.free.problem import evaluate
from passes.search.free.request import FreeRequest
from passes.search.free.search import CountSearch
from passes.search.judge import Judge, Simulated, memory_rounds
from passes.search.outcome import Label, Outcome, RunnerUp

log = logging.getLogger("partitioner")

THROUGHPUT = "busiest device, messages included"
CLIMBED = Trail.of(Origin.MOVED_IN_SIMULATION)
LATENCY = "makespan of one micro-batch, list schedule"


def place_free(
    graph: OpGraph,
    costs: GraphCosts,
    cluster: ClusterSpec,
    request: FreeRequest,
    judge: Judge,
    starts: Sequence[Candidate] = (),
) -> Outcome:
    """Search, simulate the best candidates and their neighbours, return the best that fits.

    ``starts`` are simulated first. Raises ``UsageError`` for pins that cannot hold, ``InfeasibleError`` if nothing fits.
    """
    tuning, started = request.tuning, time.perf_counter()
    choices = len(graph) * len(cluster.devices)
    limit = request.time_limit_seconds or min(
        tuning.most_seconds, tuning.least_seconds + choices / tuning.choices_per_second
    )
    counts = counts_to_try(graph, request)
    recomputed, job = judge.recomputed, request.job
    pins = resolved_pins(graph, recomputed, request, cluster)
    work_size = max(1, job.batch_size // counts[-1])
    model = read_free_model(graph, costs, cluster, recomputed, job, pins, work_size, tuning.most_tasks)
    free = FreeJudge(judge, tuning)
    first = usable_starts(model, starts, counts)
    for start in first:
        free.candidate(start)
    searches: list[CountSearch] = []

    def look(number: int, scale: float) -> float | None:
        """Search with this share of the memory, and simulate; the share to try next, or None."""
        nonlocal searches
        left = started + limit - time.perf_counter()
        if number and left < 0.1 * limit and free.best() is not None:
            return None
        begun = time.perf_counter()
        room = max(0.1 * left, left - tuning.simulations_left * free.each_seconds)
        searches = _search(
            model, request, counts, first, scale, begun + min(tuning.search_share * left, room)
        )
        _simulate(free, searches, request, begun + tuning.simulate_share * left, started + limit)
        missed = _missed(free)
        if missed is None:
            return None
        smaller = scale * tuning.room_left * _estimated_share(free, missed)
        log.info("the fastest placements overflow; searching again with %.0f%% of the memory", 100 * smaller)
        return smaller

    memory_rounds(look, 1.0)
    if free.best() is None:
        raise infeasible(request, judge)
    climbed = free.climb(started + limit, seed=tuning.seed)
    best = free.best()
    assert best is not None
    spent = time.perf_counter() - started
    log.info("free search: %d simulated, %d while climbing, %.2f s", len(judge.tried), climbed, spent)
    certificate = _certificate(model, request, counts, best, searches, spent)
    if certificate.gap > tuning.proved and spent > tuning.late * limit:
        certificate = replace(certificate, solver_status="time limit")
    return Outcome(best, judge, certificate, _runner_ups(judge.tried, best))


def _runner_ups(tried: Sequence[Simulated], best: Simulated) -> tuple[RunnerUp, ...]:
    """List what was simulated and not chosen, fastest first, but for the neighbours that climbing looked at."""
    told = [s for s in tried if s is not best and s.candidate.trail != CLIMBED]
    return tuple(
        RunnerUp.of(Label.of_trail(s.candidate.trail, s.candidate.microbatches), s)
        for s in sorted(told, key=lambda s: s.step_seconds)
    )


def _search(
    model: FreeModel,
    request: FreeRequest,
    counts: Sequence[int],
    starts: Sequence[Candidate],
    scale: float,
    deadline: float,
) -> list[CountSearch]:
    """Search the best numbers of micro-batches in depth; return these searches, best predicted first."""
    tuning = request.tuning
    looked: dict[int, tuple[float, CountSearch]] = {}

    def look(count: int) -> None:
        if count in looked:
            return
        report_option(counted(count, "micro-batch"))
        search = CountSearch(model, request.job.batch_size, count, tuning.seed, scale, tuning)
        for start in starts:
            search.offer(model.home_of(start.stage_of, search.problem), start.trail)
        looked[count] = search.start(), search

    spread = np.unique(np.linspace(0, len(counts) - 1, tuning.first_counts).round().astype(int)).tolist()
    for count in [*(start.microbatches for start in starts), *(counts[i] for i in spread)]:
        if looked and time.perf_counter() > deadline:
            break
        look(count)
    for _ in range(2):
        best_count = min(looked, key=lambda count: looked[count][0])
        at = counts.index(best_count)
        for beside in counts[max(0, at - 1) : at + 2]:
            if time.perf_counter() < deadline:
                look(beside)
    ranked = sorted(looked.values(), key=lambda pair: pair[0])
    worth = [search for seconds, search in ranked if seconds <= tuning.worth_depth * ranked[0][0]][
        : tuning.deep_counts
    ]
    for number, search in enumerate(worth):
        now = time.perf_counter()
        for other in worth[:number]:  # what is good for one number is worth a look for the next
            for found in other.ranked(request.tuning.simulations):
                search.offer(found.home, found.trail)
        if now < deadline:
            latency = request.objective == "latency"
            search.run(now + (deadline - now) / (len(worth) - number), latency=latency)
    return worth


def _simulate(
    judge: FreeJudge, searches: Sequence[CountSearch], request: FreeRequest, deadline: float, end: float
) -> None:
    """Simulate the best of each number of micro-batches, in the order of predictions, until ``deadline``.

    The first is simulated even later, until ``end``.
    """
    chosen = [
        (search.predict(found.home), number, search, found)
        for number, search in enumerate(searches)
        for found in search.ranked(request.tuning.simulations)
    ]
    for _, _, search, found in sorted(chosen, key=lambda each: each[:2]):
        late = time.perf_counter() + judge.each_seconds > (deadline if judge.homes else end)
        if late and judge.best() is not None:
            return
        if not judge.seen(search, found.home):
            judge.placement(search, found.home, found.trail)


def _missed(judge: FreeJudge) -> Simulated | None:
    """Return the placement that overflows least, if one that overflows is faster than all that fit."""
    best = judge.best()
    seconds = math.inf if best is None else best.step_seconds
    over = [
        judge.tried[i]
        for i in judge.homes
        if not judge.tried[i].fits and judge.tried[i].step_seconds * 1.01 < seconds
    ]
    return min(over, key=lambda s: s.overflow_bytes, default=None)


def _estimated_share(judge: FreeJudge, missed: Simulated) -> float:
    """Return estimated / simulated bytes, the least of all devices that overflow; at most 1."""
    search, home = next(judge.homes[i] for i in judge.homes if judge.tried[i] is missed)
    estimated = evaluate(search.problem, home).memory_bytes.tolist()
    shares = [
        held / peak
        for held, peak, device in zip(estimated, missed.peak_bytes, judge.judge.cluster.devices, strict=True)
        if peak > device.memory_bytes
    ]
    return float(min([1.0, *shares]))


def _times(model: FreeModel, batch_size: int, microbatches: int) -> PhaseTimes:
    return model.layers.smallest_times(batch_size, microbatches, model.cluster.devices)


def _certificate(
    model: FreeModel,
    request: FreeRequest,
    counts: Sequence[int],
    best: Simulated,
    searches: Sequence[CountSearch],
    search_seconds: float,
) -> Certificate:
    """Certify the placement for its number of micro-batches: its surrogate, and a bound that none can beat."""
    m, size, rank_of = best.candidate.microbatches, request.job.batch_size, best.candidate.stage_of
    search = next((s for s in searches if s.microbatches == m), None)
    if search is None:
        search = CountSearch(model, size, m, tuning=request.tuning)
    devices = model.cluster.devices
    lower = min(whole_ops_bound(_times(model, size, count), count) for count in counts)
    ops = np.arange(len(model.layers.names))
    home = [rank_of[name] for name in model.layers.names]
    if request.objective == "latency":
        objective, name = search.predict(model.home_of(rank_of, search.problem)), LATENCY
        proved = Bound(whole_ops_bound(_times(model, size, m), m), BoundMethod.LONGEST_PATH)
    else:
        objective = evaluate(model.problem(ops, size, m), home).objective_seconds
        proved, name = search.bound, THROUGHPUT
    fits = proved.method is BoundMethod.INTEGER_PROGRAM
    fitting = " whose memory is estimated to fit" if fits else ""
    if proved.seconds > objective * (1 + request.tuning.proved) and not fits:
        text = "the bound by %s, %.6g s, is above what was found, %.6g s"
        log.warning(text, proved.method.value, proved.seconds, objective)
    bound = min(proved.seconds, objective)
    gap = relative_gap(objective, bound)
    return Certificate(
        objective=name,
        objective_seconds=objective,
        bound_seconds=bound,
        gap=gap,
        whole_ops_bound_seconds=lower,
        simulated_lower_bound_seconds=0.0,
        space=(
            f"every placement{fitting} of {search.exact.units} units ({len(ops)} ops; what must share a device is one) "
            f"on {counted(len(devices), 'device')}, {counted(m, 'micro-batch')}; searched over {search.problem.units} units"
        ),
        method=f"{', '.join(m.value for m in dict.fromkeys(search.methods)) or 'starts'}; bound: {proved.method.value}",
        solver_status="optimal" if gap <= request.tuning.proved else "stalled",
        search_seconds=search_seconds,
    )
