"""The layer-wise search: which ops, on which devices, in how many micro-batches, under which schedule.

    OpGraph ─► units ─► for every micro-batch count × schedule: the surrogate's exact minimum and other good
    splits
            ─► the best ones simulated as programs ─► the best that fits is the plan, with its certificate

The surrogate ranks, the simulation decides: the step time of unlike stages is not what the surrogate says.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from cost_models.errors import InfeasibleError, UsageError
from cost_models.precision import Precision
from passes.graph.graph import OpGraph
from passes.graph.least_samples import least_samples
from passes.search.certificate import Certificate, relative_gap
from passes.search.layer.infeasible import infeasible
from passes.search.layer.judge import (
    Judge,
    LayerCandidate,
    SimulatedCandidate,
    Tried,
    candidate_of,
    estimated_bytes,
    estimated_share,
    fastest_that_fits,
)
from passes.search.layer.options import (
    Cluster,
    Option,
    RecomputeMode,
    device_table,
    microbatch_counts,
    options,
)
from passes.search.layer.problem import Split
from passes.search.layer.search import LayerSearch, OptionResult, Solved
from passes.search.model import Costs, read_model, spaces
from passes.search.pins import resolve_pins

__all__ = [
    "LayerCandidate",
    "LayerRequest",
    "LayerResult",
    "RunnerUp",
    "SimulatedCandidate",
    "place_layers",
    "prepare",
]

log = logging.getLogger("partitioner")

OBJECTIVE = "fill * sum(stage + link seconds) + (microbatches - fill) * chunks * largest"
MEMORY_ROUNDS = 4
"""Searches with less memory each, while what is simulated overflows: the surrogate's memory is an estimate."""
ANOTHER_SEARCH = 1.01
"""How much slower than one that overflows the best that fits must be for another search."""
ROOM_LEFT = 0.995
"""How full that search may make a device, if the estimate is as far off as it was where it overflowed."""
STAGES_RECOMPUTE = {
    "auto": "a stage that does not fit computes all its blocks again (the plan then keeps what fits)",
    "full": "every stage computes its blocks again",
}
"""How recompute enters the surrogate, for the certificate."""
ONE_OF_EACH = 1.25
"""Every schedule whose best surrogate is within this factor of the best of all is simulated at least once."""


@dataclass(frozen=True)
class LayerRequest:
    """What the user fixed and what is left to the search."""

    batch_size: int
    microbatches: int | Literal["auto"] = "auto"
    schedule: str = "auto"
    optimizer: str = "adamw"
    precision: Precision = field(default_factory=Precision)
    pins: Mapping[str, int] = field(default_factory=dict)
    max_stages: int | None = None
    min_stages: int | None = None
    """Devices with a stage, at least."""
    recompute: RecomputeMode = "auto"
    time_limit_seconds: float | None = None
    simulations: int = 12
    """Candidates simulated at most."""
    simulation_seconds: float = 20.0
    """No further candidate is simulated after this long, once one fits."""


@dataclass(frozen=True)
class RunnerUp:
    """A candidate that was not chosen: simulated, or proved slower without (``reason`` says "at least")."""

    description: str
    feasible: bool
    reason: str
    step_seconds: float
    """Simulated, or the bound."""
    peak_memory_bytes: int
    """Simulated, or the search's estimate."""


@dataclass(frozen=True)
class LayerResult:
    """The chosen candidate and how it was found."""

    best: SimulatedCandidate
    runner_ups: tuple[RunnerUp, ...]
    certificate: Certificate
    surrogate: Split


def place_layers(
    graph: OpGraph,
    costs: Costs,
    cluster: Cluster,
    request: LayerRequest,
    simulate: Callable[[LayerCandidate], SimulatedCandidate],
    lower_bound: Callable[[LayerCandidate], float] | None = None,
) -> LayerResult:
    """Search, simulate the best candidates, return the best that fits.

    ``lower_bound``: seconds that a candidate's simulation cannot be below, much cheaper than simulating it.
    ``time_limit_seconds`` bounds search and simulation; at least one candidate that fits is always
    simulated. Raises ``UsageError`` for pins that cannot hold, ``InfeasibleError`` with computed ways out if
    nothing fits.
    """
    started = time.perf_counter()
    limit = request.time_limit_seconds
    deadline = started + limit if limit is not None else float("inf")
    search = prepare(graph, costs, cluster, request)
    results = search.solve(started + 0.5 * (deadline - started))
    searched = time.perf_counter() - started
    log.info("layer search: %d options in %.2f s", len(results), searched)
    judge = Judge(search, simulate, lower_bound)
    tried = _simulate_until_one_fits(search, results, request, judge, deadline)
    tried += _on_one_device(search, judge, tried, deadline)
    best = min((t for t in tried if t.overflow_bytes <= 0), key=lambda t: t.seconds)
    return LayerResult(
        best.simulated,
        _runner_ups(search, tried, judge.bounded, best),
        _certificate(search, results, best.solved, searched),
        best.solved.split,
    )


