"""The compile, on one page: a model's graph and a cluster become a placement, and a placement becomes programs.

    trace ─► verify ─► costs ─► place ─► bound ─► bridge ─► check ─► baselines

Each line of :func:`compile_graph` is one pass; its name stands in the log and in ``--timings``. ``place`` is the
strategy's own search (``passes.search``). It simulates candidates by the one way from a placement to a step
(``passes.lower.realize``), so what it leaves is segmented, scheduled, ordered and simulated already:

    candidate ─► segments (sharded: of the local graph) ─► costs ─► schedule ─► order ─► programs ─► simulated step
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from cost_models.cluster import ClusterSpec
from cost_models.errors import InfeasibleError, TimeLimitError
from cost_models.room import FILLS
from cost_models.units import counted, format_seconds
from passes.costs.costs import GraphCosts, costs_of
from passes.graph.graph import OpGraph
from passes.graph.verify import verify_graph
from passes.interrupts import keep_from_here
from passes.lower.candidate import Candidate
from passes.lower.crossing import Bridge, bridges
from passes.lower.realize import Realized
from passes.search.any_plan import any_plan_bound
from passes.search.baselines import baselines
from passes.search.certificate import Alternative
from passes.search.judge import Judge, Simulated
from passes.search.outcome import Outcome
from passes.search.request import Request
from passes.search.strategies import search
from passes.timings import run_pass
from runtime.check.check import Proof
from runtime.check.quotient import check_groups, some_of_each
from runtime.collector import collector_paused


@dataclass(frozen=True, eq=False)
class Compiled:
    """The outcome of a compile."""

    request: Request
    costs: GraphCosts
    outcome: Outcome
    realized: Realized
    """The best candidate, carried through to programs and their simulation."""
    bridges: tuple[Bridge, ...]
    """Values that cross between devices, or groups of them; empty where all devices share one stage."""
    proof: Proof
    baselines: tuple[Alternative, ...]
    """The same step without partitioning."""


@collector_paused()
def compile_graph(graph: OpGraph, cluster: ClusterSpec, request: Request) -> Compiled:
    """Choose a placement of ``graph`` on ``cluster``, build its programs and prove them free of deadlock."""
    run_pass("verify", lambda _: counted(len(graph), "op"), verify_graph, graph, after="trace")
    costs = run_pass("costs", _ops, costs_of, graph, cluster)
    judge = Judge(graph, costs, cluster, request.job)
    outcome = run_pass("place", _label, search, request, judge)
    keep_from_here()
    outcome = run_pass("bound", _bound, bounded, outcome, judge, request.whole_batch)
    realized = outcome.carried.realized
    outcome = replace(outcome, best=outcome.judge.simulated(outcome.best.candidate, realized))
    crossing = run_pass("bridge", _bridges, bridges, realized.segments)
    proof = run_pass("check", _rules, proved, realized, outcome.best.candidate)
    plain = run_pass("baselines", _baselines, baselines, graph, costs, judge.cluster, request.job)
    return Compiled(request, costs, outcome, realized, crossing, proof, plain)


@dataclass(frozen=True, eq=False)
class Nearest:
    """A placement that fits, or overflows least of those that were looked at."""

    judge: Judge
    """The judge that simulated it; it knows the graph that was placed."""
    simulated: Simulated

    def overflow_bytes(self, cluster: ClusterSpec, batch_size: int) -> float:
        """Simulate it with another batch; return the bytes beyond the fullest device's room, 0 or less if it fits.

        Infinite where stages are sharded for batches of other multiples.
        """
        judge, candidate = self.judge, self.simulated.candidate
        if candidate.shardings:
            meshes = judge.carried(candidate).realized.meshes.values()
            multiple = math.lcm(*(own.samples_multiple for own in meshes))
            if batch_size % (candidate.microbatches * multiple):
                return math.inf
        job = replace(judge.job, batch_size=batch_size)
        return Judge(judge.graph, judge.costs, cluster, job).measure(candidate).overflow_bytes


@collector_paused()
def what_fits(graph: OpGraph, cluster: ClusterSpec, request: Request) -> Nearest | None:
    """Return a plan of the request whose simulated step fits, whichever is found first; or what overflows least, or None.

    Raises UsageError for a request that cannot be met.
    """
    judge = Judge(graph, costs_of(graph, cluster), cluster, request.job)
    try:
        outcome = search(replace(request, only_fits=True), judge)
        return Nearest(outcome.judge, outcome.best)
    except (InfeasibleError, TimeLimitError):
        least = min(judge.tried, key=lambda simulated: simulated.overflow_bytes, default=None)
        return None if least is None else Nearest(judge, least)


def bounded(outcome: Outcome, judge: Judge, whole_batch: str = "") -> Outcome:
    """Give the outcome's certificate the bound on every plan; raise ``InternalError`` if the outcome is below its bounds.

    ``judge``: of the model's graph as it was traced, whatever graph was placed. ``whole_batch``: why there is one
    micro-batch, if the model is the reason.
    """
    seconds = any_plan_bound(judge.graph, judge.costs, judge.cluster, judge.job)
    space, risk = outcome.certificate.space, judge.job.risk
    space += f"; within a risk of {100 * risk:.3g}%" if risk < FILLS else ""
    space += f"; one micro-batch only: {whole_batch}" if whole_batch else ""
    certificate = replace(outcome.certificate, simulated_lower_bound_seconds=seconds, space=space)
    whole = not outcome.splits and not outcome.best.candidate.shardings
    certificate.refuse_broken_bounds(outcome.best.step_seconds, whole_ops=whole)
    return replace(outcome, certificate=certificate)


def proved(realized: Realized, candidate: Candidate) -> Proof:
    """Prove the programs of the groups, and so of their members, free of deadlock, everything in them matched."""
    groups = realized.groups_programs
    return check_groups(
        groups.programs,
        realized.segments,
        candidate.microbatches,
        member=groups.member,
        members=some_of_each(realized.segments),
        tied=realized.tied,
        one_queue=candidate.one_queue,
    )


def _ops(costs: GraphCosts) -> str:
    return counted(len(costs.ops), "op")


def _label(outcome: Outcome) -> str:
    return str(outcome.label)


def _bound(outcome: Outcome) -> str:
    return f"no plan below {format_seconds(outcome.certificate.simulated_lower_bound_seconds)}"


def _bridges(found: tuple[Bridge, ...]) -> str:
    return counted(len(found), "bridge")


def _rules(proof: Proof) -> str:
    return f"{counted(proof.instructions, 'instruction')}, {counted(proof.messages, 'message')}"


def _baselines(found: tuple[Alternative, ...]) -> str:
    return ", ".join(baseline.strategy for baseline in found)
