"""The layer-wise search: which ops, on which devices, in how many micro-batches, under which schedule.

    OpGraph ─► units ─► for every micro-batch count × schedule: the surrogate's exact minimum and other good splits
            ─► the best ones simulated as programs ─► the best that fits is the plan, with its certificate

The surrogate ranks, the simulation decides: the step time of unlike stages is not what the surrogate says.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from cost_models.cluster import ClusterSpec
from cost_models.errors import InfeasibleError
from cost_models.units import counted
from passes.costs.costs import GraphCosts
from passes.graph.graph import OpGraph
from passes.search.certificate import Certificate, relative_gap
from passes.search.judge import Judge, memory_rounds
from passes.search.layer.infeasible import infeasible
from passes.search.layer.judge import (
    Judged,
    SplitJudge,
    candidate_of,
    estimated_bytes,
    estimated_share,
    fastest_seconds,
)
from passes.search.layer.options import (
    ScheduleOption,
    device_table,
    microbatch_counts,
    options,
)
from passes.search.layer.search import LayerSearch, OptionResult, SolvedSplit
from passes.search.layer.spaces import spaces
from passes.search.layer.tuning import TUNING
from passes.search.microbatches import accepted_counts
from passes.search.model import read_model
from passes.search.outcome import Label, Outcome, RunnerUp
from passes.search.pins import resolve_pins
from passes.search.request import Request
from passes.search.words import RecomputeMode, StrategyName

log = logging.getLogger("partitioner")

OBJECTIVE = "fill * sum(stage + link seconds) + (microbatches - fill) * chunks * largest"
STAGES_RECOMPUTE = {
    "auto": "a stage that does not fit computes all its blocks again (the plan then keeps what fits)",
    "full": "every stage computes its blocks again",
}
"""The part of recompute in the surrogate, in words for the certificate."""


@dataclass(frozen=True)
class LayerRequest(Request):
    """A layer-wise plan is wanted. ``pins``: glob over module paths or op names -> stage."""

    strategy: ClassVar[StrategyName] = "layer"

    pins: Mapping[str, int] = field(default_factory=dict)
    schedule: str = "auto"
    max_stages: int | None = None
    min_stages: int | None = None
    """Devices with a stage, at least."""
    recompute: RecomputeMode = "auto"
    simulations: int = 12
    """Candidates simulated at most."""
    simulation_seconds: float = 20.0
    """Seconds after which no further candidate is simulated, once one fits."""


def place_layers(
    graph: OpGraph, costs: GraphCosts, cluster: ClusterSpec, request: LayerRequest, judge: Judge
) -> Outcome:
    """Search, simulate the best candidates, return the best that fits.

    ``time_limit_seconds`` bounds search and simulation; at least one candidate that fits is always simulated. Raises
    ``UsageError`` for pins that cannot hold, ``InfeasibleError`` with computed ways out if nothing fits.
    """
    started = time.perf_counter()
    limit = request.time_limit_seconds
    deadline = started + limit if limit is not None else float("inf")
    search = prepare(graph, costs, cluster, request)
    results = search.solve(started + 0.5 * (deadline - started))
    searched = time.perf_counter() - started
    log.info("layer search: %d options in %.2f s", len(results), searched)
    splits = SplitJudge(search, judge)
    tried = _simulate_until_one_fits(search, results, request, splits, deadline)
    tried += _on_one_device(search, splits, tried, deadline)
    best = min((t for t in tried if t.simulated.fits), key=lambda t: t.simulated.step_seconds)
    return Outcome(
        best.simulated,
        judge,
        _certificate(search, results, best.solved, searched),
        _runner_ups(search, tried, splits.bounded, best),
    )


def prepare(graph: OpGraph, costs: GraphCosts, cluster: ClusterSpec, request: LayerRequest) -> LayerSearch:
    """Everything that the search of ``request`` reads, as arrays."""
    _refuse_too_few_devices(cluster, request)
    model = read_model(graph, costs, request.job.optimizer, request.job.precision)
    paths = [str(graph.nodes[name].meta.get("module_path", "")) for name in model.names]
    pins = resolve_pins(request.pins, model.names, paths, model.readers, model.together)
    table = device_table(cluster)
    size_of_batch = request.job.batch_size
    counts = accepted_counts(graph, size_of_batch, microbatch_counts(size_of_batch, request.microbatches))
    size = max(1, size_of_batch // counts[-1])
    work = model.seconds(size, table.representatives[0])
    return LayerSearch(
        model=model,
        cluster=cluster,
        table=table,
        spaces=spaces(model, work, pins, size),
        batch_size=size_of_batch,
        pins=pins,
        max_stages=request.max_stages or 1 << 30,
        options=options(counts, request.schedule, len(cluster.devices)),
        min_stages=request.min_stages or 1,
        recompute=request.recompute,
    )


def _refuse_too_few_devices(cluster: ClusterSpec, request: LayerRequest) -> None:
    world = len(cluster.devices)
    if request.min_stages is not None and request.min_stages > world:
        raise InfeasibleError(
            f"no layer-wise plan uses {request.min_stages} devices",
            [f"the cluster has {world}, and min_stages is {request.min_stages}"],
            [f"min_stages={world} uses all of them", "a cluster with more devices"],
        )


def _on_one_device(
    search: LayerSearch, judge: SplitJudge, tried: Sequence[Judged], deadline: float
) -> list[Judged]:
    """Judge the best unsplit candidate, if it may win: messages that cost more than they save, only the simulation sees."""
    plain = [option for option in search.options if option.chunks == 1]
    if search.pins or search.min_stages > 1 or not plain or any(len(t.solved.ranks) == 1 for t in tried):
        return []
    one_schedule = [option for option in plain if option.schedule == plain[0].schedule]
    alone = replace(search, max_stages=1, options=one_schedule, _plans={})
    solved = [s for result in alone.solve(deadline) for s in result.solved]
    if not solved:
        return []
    judged = judge(min(solved, key=lambda s: s.split.objective_seconds), fastest_seconds(tried))
    return [] if judged is None else [judged]


def _simulate_until_one_fits(
    search: LayerSearch,
    results: Sequence[OptionResult],
    request: LayerRequest,
    judge: SplitJudge,
    deadline: float,
) -> list[Judged]:
    """Simulate the best candidates; if the fast ones overflow, search again as if devices were smaller.

    The splits of one option are much alike: after one that overflows, its others wait until nothing else fits.
    """
    tried: list[Judged] = []
    waiting: list[SolvedSplit] = []
    last_scale = 1.0
    enough = min(deadline, time.perf_counter() + request.simulation_seconds)

    def simulate(number: int, scale: float) -> float | None:
        """Simulate what is best with this share of the memory; the share to try next, or None."""
        nonlocal last_scale
        found = results if number == 0 else search.solve(deadline, scale)
        overflowing: dict[ScheduleOption, Judged] = {}
        for solved in _ranked(found, request.simulations):
            best_seconds = fastest_seconds(tried)
            if math.isfinite(best_seconds) and time.perf_counter() > enough:
                break
            if solved.option in overflowing:
                waiting.append(solved)
                continue
            judged = judge(solved, best_seconds)
            if judged is not None:
                tried.append(judged)
                if not judged.simulated.fits:
                    overflowing[solved.option] = judged
        best_seconds = fastest_seconds(tried)
        missed = [
            j for j in overflowing.values() if j.simulated.step_seconds * TUNING.another_search < best_seconds
        ]
        if not missed or (math.isfinite(best_seconds) and time.perf_counter() > enough):
            return None
        least = min(missed, key=lambda j: j.simulated.overflow_bytes)
        smaller = TUNING.room_left * estimated_share(search, least)
        log.info("the fastest candidates overflow; searching again with %.0f%% of the memory", 100 * smaller)
        last_scale = smaller
        return smaller

    memory_rounds(simulate, 1.0)
    for solved in waiting:
        if math.isfinite(fastest_seconds(tried)):
            break
        tried += [judged for judged in [judge(solved, math.inf)] if judged is not None]
    if math.isinf(fastest_seconds(tried)):
        least_bad = min(tried, key=lambda j: j.simulated.overflow_bytes, default=None)
        raise infeasible(search, request.microbatches == "auto", least_bad, last_scale)
    return tried


def _ranked(results: Sequence[OptionResult], count: int) -> list[SolvedSplit]:
    """Best first by surrogate, after the best of every schedule that is nearly as good and one cautious
    split."""
    solved = sorted((s for r in results for s in r.solved), key=lambda s: s.split.objective_seconds)
    if not solved:
        return []
    worth = solved[0].split.objective_seconds * TUNING.one_of_each
    first: dict[tuple[str, int], SolvedSplit] = {}
    for s in solved:
        if s.split.objective_seconds <= worth:
            first.setdefault((s.option.schedule, s.option.chunks), s)
    leaders = list(first.values())
    leaders += [s for s in solved if s.cautious and s not in leaders][:1]
    return [*leaders, *(s for s in solved if s not in leaders)][:count]


def _runner_ups(
    search: LayerSearch, tried: Sequence[Judged], bounded: Sequence[tuple[SolvedSplit, float]], best: Judged
) -> tuple[RunnerUp, ...]:
    """List what was judged and not chosen, by time."""
    found = [
        RunnerUp.of(Label.of_stages(judged.simulated.candidate), judged.simulated)
        for judged in tried
        if judged is not best
    ]
    for solved, seconds in bounded:
        label = Label.of_stages(candidate_of(search, solved))
        peak_bytes = round(max(estimated_bytes(search, solved)))
        found.append(RunnerUp(label, seconds, peak_bytes, bounded=True))
    return tuple(sorted(found, key=lambda runner_up: runner_up.step_seconds))


def _certificate(
    search: LayerSearch, results: Sequence[OptionResult], best: SolvedSplit, search_seconds: float
) -> Certificate:
    """About the option that won: its surrogate's proved minimum over all its splits."""
    own = next(r for r in results if r.option == best.option)
    objective = best.split.objective_seconds
    bound = min(own.bound_seconds, objective)
    option = best.option
    solved = sum(r.looked_at for r in results)
    space = "; and ".join(s.name for s in search.spaces)
    if search.min_stages > 1:
        space += f"; {search.min_stages} devices or more"
    if search.recompute != "none" and search.model.blocks:
        space += f"; {STAGES_RECOMPUTE[search.recompute]}"
    return Certificate(
        objective=OBJECTIVE,
        objective_seconds=objective,
        bound_seconds=bound,
        gap=relative_gap(objective, bound),
        whole_ops_bound_seconds=search.lower_bound_seconds(),
        space=(
            f"{space}; {search.plan(option).text}; {option.schedule}, {counted(option.microbatches, 'micro-batch')} "
            f"({solved} of {len(results)} schedules and micro-batch counts solved, the rest bounded)"
        ),
        method="dynamic program over cuts, branch and bound over bottlenecks",
        solver_status="optimal" if all(r.optimal for r in results) else "time limit",
        search_seconds=search_seconds,
    )