def prepare(graph: OpGraph, costs: Costs, cluster: Cluster, request: LayerRequest) -> LayerSearch:
    """Everything that the search of ``request`` reads, as arrays."""
    _refuse_too_few_devices(cluster, request)
    model = read_model(graph, costs, request.optimizer, request.precision)
    paths = [str(graph.nodes[name].meta.get("module_path", "")) for name in model.names]
    pins = resolve_pins(request.pins, model.names, paths, model.readers, model.together)
    table = device_table(cluster)
    counts = _accepted_counts(graph, request)
    size = max(1, request.batch_size // counts[-1])
    work = model.seconds(size, table.representatives[0])
    return LayerSearch(
        model=model,
        cluster=cluster,
        table=table,
        spaces=spaces(model, work, pins, size),
        batch_size=request.batch_size,
        pins=pins,
        max_stages=request.max_stages or 1 << 30,
        options=options(counts, request.schedule, len(cluster.devices)),
        min_stages=request.min_stages or 1,
        recompute=request.recompute,
    )


def _refuse_too_few_devices(cluster: Cluster, request: LayerRequest) -> None:
    world = len(cluster.devices)
    if request.min_stages is not None and request.min_stages > world:
        raise InfeasibleError(
            f"no layer-wise plan uses {request.min_stages} devices",
            [f"the cluster has {world}, and min_stages is {request.min_stages}"],
            [f"min_stages={world} uses all of them", "a cluster with more devices"],
        )


def _on_one_device(search: LayerSearch, judge: Judge, tried: Sequence[Tried], deadline: float) -> list[Tried]:
    """The best unsplit candidate, if it may win: where messages cost more than they save, only the simulation sees it."""
    plain = [option for option in search.options if option.chunks == 1]
    if search.pins or search.min_stages > 1 or not plain or any(len(t.solved.ranks) == 1 for t in tried):
        return []
    one_schedule = [option for option in plain if option.schedule == plain[0].schedule]
    alone = replace(search, max_stages=1, options=one_schedule, _plans={})
    solved = [s for result in alone.solve(deadline) for s in result.solved]
    if not solved:
        return []
    judged = judge(min(solved, key=lambda s: s.split.objective_seconds), fastest_that_fits(tried))
    return [] if judged is None else [judged]


def _accepted_counts(graph: OpGraph, request: LayerRequest) -> list[int]:
    """Micro-batch counts to try: those whose smallest micro-batch the model accepts."""
    least, reason = least_samples(graph)
    counts = microbatch_counts(request.batch_size, request.microbatches)
    accepted = [count for count in counts if request.batch_size // count >= least]
    if not accepted:
        raise UsageError(
            f"cannot train {graph.model_name} on {request.batch_size} samples in {counts[0]} micro-batches",
            [f"{reason} needs {least} samples or more in every micro-batch"],
            [
                f"at most {request.batch_size // least} micro-batches"
                if request.batch_size >= least
                else f"a batch of {least} samples or more"
            ],
        )
    return accepted


def _simulate_until_one_fits(
    search: LayerSearch,
    results: Sequence[OptionResult],
    request: LayerRequest,
    judge: Judge,
    deadline: float,
) -> list[Tried]:
    """Simulate the best candidates; if the fast ones overflow, search again as if devices were smaller.

    The splits of one option are much alike: after one that overflows, its others wait until nothing else fits.
    """
    tried: list[Tried] = []
    waiting: list[Solved] = []
    scale = 1.0
    enough = min(deadline, time.perf_counter() + request.simulation_seconds)
    for _ in range(MEMORY_ROUNDS):
        overflowing: dict[Option, Tried] = {}
        for solved in _ranked(results, request.simulations):
            best_seconds = fastest_that_fits(tried)
            if math.isfinite(best_seconds) and time.perf_counter() > enough:
                break
            if solved.option in overflowing:
                waiting.append(solved)
                continue
            judged = judge(solved, best_seconds)
            if judged is not None:
                tried.append(judged)
                if judged.overflow_bytes > 0:
                    overflowing[solved.option] = judged
        best_seconds = fastest_that_fits(tried)
        missed = [t for t in overflowing.values() if t.seconds * ANOTHER_SEARCH < best_seconds]
        if not missed or (math.isfinite(best_seconds) and time.perf_counter() > enough):
            break
        least = min(missed, key=lambda t: t.overflow_bytes)
        scale = ROOM_LEFT * estimated_share(search, least)
        log.info("the fastest candidates overflow; searching again with %.0f%% of the memory", 100 * scale)
        results = search.solve(deadline, scale)
        if not any(result.solved for result in results):
            break
    for solved in waiting:
        if math.isfinite(fastest_that_fits(tried)):
            break
        tried += [judged for judged in [judge(solved, math.inf)] if judged is not None]
    if math.isinf(fastest_that_fits(tried)):
        raise _overflowing(search, tried, request, scale)
    return tried


def _ranked(results: Sequence[OptionResult], count: int) -> list[Solved]:
    """Best first by surrogate, after the best of every schedule that is nearly as good and one cautious
    split."""
    solved = sorted((s for r in results for s in r.solved), key=lambda s: s.split.objective_seconds)
    if not solved:
        return []
    worth = solved[0].split.objective_seconds * ONE_OF_EACH
    first: dict[tuple[str, int], Solved] = {}
    for s in solved:
        if s.split.objective_seconds <= worth:
            first.setdefault((s.option.schedule, s.option.chunks), s)
    leaders = list(first.values())
    leaders += [s for s in solved if s.cautious and s not in leaders][:1]
    return [*leaders, *(s for s in solved if s not in leaders)][:count]


def _overflowing(
    search: LayerSearch, tried: Sequence[Tried], request: LayerRequest, scale: float
) -> InfeasibleError:
    if not tried:
        return infeasible(search, request.microbatches == "auto")
    least = min(tried, key=lambda t: t.overflow_bytes)
    peak_bytes = least.simulated.peak_memory_bytes
    return infeasible(search, request.microbatches == "auto", least.solved, peak_bytes, scale)


def _runner_ups(
    search: LayerSearch, tried: Sequence[Tried], bounded: Sequence[tuple[Solved, float]], best: Tried
) -> tuple[RunnerUp, ...]:
    """What was judged and not chosen, by time."""

    def slower(seconds: float) -> str:
        return f"{seconds / best.seconds - 1 if best.seconds > 0 else 0.0:.1%} slower"

    found = []
    for t in tried:
        if t is not best:
            feasible = t.overflow_bytes <= 0
            reason = slower(t.seconds) if feasible else f"exceeds a device by {t.overflow_bytes:,} bytes"
            peak_bytes = max(t.simulated.peak_memory_bytes)
            found.append(RunnerUp(t.simulated.candidate.description, feasible, reason, t.seconds, peak_bytes))
    for solved, seconds in bounded:
        description = candidate_of(search, solved).description
        reason = f"at least {slower(seconds)}"
        peak_bytes = round(max(estimated_bytes(search, solved)))
        found.append(RunnerUp(description, True, reason, seconds, peak_bytes))
    return tuple(sorted(found, key=lambda runner_up: runner_up.step_seconds))


def _certificate(
    search: LayerSearch, results: Sequence[OptionResult], best: Solved, search_seconds: float
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
        simulated_lower_bound_seconds=search.lower_bound_seconds(),
        space=(
            f"{space}; {search.plan(option).text}; {option.schedule}, {option.microbatches} micro-batches "
            f"({solved} of {len(results)} schedules and micro-batch counts solved, the rest bounded)"
        ),
        method="dynamic program over cuts, branch and bound over bottlenecks",
        solver_status="optimal" if all(r.optimal for r in results) else "time limit",
        search_seconds=search_seconds,
    )
