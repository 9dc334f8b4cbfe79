"""The outcome of the search over pipelines of sharded stages: its best candidates simulated, the fastest that fits.

An option whose best candidate overflows is solved again as if devices were smaller: the search's memory is an estimate.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from cost_models.errors import InfeasibleError, InternalError
from passes.interrupts import may_be_lost
from passes.progress import report_simulating
from passes.search.certificate import BoundTerm, Certificate, relative_gap
from passes.search.feature.result import origins_of
from passes.search.hybrid.bounds import GAP
from passes.search.hybrid.decode import Decoded
from passes.search.hybrid.evaluate import AGREEMENT, CandidateCost, PipelineCost, check_agreement
from passes.search.hybrid.relax.infeasible import infeasible
from passes.search.hybrid.search import SLACK, GroupSearch, Survey
from passes.search.hybrid.solve import SolvedOption
from passes.search.judge import MEMORY_ROUNDS, Judge, Simulated, memory_rounds
from passes.search.outcome import Label, Outcome, RunnerUp, ShardingDetails

log = logging.getLogger("partitioner")

OBJECTIVE = "fill * sum(stage + link seconds) + (microbatches - fill) * chunks * longest stage or link"
SIMULATIONS = 8
"""Candidates simulated at most in each round, by hand: the surrogate ranks the best of them among its first three."""
ROOM_LEFT = 0.995
"""Share of the memory that is planned with beyond what a simulation found too large. By hand."""
NAMED = 16
"""Options that a certificate names, of those that were solved. By hand: more than anybody reads."""


@dataclass(frozen=True, eq=False)
class Tried:
    """A candidate that was simulated."""

    solved: SolvedOption
    decoded: Decoded
    simulated: Simulated


def place_groups(search: GroupSearch, judge: Judge, one_queue: bool, deadline: float) -> Outcome:
    """Find the fastest pipeline of sharded stages; on Ctrl-C the fastest found so far.

    Raises InfeasibleError if nothing fits, KeyboardInterrupt if nothing is found yet.
    """
    started = time.perf_counter()
    if not search.options():
        raise _no_options(search)
    tried: list[Tried] = []
    surveys: list[Survey] = []

    def round_of(number: int, room: float) -> float | None:
        """Simulate the best of every option with this share of the memory; the share to go on with, if nothing fits."""
        survey = search.survey(deadline, room)
        surveys.append(survey)
        for solved in survey.solved[:SIMULATIONS]:
            best = _fastest(tried)
            late = survey.stopped or time.perf_counter() > deadline
            if solved.seconds > SLACK * best or (late and best < math.inf):
                break
            report_simulating(solved.option)
            with may_be_lost(best < math.inf):
                tried.extend(_until_it_fits(search, judge, solved, best, room, one_queue=one_queue))
        if not tried or _fastest(tried) < math.inf:
            return None
        return room * ROOM_LEFT * max(_share(judge, t.simulated) for t in tried)

    interrupted = False
    try:
        memory_rounds(round_of, 1.0)
    except KeyboardInterrupt:
        if _fastest(tried) == math.inf:
            raise
        interrupted = True
    fitting = [t for t in tried if t.simulated.fits]
    if not fitting:
        simulated = [t.simulated for t in tried]
        raise infeasible(search, judge, simulated, partial(_fitted, one_queue=one_queue), one_queue=one_queue)
    best = min(fitting, key=lambda t: t.simulated.step_seconds)
    details = ShardingDetails(
        best.solved.seconds, (),
        {stage: origins_of(search.piece_search.discovery, parts) for stage, parts in best.decoded.parts.items()},
    )  # fmt: skip
    runner_ups = tuple(
        RunnerUp.of(Label.of_groups(t.decoded.candidate), t.simulated) for t in tried if t is not best
    )
    survey = replace(surveys[0], stopped="interrupted") if interrupted else surveys[0]
    cost = CandidateCost(search.pieces, search.cluster, search.job, search.piece_search.shared).evaluated(
        best.decoded.candidate, best.decoded.values
    )
    check_agreement(cost, best.solved.seconds, best.decoded.unlike)
    certificate = _certificate(search, survey, best.solved, cost, time.perf_counter() - started)
    return Outcome(best.simulated, judge, certificate, runner_ups, details=details)


def _until_it_fits(
    search: GroupSearch,
    judge: Judge,
    solved: SolvedOption,
    best_seconds: float,
    room: float,
    *,
    one_queue: bool,
) -> list[Tried]:
    """Simulate an option; while it overflows, solve it again as if its devices were smaller.

    The search's memory is an estimate, off by much the same for all pipelines of an option.
    """
    tried: list[Tried] = []
    while len(tried) < MEMORY_ROUNDS:
        found = search.decode(solved, one_queue=one_queue)
        tried.append(Tried(solved, found, judge.simulate(found.candidate)))
        if tried[-1].simulated.fits or tried[-1].simulated.step_seconds > best_seconds:
            break
        room *= ROOM_LEFT * _share(judge, tried[-1].simulated)
        smaller = search.solve(solved.option, SLACK * best_seconds, room)
        if smaller is None:
            break
        solved = smaller
    return tried


def _fitted(
    search: GroupSearch, judge: Judge, solved: SolvedOption, room: float, *, one_queue: bool
) -> Simulated:
    return _until_it_fits(search, judge, solved, math.inf, room, one_queue=one_queue)[-1].simulated


def _fastest(tried: Sequence[Tried]) -> float:
    return min((t.simulated.step_seconds for t in tried if t.simulated.fits), default=math.inf)


def _share(judge: Judge, simulated: Simulated) -> float:
    """Return the least share that a device has of what it needs."""
    devices = judge.cluster.devices
    return min(d.memory_bytes / peak for d, peak in zip(devices, simulated.peak_bytes, strict=True) if peak)


def _certificate(
    search: GroupSearch, survey: Survey, best: SolvedOption, cost: PipelineCost, seconds: float
) -> Certificate:
    objective = cost.objective_seconds
    terms = list(_bound_terms(survey))
    if survey.bound_seconds > objective * (1 + AGREEMENT):
        if search.fits(best):
            raise InternalError(
                "certify a pipeline: its own bound is broken",
                [f"its surrogate is {objective!r} s, {survey.bound_seconds!r} s were proved for all of them"],
            )
        terms.append(BoundTerm("this one, which needs more memory than was reckoned with", 1, objective))
    bound = min(survey.bound_seconds, objective)
    return Certificate(
        objective=OBJECTIVE,
        objective_seconds=objective,
        bound_seconds=bound,
        gap=relative_gap(objective, bound),
        space=(
            f"equal groups in each pool of equal nodes of {search.cluster.world_size} devices, pools in any order or left "
            f"out, cut between {len(search.pieces)} pieces; shards inside a node, replicas around them; "
            f"{len(survey.bounds)} of {survey.options} listed degrees and micro-batch counts solved, the rest bounded"
        ),
        method="layouts by min-sum elimination, stages by a dynamic program, bottlenecks by branch and bound",
        solver_status=survey.stopped or ("optimal" if bound >= objective * (1 - GAP) else "bounded"),
        search_seconds=seconds,
        terms=replace(cost.terms, options=tuple(terms)),
    )


def _bound_terms(survey: Survey) -> Iterator[BoundTerm]:
    """Yield the bounds of all options: the lowest by name, then others that were looked at, then the rest."""
    bounds = sorted(survey.bounds, key=lambda own: own[1])
    for option, seconds in bounds[:NAMED]:
        yield BoundTerm(str(option), 1, seconds if math.isfinite(seconds) else None)
    if others := [seconds for _, seconds in bounds[NAMED:]]:
        yield BoundTerm("others solved", len(others), others[0] if math.isfinite(others[0]) else None)
    if rest := survey.options - len(bounds):
        yield BoundTerm("others, bounded alone", rest, survey.rest_seconds)


def _no_options(search: GroupSearch) -> InfeasibleError:
    batch, wanted = search.job.batch_size, search.microbatches
    equal = "equal micro-batches" if wanted == "auto" else f"{wanted} equal micro-batches"
    return InfeasibleError(
        f"no equal groups of {search.cluster.world_size} devices run {search.graph.model_name} on {batch} samples",
        [
            f"{batch} samples make no {equal} for any number of replicas and stages, of {len(search.pieces)} pieces at most"
        ],
        ["a batch size with more divisors, another number of micro-batches, or groups= of unequal sizes"],
    )
