"""Pipelines of device groups as proposals: the best of every option, best first."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from cost_models.errors import InfeasibleError, InternalError, PartitionerError, TimeLimitError, UsageError
from passes.lower.candidate import Candidate
from passes.search.certificate import NAMED, BoundTerm
from passes.search.fastest import ROOM_LEFT, share_of_need, until_it_fits
from passes.search.feature.result import origins_of
from passes.search.hybrid.evaluate import AGREEMENT, CandidateCost, check_agreement
from passes.search.hybrid.options import GroupOption
from passes.search.hybrid.relax.infeasible import Planner, infeasible
from passes.search.hybrid.search import GroupSearch
from passes.search.hybrid.solve import SolvedOption
from passes.search.hybrid.stages import StageSharded, shard_stages
from passes.search.hybrid.survey import SIMULATED_FIRST, SLACK, Survey, survey
from passes.search.judge import Judge, Simulated
from passes.search.outcome import ShardingDetails
from passes.search.provider import Judged, Proposal, Proved, Valued
from passes.search.words import FIXED, WITHIN

log = logging.getLogger("partitioner")

SIMULATIONS = 8
"""Candidates simulated at most in each round. By hand."""


ANY_MEMORY = 2.0**10
"""Times the memory with which the leanest ways are solved: the simulation tells whether they fit, or how much is short."""


@dataclass(eq=False)
class GroupsProvider:
    """Proposes pipelines of device groups, sharded inside."""

    search: GroupSearch
    judge: Judge
    one_queue: bool
    only_if: Literal["", "short of memory", "nothing fits", "compared"] = ""
    """Nothing is looked for otherwise; short of memory: if ``beside`` was; compared: always, as a row beside others."""
    beside: GroupsProvider | None = None
    plan: Planner | None = None
    """Plans a request in which something else is fixed, for suggestions where nothing fits; None: none are wanted."""
    words = "stages on device groups"
    objective = "fill * sum(stage + link seconds) + (microbatches - fill) * chunks * longest stage or link"
    learns = True
    quickly_bounded = False
    simulated_first = SIMULATED_FIRST
    slack = SLACK
    _surveys: list[Survey] = field(default_factory=list, init=False)
    _wholes: dict[Hashable, tuple[Candidate, Mapping[int, StageSharded]]] = field(
        default_factory=dict, init=False
    )
    """Pipelines whose stages are sharded as wholes, by the identity of their proposals."""
    _seconds: float = field(default=math.inf, init=False)
    """Time that the first search was given."""

    def proposals(
        self, known_seconds: float, room: float, deadline: float
    ) -> Sequence[Proposal[SolvedOption]]:
        """Return the best of every option that was solved; see ``Provider``."""
        if self.only_if == "nothing fits" and known_seconds < math.inf:
            return []
        if self.beside is not None and not self.beside.short_of_memory:
            return []
        if not self._options():
            return []
        if not self._surveys:
            self._seconds = deadline - time.perf_counter()
        if self.only_if == "nothing fits":
            room *= ANY_MEMORY
        self._surveys.append(survey(self.search, deadline, room, known_seconds))
        proposed = [_proposal(solved) for solved in self._surveys[-1].solved[:SIMULATIONS]]
        return [*self._as_wholes(proposed[:1]), *proposed]

    def _options(self) -> Sequence[GroupOption]:
        """List the options. None where they are only looked at in want of others, and cannot have the layouts."""
        try:
            return self.search.options()
        except UsageError:
            if self.only_if:
                return []
            raise

    def _as_wholes(self, proposed: Sequence[Proposal[SolvedOption]]) -> Iterator[Proposal[SolvedOption]]:
        """Yield the same stages, each sharded as a whole: layouts of what crosses, and of parameters that several pieces
        read, are weighed then."""
        fixed = self.search.fixed
        tied = bool(self.search.piece_search.shared)
        if fixed is None or self.only_if or (fixed.degrees.stages == 1 and fixed.degrees.tensor and not tied):
            return
        for proposal in proposed:
            found = self.search.decode(proposal.solved, one_queue=self.one_queue).candidate
            try:
                sharded = shard_stages(self.judge, fixed, found)
            except (UsageError, InfeasibleError, TimeLimitError) as error:
                log.info("stages as wholes: %s", error.what)
                continue
            placements = {number: own.placement for number, own in sharded.items()}
            if placements:
                key = ("stages as wholes", len(self._wholes))
                self._wholes[key] = replace(found, shardings=placements), sharded
                yield replace(proposal, identity=key)

    @property
    def short_of_memory(self) -> bool:
        """True if the best that was found computes something again, or takes longer to need less; or if there is none."""
        solved = self._surveys[-1].solved if self._surveys else ()
        return not solved or any(step.again or step.price for stage in solved[0].steps for step in stage)

    def candidate(self, proposal: Proposal[SolvedOption]) -> Candidate:
        """Put the layouts of its stages' pieces together."""
        if proposal.identity is not None:
            return self._wholes[proposal.identity][0]
        return self.search.decode(proposal.solved, one_queue=self.one_queue).candidate

    def leaner(
        self, judged: Judged[SolvedOption], room: float, known_seconds: float
    ) -> tuple[Proposal[SolvedOption], float] | None:
        """Solve the option again with as much less memory as the simulation needs more.

        Where only what the allocator reserves overflows: with what it reserves for the stages that were simulated.
        """
        solved, simulated = judged.proposal.solved, judged.simulated
        if simulated.tensors_fit(self.judge.cluster.devices) and judged.proposal.identity is None:
            self.search.learn(solved, simulated.peak_bytes)
        else:
            room *= ROOM_LEFT * share_of_need(self.judge, simulated)
        smaller = self.search.solve(solved.option, SLACK * known_seconds, room)
        return None if smaller is None else (_proposal(smaller), room)

    @property
    def _bounded(self) -> Survey:
        """The first survey in which anything fits by the search's own count."""
        bounded = (own for own in self._surveys if math.isfinite(own.bound_seconds))
        return next(bounded, self._surveys[0])

    def proved(self) -> Proved:
        """Return the bound over all options, and each option's, the lowest by name."""
        search = self.search
        if not self._surveys:
            return Proved("" if self.only_if else "no equal groups", "listing", math.inf, ())
        first = self._bounded
        solved = sum(math.isfinite(seconds) for _, seconds in first.bounds)
        groups = (
            f"equal groups in each pool of equal nodes of {search.world_size} devices, pools in any order or left "
            "out; shards inside a node, replicas around them"
        )
        if search.fixed is not None:
            again = WITHIN[search.within]
            groups = f"{FIXED}{search.fixed.request.fix or 'layouts'}{again}"
        space = (
            f"{groups}; cut between {len(search.pieces)} pieces; "
            f"{solved} of {first.options} listed degrees and micro-batch counts solved, the rest bounded"
        )
        method = (
            "layouts by min-sum elimination, stages by a dynamic program, bottlenecks by branch and bound"
        )
        if self._wholes:
            method += "; then its stages sharded once more, each as a whole, which the surrogate does not see"
        return Proved(space, method, first.bound_seconds, tuple(_bound_terms(first)), first.stopped)

    def valued(self, proposal: Proposal[SolvedOption]) -> Valued:
        """Add the surrogate up again, op by op. Raises ``InternalError`` if the search counted otherwise."""
        search = self.search
        found = search.decode(proposal.solved, one_queue=self.one_queue)
        cost = CandidateCost(search.pieces, search.cluster, search.job, search.piece_search.shared).evaluated(
            found.candidate, found.values
        )
        check_agreement(cost, proposal.seconds, found.unlike)
        objective, bound = cost.objective_seconds, self._bounded.bound_seconds
        if bound > objective * (1 + AGREEMENT) and search.fits(proposal.solved):
            raise InternalError(
                "certify a pipeline: its own bound is broken",
                [f"its surrogate is {objective!r} s, {bound!r} s were proved for all of them"],
            )
        discovery = search.piece_search.discovery
        origins = {stage: origins_of(discovery, parts) for stage, parts in found.parts.items()}
        if proposal.identity is not None:
            origins = {stage: own.origins for stage, own in self._wholes[proposal.identity][1].items()}
        return Valued(objective, cost.terms, ShardingDetails(proposal.seconds, (), origins))

    def refusal(self, tried: Sequence[Judged[SolvedOption]], room: float) -> PartitionerError:
        """Say what is short, and which changes of the request would do."""
        if not self._surveys:
            return self._no_options()
        if self.search.fixed is not None and self.plan is None:
            return InfeasibleError("nothing fits that is fixed so", [], [])
        last = self._surveys[-1]
        return infeasible(
            self.search,
            self.judge,
            [own.simulated for own in tried],
            self._fitted,
            one_queue=self.one_queue,
            untried=f"{last.untried:,} kinds were not: {last.stopped}" if last.untried else "",
            deadline=time.perf_counter() + self._seconds,
            plan=self.plan,
        )

    def _fitted(self, search: GroupSearch, judge: Judge, solved: SolvedOption, room: float) -> Simulated:
        """Simulate an option of a changed search, with less memory while it overflows."""
        other = GroupsProvider(search, judge, self.one_queue)
        return until_it_fits(other, judge, _proposal(solved), room, set())[-1].simulated

    def _no_options(self) -> InfeasibleError:
        search, batch, wanted = self.search, self.search.job.batch_size, self.search.microbatches
        equal = "equal micro-batches" if wanted == "auto" else f"{wanted} equal micro-batches"
        return InfeasibleError(
            f"no equal groups of {search.world_size} devices run {search.graph.model_name} on {batch} samples",
            [
                f"{batch} samples make no {equal} for any number of replicas and stages, of {len(search.pieces)} pieces "
                "at most"
            ],
            ["a batch size with more divisors, another number of micro-batches, or groups= of unequal sizes"],
        )


def _proposal(solved: SolvedOption) -> Proposal[SolvedOption]:
    return Proposal(solved, solved.seconds, option=solved.option)


def _bound_terms(done: Survey) -> Iterator[BoundTerm]:
    """Yield the bounds of all options: the lowest by name, then others that were looked at, then the rest."""
    bounds = sorted(done.bounds, key=lambda own: own[1])
    for option, seconds in bounds[:NAMED]:
        yield BoundTerm.of(str(option), 1, seconds)
    if others := [seconds for _, seconds in bounds[NAMED:]]:
        yield BoundTerm.of("others solved", len(others), others[0])
    if rest := done.options - len(bounds):
        yield BoundTerm.of("others, bounded alone", rest, done.rest_seconds)
