"""The searches by the strategy that a request asks for; a new way of partitioning is a room and a case here."""

from __future__ import annotations

from typing import Any

from cost_models.errors import InfeasibleError
from passes.lower.candidate import Candidate
from passes.search.certificate import Certificate, relative_gap
from passes.search.infeasible import shortfalls
from passes.search.judge import Judge
from passes.search.outcome import Outcome
from passes.search.place import place_stages


def search(request: Any, judge: Judge) -> Outcome:
    """Search a placement of the judge's graph by ``request.strategy``; ``request``: the strategy's own kind."""
    if request.known is not None:
        return _known(request.known, judge)
    if request.strategy == "free":
        from passes.search.free.rounds import place_anywhere  # twenty modules that no other strategy reads

        return place_anywhere(request, judge)
    return place_stages(request, judge)


def _known(candidate: Candidate, judge: Judge) -> Outcome:
    """Return a placement as it is, if it fits."""
    best = judge.simulate(candidate)
    if not best.fits:
        raise InfeasibleError(
            f"this placement of {judge.graph.model_name} does not fit {judge.cluster.name}",
            shortfalls(enumerate(best.peak_bytes), judge.cluster.devices),
        )
    seconds = best.step_seconds
    certificate = Certificate(
        objective="seconds of the simulated step",
        objective_seconds=seconds,
        bound_seconds=0.0,
        gap=relative_gap(seconds, 0.0),
        whole_ops_bound_seconds=0.0,
        simulated_lower_bound_seconds=0.0,
        space="this placement",
        method="nothing was searched",
        solver_status="bounded",
        search_seconds=0.0,
    )
    return Outcome(best, judge, certificate)
