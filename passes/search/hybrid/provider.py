"""Pipelines of device groups as proposals: the best of every option, best first."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from cost_models.errors import InfeasibleError, InternalError, PartitionerError
from passes.lower.candidate import Candidate
from passes.search.certificate import NAMED, BoundTerm
from passes.search.fastest import ROOM_LEFT, share_of_need, until_it_fits
from passes.search.feature.result import origins_of
from passes.search.hybrid.evaluate import AGREEMENT, CandidateCost, check_agreement
from passes.search.hybrid.relax.infeasible import infeasible
from passes.search.hybrid.search import SIMULATED_FIRST, SLACK, GroupSearch, Survey
from passes.search.hybrid.solve import SolvedOption
from passes.search.judge import Judge, Simulated
from passes.search.outcome import ShardingDetails
from passes.search.provider import Judged, Proposal, Proved, Valued

SIMULATIONS = 8
"""Candidates simulated at most in each round. By hand."""


@dataclass(eq=False)
class GroupsProvider:
    """Proposes pipelines of device groups, sharded inside."""

    search: GroupSearch
    judge: Judge
    one_queue: bool
    words = "stages on device groups"
    objective = "fill * sum(stage + link seconds) + (microbatches - fill) * chunks * longest stage or link"
    quickly_bounded = False
    simulated_first = SIMULATED_FIRST
    slack = SLACK
    _surveys: list[Survey] = field(default_factory=list, init=False)
    _seconds: float = field(default=math.inf, init=False)
    """Time that the first search was given."""

    def proposals(
        self, known_seconds: float, room: float, deadline: float
    ) -> Sequence[Proposal[SolvedOption]]:
        """Return the best of every option that was solved; see ``Provider``."""
        if not self.search.options():
            return []
        if not self._surveys:
            self._seconds = deadline - time.perf_counter()
        survey = self.search.survey(deadline, room, known_seconds)
        self._surveys.append(survey)
        return [_proposal(solved) for solved in survey.solved[:SIMULATIONS]]

    def candidate(self, proposal: Proposal[SolvedOption]) -> Candidate:
        """Put the layouts of its stages' pieces together."""
        return self.search.decode(proposal.solved, one_queue=self.one_queue).candidate

    def leaner(
        self, judged: Judged[SolvedOption], room: float, known_seconds: float
    ) -> tuple[Proposal[SolvedOption], float] | None:
        """Solve the option again with as much less memory as the simulation needs more."""
        room *= ROOM_LEFT * share_of_need(self.judge, judged.simulated)
        smaller = self.search.solve(judged.proposal.solved.option, SLACK * known_seconds, room)
        return None if smaller is None else (_proposal(smaller), room)

    def proved(self) -> Proved:
        """Return the bound over all options, and each option's, the lowest by name."""
        search = self.search
        if not self._surveys:
            return Proved("no equal groups", "listing", math.inf, ())
        survey = self._surveys[0]
        solved = sum(math.isfinite(seconds) for _, seconds in survey.bounds)
        space = (
            f"equal groups in each pool of equal nodes of {search.world_size} devices, pools in any order or left "
            f"out, cut between {len(search.pieces)} pieces; shards inside a node, replicas around them; "
            f"{solved} of {survey.options} listed degrees and micro-batch counts solved, the rest bounded"
        )
        method = (
            "layouts by min-sum elimination, stages by a dynamic program, bottlenecks by branch and bound"
        )
        return Proved(space, method, survey.bound_seconds, tuple(_bound_terms(survey)), survey.stopped)

    def valued(self, proposal: Proposal[SolvedOption]) -> Valued:
        """Add the surrogate up again, op by op. Raises ``InternalError`` if the search counted otherwise."""
        search = self.search
        found = search.decode(proposal.solved, one_queue=self.one_queue)
        cost = CandidateCost(search.pieces, search.cluster, search.job, search.piece_search.shared).evaluated(
            found.candidate, found.values
        )
        check_agreement(cost, proposal.seconds, found.unlike)
        objective, bound = cost.objective_seconds, self._surveys[0].bound_seconds
        if bound > objective * (1 + AGREEMENT) and search.fits(proposal.solved):
            raise InternalError(
                "certify a pipeline: its own bound is broken",
                [f"its surrogate is {objective!r} s, {bound!r} s were proved for all of them"],
            )
        discovery = search.piece_search.discovery
        origins = {stage: origins_of(discovery, parts) for stage, parts in found.parts.items()}
        return Valued(objective, cost.terms, ShardingDetails(proposal.seconds, (), origins))

    def refusal(self, tried: Sequence[Judged[SolvedOption]], room: float) -> PartitionerError:
        """Say what is short, and which changes of the request would do."""
        if not self._surveys:
            return self._no_options()
        survey = self._surveys[-1]
        return infeasible(
            self.search,
            self.judge,
            [own.simulated for own in tried],
            self._fitted,
            one_queue=self.one_queue,
            untried=f"{survey.untried:,} kinds were not: {survey.stopped}" if survey.untried else "",
            deadline=time.perf_counter() + self._seconds,
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


def _bound_terms(survey: Survey) -> Iterator[BoundTerm]:
    """Yield the bounds of all options: the lowest by name, then others that were looked at, then the rest."""
    bounds = sorted(survey.bounds, key=lambda own: own[1])
    for option, seconds in bounds[:NAMED]:
        yield BoundTerm.of(str(option), 1, seconds)
    if others := [seconds for _, seconds in bounds[NAMED:]]:
        yield BoundTerm.of("others solved", len(others), others[0])
    if rest := survey.options - len(bounds):
        yield BoundTerm.of("others, bounded alone", rest, survey.rest_seconds)
