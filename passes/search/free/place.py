"""The free search: any op on any device.

    OpGraph ─► units ─► placements by cuts, moves and integer programs ─► the best simulated as programs
            ─► moved while the simulated step gets shorter ─► the best that fits is the plan, with its certificate

The layer-wise plan and whatever else is given as a start are candidates too: the plan is never worse than they are.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from cost_models.cluster import ClusterSpec
from cost_models.errors import InfeasibleError
from cost_models.units import counted
from passes.costs.costs import GraphCosts
from passes.graph.graph import OpGraph
from passes.lower.candidate import Candidate, Origin, Trail
from passes.progress import report_option
from passes.search.anywhere.problem import evaluate
from passes.search.bound import Bound, BoundMethod, PhaseTimes, whole_ops_bound
from passes.search.certificate import Certificate, relative_gap
from passes.search.fastest import ROOM_LEFT
from passes.search.free.judge import FreeJudge
from passes.search.free.model import FreeModel, read_free_model
from passes.search.free.request import FreeRequest, counts_to_try, resolved_pins
from passes.search.free.search import PROVED, CountSearch
from passes.search.infeasible import shortfalls
from passes.search.judge import Judge, Simulated, memory_rounds
from passes.search.microbatches import spread
from passes.search.outcome import Label, Outcome, RunnerUp

log = logging.getLogger("partitioner")

THROUGHPUT = "busiest device, messages included"
LATENCY = "makespan of one micro-batch, list schedule"
CLIMBED = Trail.of(Origin.MOVED_IN_SIMULATION)
LEAST_SECONDS, MOST_SECONDS, CHOICES_PER_SECOND = 8.0, 40.0, 50.0
"""Limit of a search without one: the least, and a second more for so many ops times devices, up to the most."""
SEARCH_SHARE, SIMULATE_SHARE = 0.5, 0.75
"""Shares of the time after which searching ends, and simulating what was found; the rest is for climbing."""
LATE = 0.98
"""Share of the limit: a search that took more was ended by the limit, its certificate says."""
SIMULATIONS = 12
"""Placements simulated at most before climbing."""
NEAR = 1.01
"""Multiple of its step at which a placement that overflows is still worth searching again for."""


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
    started, choices = time.perf_counter(), len(graph) * len(cluster.devices)
    limit = request.time_limit_seconds or min(MOST_SECONDS, LEAST_SECONDS + choices / CHOICES_PER_SECOND)
    counts = counts_to_try(graph, request)
    recomputed, job = judge.recomputed, request.job
    pins = resolved_pins(graph, recomputed, request, cluster)
    model = read_free_model(
        graph, costs, cluster, recomputed, job, pins, max(1, job.batch_size // counts[-1])
    )
    free = FreeJudge(judge)
    first = [start for start in starts if start.microbatches in counts and _legal(model, start.stage_of)]
    for start in first:
        free.candidate(start)
    searches: list[CountSearch] = []

    def look(number: int, scale: float) -> float | None:
        """Search with this share of the memory, and simulate; the share to try next, or None."""
        left = started + limit - time.perf_counter()
        if number and left < 0.1 * limit and free.best() is not None:
            return None
        begun = time.perf_counter()
        search = _search(model, request, counts, first, scale, begun + SEARCH_SHARE * left)
        searches.append(search)
        _simulate(free, search, begun + SIMULATE_SHARE * left)
        missed = _missed(free)
        if missed is None:
            return None
        smaller = scale * ROOM_LEFT * _estimated_share(free, missed)
        log.info("the fastest placements overflow; searching again with %.0f%% of the memory", 100 * smaller)
        return smaller

    memory_rounds(look, 1.0)
    if free.best() is None:
        raise _infeasible(request, judge)
    climbed = free.climb(started + limit, seed=searches[-1].seed)
    best = free.best()
    assert best is not None
    spent = time.perf_counter() - started
    log.info("free search: %d simulated, %d while climbing, %.2f s", len(judge.tried), climbed, spent)
    certificate = _certificate(model, request, counts, best, searches, spent)
    if certificate.gap > PROVED and spent > LATE * limit:
        certificate = replace(certificate, solver_status="time limit")
    return Outcome(best, judge, certificate, _runner_ups(judge.tried, best))


def _legal(model: FreeModel, rank_of: Mapping[str, int]) -> bool:
    """Tell whether a start obeys pins and keeps together what must be."""
    names = model.layers.names
    if any(name not in rank_of for name in names):
        return False
    if any(rank_of[names[op]] != rank for op, rank in model.pins.items()):
        return False
    return all(len({rank_of[names[op]] for op in group}) == 1 for group in model.together)


def _infeasible(request: FreeRequest, judge: Judge) -> InfeasibleError:
    """Say what overflows least, by how much on which device, and what would help."""
    least = min(judge.tried, key=lambda s: s.overflow_bytes)
    count = counted(least.candidate.microbatches, "micro-batch")
    ways = ["devices with more memory, or more of them", "a smaller batch"]
    if request.microbatches != "auto":
        ways.insert(0, "more micro-batches, or their number left open")
    if request.pins:
        ways.append("fewer pins")
    ways.append("the layer-wise strategy with recompute")
    return InfeasibleError(
        f"no free placement of {judge.graph.model_name} was found that fits {judge.cluster.name}",
        [
            f"{count}, the least-bad of {counted(len(judge.tried), 'simulated placement')}:",
            *shortfalls(enumerate(least.peak_bytes), judge.cluster.devices),
        ],
        ways,
    )


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
) -> CountSearch:
    """Search the number of micro-batches in depth whose first placements are predicted best."""
    looked: dict[int, tuple[float, CountSearch]] = {}

    def look(count: int) -> None:
        if count in looked:
            return
        report_option(counted(count, "micro-batch"))
        search = CountSearch(model, request.job.batch_size, count, scale)
        for start in starts:
            search.offer(model.home_of(start.stage_of, search.problem), start.trail)
        looked[count] = search.start(), search

    for count in [start.microbatches for start in starts] or spread(counts):
        if looked and time.perf_counter() > deadline:
            break
        look(count)
    before = 0
    while before < len(looked) and time.perf_counter() < deadline:
        before = len(looked)
        at = counts.index(min(looked, key=lambda count: looked[count][0]))
        for beside in counts[max(0, at - 1) : at + 2]:
            look(beside)
    _, search = min(looked.values(), key=lambda pair: pair[0])
    if time.perf_counter() < deadline:
        search.run(deadline)
    return search


def _simulate(judge: FreeJudge, search: CountSearch, deadline: float) -> None:
    """Simulate the best in the order of predictions, until ``deadline``; one whatever the time."""
    for each in search.ranked(SIMULATIONS):
        if time.perf_counter() + judge.each_seconds > deadline and judge.best() is not None:
            return
        if not judge.seen(search, each.home):
            judge.placement(search, each.home, each.trail)


def _missed(judge: FreeJudge) -> Simulated | None:
    """Return the placement that overflows least, if one that overflows is faster than all that fit."""
    best = judge.best()
    seconds = math.inf if best is None else best.step_seconds
    over = [
        judge.tried[i]
        for i in judge.homes
        if not judge.tried[i].fits and judge.tried[i].step_seconds * NEAR < seconds
    ]
    return min(over, key=lambda s: s.overflow_bytes, default=None)


def _estimated_share(judge: FreeJudge, missed: Simulated) -> float:
    """Return estimated / simulated bytes of tensors, of the memory left for them: the least where it is short, or 1."""
    search, home = next(judge.homes[i] for i in judge.homes if judge.tried[i] is missed)
    estimated = evaluate(search.problem, home).memory_bytes.tolist()
    devices = judge.judge.cluster.devices
    shares = [
        own / held * (room / (device.room_bytes - device.context_bytes))
        for own, (held, room), device in zip(estimated, missed.tensors_of(devices), devices, strict=True)
        if held > room
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
    looked = [search for search in searches if search.microbatches == m] or [CountSearch(model, size, m)]
    search = max(looked, key=lambda search: search.bound.seconds)
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
    if proved.seconds > objective * (1 + PROVED) and not fits:
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
        solver_status="optimal" if gap <= PROVED else "stalled",
        search_seconds=search_seconds,
    )
