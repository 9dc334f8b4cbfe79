"""The fastest pipeline of all providers: their proposals simulated, the fastest that fits, with one certificate.

    provider by provider: proposals, best first ─► cannot win, or simulated ─► fits, or solved again with less memory

The surrogate ranks, the simulation decides. A provider is told the fastest step so far, and solves only what may beat it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from cost_models.errors import InfeasibleError, UsageError
from cost_models.room import chance_of_not_fitting
from cost_models.units import counted
from passes.interrupts import keep_from_here, may_be_lost
from passes.progress import report_phase, report_simulating
from passes.search.certificate import ROUNDING, BoundTerm, Certificate, relative_gap
from passes.search.judge import MEMORY_ROUNDS, Judge, Simulated, memory_rounds
from passes.search.outcome import Label, Outcome, RunnerUp
from passes.search.parts import OnPart, Part
from passes.search.provider import Judged, Proposal, Provider, SolvedT, Valued

log = logging.getLogger("partitioner")

ROOM_LEFT = 0.995
"""Share of the memory that a further search may fill, if estimates are as far off as where it overflowed. By hand."""
STRETCHED = (1.01, 1.02, 1.04, 1.08)
"""Shares of the memory to plan with where nothing fits: estimates may be as much above what is simulated. By hand: of six
convolutional networks they are by 0.03."""
LEANEST = 4
"""Proposals with these that are simulated. By hand."""
ALLOCATOR_ROUNDS = 16
"""Pipelines of one proposal that are simulated at most while nothing overflows but what the allocator reserves: each round
leaves out one stage more of which that is known. By hand."""
OPTIMAL = 1e-3
"""Gap up to which a pipeline is called optimal: bottlenecks are told apart to so much (``passes.search.hybrid.bounds``)."""


def fastest_of(
    providers: Sequence[Provider[Any]],
    judge: Judge,
    deadline: float,
    parts: Sequence[Part] = (),
    gap: float = 0.0,
    rows: Iterable[Provider[Any]] = (),
    *,
    only_fits: bool = False,
) -> Outcome:
    """Return the fastest pipeline that fits; on Ctrl-C, or at the deadline, the fastest found so far.

    ``parts``: of the cluster, looked at after the whole, in their order, if they may be faster by more than ``gap``.
    ``rows``: what is compared with it all, in time of their own: first, so that nothing slower is looked for.
    ``only_fits``: as of ``Request``.

    Raises what the first provider says if nothing fits, KeyboardInterrupt if nothing is found yet.
    """
    started, interrupted = time.perf_counter(), False
    search = _ProviderRuns(judge, started, deadline, gap, only_fits)
    try:
        for row in rows:
            search.compare(row)
        search.deadline += time.perf_counter() - started
        for number, provider in enumerate(providers):
            if not (only_fits and search.best):
                search.run(provider, others=len(providers) - 1 - number + len(parts))
        for part in parts:
            if not (only_fits and search.best):
                search.look_at(part)
        for provider in providers:
            if search.best is None:
                search.stretch(provider)
    except KeyboardInterrupt:
        if search.best is None:
            raise
        interrupted = True
    if search.best is None and only_fits:
        raise InfeasibleError(f"{judge.graph.model_name} was not found to fit {judge.cluster.name}", [])
    if search.best is None:
        first = search.ran[0]
        raise first.refusal([j for p, j in search.tried if not isinstance(p, OnPart)], search.rooms[0])
    return search.outcome(interrupted=interrupted)


def until_it_fits(
    provider: Provider[SolvedT],
    judge: Judge,
    proposal: Proposal[SolvedT],
    room: float,
    seen: set[Hashable],
    best_seconds: float = math.inf,
    known_seconds: float = math.inf,
) -> list[Judged[SolvedT]]:
    """Simulate a proposal; while it overflows and may win, the same solved again as if devices were smaller.

    A search's memory is an estimate, off by much the same for all pipelines of an option. ``seen``: identities of what was
    simulated, and is not again; ``best_seconds``: of the fastest step so far; ``known_seconds``: of surrogates, likewise.
    """
    tried: list[Judged[SolvedT]] = []
    rounds = 0
    while (
        rounds < MEMORY_ROUNDS
        and len(tried) < ALLOCATOR_ROUNDS
        and (proposal.ranks, proposal.identity) not in seen
    ):
        if proposal.identity is not None:
            seen.add((proposal.ranks, proposal.identity))
        tried.append(Judged(proposal, judge.simulate(provider.candidate(proposal))))
        if tried[-1].simulated.fits or tried[-1].simulated.step_seconds >= best_seconds:
            break
        rounds += not (provider.learns and tried[-1].simulated.tensors_fit(judge.cluster.devices))
        smaller = provider.leaner(tried[-1], room, known_seconds)
        if smaller is None:
            break
        proposal, room = smaller
    return tried


def share_of_need(judge: Judge, simulated: Simulated) -> float:
    """Return the least ratio of the room that a device has for tensors to what the plan's hold of it at the peak."""
    return min(room / held for held, room in simulated.tensors_of(judge.cluster.devices) if held)


class _ProviderRuns:
    """The providers that ran so far, and what was simulated of theirs."""

    def __init__(self, judge: Judge, started: float, deadline: float, gap: float, only_fits: bool) -> None:
        self.judge, self.started, self.deadline, self.gap = judge, started, deadline, gap
        self.only_fits = only_fits
        self.ran: list[Provider[Any]] = []
        self.rooms: list[float] = []
        """The share of the memory that each provider that ran planned with last."""
        self.tried: list[tuple[Provider[Any], Judged[Any]]] = []
        self.bounded: list[RunnerUp] = []
        """Proposals that were proved to be slower."""
        self.searched: list[Part] = []
        """Parts of the cluster that were searched."""
        self.left_out: list[Part] = []
        """Parts of the cluster that were not searched: what they take at least is no less, or time was up."""
        self.late = False
        """True where time was up before a part that may have been faster."""
        self._seen: set[Hashable] = set()

    @property
    def best(self) -> tuple[Provider[Any], Judged[Any]] | None:
        """The fastest that fits; of those equally fast but for rounding, the one that holds least, on fewest devices."""
        fitting = [own for own in self.tried if own[1].simulated.fits]
        least = min((own[1].simulated.step_seconds for own in fitting), default=math.inf)
        fastest = [own for own in fitting if own[1].simulated.step_seconds <= least * (1 + ROUNDING)]
        return min(fastest, key=lambda own: _held(own[1].simulated), default=None)

    @property
    def best_seconds(self) -> float:
        """Its simulated step; infinite without any."""
        return math.inf if self.best is None else self.best[1].simulated.step_seconds

    @property
    def known_seconds(self) -> float:
        """The seconds that surrogates of others are compared with: its own surrogate, if that is above its simulation."""
        return math.inf if self.best is None else max(self.best_seconds, self.best[1].proposal.seconds)

    def run(self, provider: Provider[Any], others: int) -> None:
        """Simulate what a provider proposes: half of the time left to solve, then half of the rest if ``others`` follow."""
        report_phase(provider.words)
        solve_until = _later(self.deadline, 1 / 2)
        until = _later(self.deadline, 3 / 4) if others else self.deadline

        def round_of(number: int, room: float) -> float | None:
            """Simulate what is best with this share of the memory; the share to go on with, if nothing fits."""
            with may_be_lost(self.best is not None):
                proposals = provider.proposals(self.known_seconds, room, solve_until)
            if number == 0:
                self.ran.append(provider)
                self.rooms.append(room)
            self.rooms[-1] = room
            tried = self._simulated(provider, proposals, room, until)
            if not tried or self.best is not None:
                return None
            if provider.learns and all(
                own.simulated.tensors_fit(self.judge.cluster.devices) for own in tried
            ):
                return room
            smaller = room * ROOM_LEFT * max(share_of_need(self.judge, own.simulated) for own in tried)
            log.info("nothing fits; searching again with %.0f%% of the memory", 100 * smaller)
            return smaller

        memory_rounds(round_of, 1.0)

    def stretch(self, provider: Provider[Any]) -> None:
        """Simulate what a provider proposes with the least memory above the devices': it may reckon with too much."""
        for room in STRETCHED:
            proposals = provider.proposals(math.inf, room, _later(self.deadline, 1 / 2))
            for proposal in proposals[:LEANEST]:
                if self.best is None:
                    own = self.judge.simulate(provider.candidate(proposal))
                    self.tried.append((provider, Judged(proposal, own)))
            if proposals:
                return

    def compare(self, row: Provider[Any]) -> None:
        """Simulate what a row of every comparison proposes, however slow it is; until it fits, if it may be the fastest."""
        report_phase(row.words)
        with may_be_lost(self.best is not None):
            for proposal in row.proposals(math.inf, 1.0, _later(self.deadline, 1 / 2)):
                report_simulating(proposal.option)
                *_, last = until_it_fits(row, self.judge, proposal, 1.0, set(), self.best_seconds)
                self.tried.append((row, last))
        if self.best is not None:
            keep_from_here()

    def look_at(self, part: Part) -> None:
        """Search a part of the cluster, if it may be faster than what is known: if nothing fits the whole, if it has the
        larger devices."""
        least = self.known_seconds * (1 - self.gap)
        may_win = part.floor_seconds < least and (self.best is not None or self._larger(part))
        late = time.perf_counter() > self.deadline
        if late or not may_win:
            self.left_out.append(part)
            self.late |= may_win
            return
        self.searched.append(part)
        for provider in part.providers():
            try:
                self.run(provider, others=1)
            except (UsageError, InfeasibleError) as error:
                log.debug("%d devices: %s", len(part.ranks), error.what)

    def _larger(self, part: Part) -> bool:
        """Tell whether the smallest device of a part has more room than that of the cluster."""
        sizes = [device.room_bytes for device in self.judge.cluster.devices]
        return min(sizes[rank] for rank in part.ranks) > min(sizes)

    def _simulated(
        self, provider: Provider[Any], proposals: Sequence[Proposal[Any]], room: float, until: float
    ) -> list[Judged[Any]]:
        """Simulate the proposals that may win; return what was simulated."""
        tried: list[Judged[Any]] = []
        waiting: list[Proposal[Any]] = []
        overflowing: set[object] = set()
        for proposal in proposals:
            if self.best is not None and (self.only_fits or time.perf_counter() > until):
                break
            if proposal.seconds > provider.slack * self.known_seconds or self._is_slower(provider, proposal):
                continue
            if (
                len(tried) >= provider.simulated_first
                and proposal.seconds * _least_ratio(tried) >= self.best_seconds
            ):
                continue
            if proposal.option in overflowing:
                waiting.append(proposal)
                continue
            found = self._judged(provider, proposal, room)
            tried += found
            if found and not found[-1].simulated.fits:
                overflowing.add(proposal.option)
        for proposal in waiting:
            if self.best is not None:
                break
            tried += self._judged(provider, proposal, room)
        return tried

    def _judged(self, provider: Provider[Any], proposal: Proposal[Any], room: float) -> list[Judged[Any]]:
        report_simulating(proposal.option)
        with may_be_lost(self.best is not None):
            found = until_it_fits(
                provider, self.judge, proposal, room, self._seen, self.best_seconds, self.known_seconds
            )
        self.tried += [(provider, own) for own in found]
        if self.best is not None:
            keep_from_here()
        return found

    def _is_slower(self, provider: Provider[Any], proposal: Proposal[Any]) -> bool:
        """Tell if a proposal is proved slower than the best: where that is quicker than to simulate it."""
        if math.isinf(self.best_seconds) or not provider.quickly_bounded:
            return False
        candidate, bound = provider.candidate(proposal), proposal.least_seconds
        if bound < self.best_seconds:
            bound = max(bound, self.judge.lower_bound_seconds(candidate))
        if bound < self.best_seconds:
            return False
        peak, devices = proposal.peak_bytes, self.judge.cluster.devices
        alike = len({(device.counted_as, device.memory_bytes) for device in devices}) == 1
        chance = chance_of_not_fitting([(peak, devices[0])]) if alike else None
        self.bounded.append(RunnerUp(Label.of(candidate), bound, peak, chance=chance, bounded=True))
        return True

    def outcome(self, *, interrupted: bool) -> Outcome:
        """Return the best, with its certificate."""
        assert self.best is not None
        provider, best = self.best
        valued = provider.valued(best.proposal)
        certificate = self._certificate(provider, valued, interrupted=interrupted)
        others = [own.runner_up for _, own in self.tried if own is not best] + self.bounded
        runner_ups = tuple(sorted(others, key=lambda runner_up: runner_up.step_seconds))
        return Outcome(best.simulated, self.judge, certificate, runner_ups, details=valued.details)

    def _certificate(self, provider: Provider[Any], valued: Valued, *, interrupted: bool) -> Certificate:
        """About the families of all providers that ran, on the whole cluster and on parts of it."""
        every = [own.proved() for own in self.ran if not isinstance(own, OnPart)]
        proved = [own for own in every if own.space]
        floor_of = {part.ranks: part.floor_seconds for part in self.searched}
        on_parts = [
            max(own.proved().bound_seconds, floor_of[own.ranks])
            for own in self.ran
            if isinstance(own, OnPart)
        ]
        floors = [part.floor_seconds for part in self.left_out]
        objective = valued.objective_seconds
        least = min([*(own.bound_seconds for own in proved), *on_parts, *floors]) if proved else 0.0
        bound = min(objective, least)
        stopped = "interrupted" if interrupted else next((own.stopped for own in proved if own.stopped), "")
        stopped = stopped or ("time limit" if self.late else "")
        terms = valued.terms
        if terms is not None:
            options = [term for own in proved for term in own.options]
            if not proved:
                options.append(BoundTerm("none was looked at", 1, 0.0))
            if on_parts:
                options.append(BoundTerm.of("families on parts of the cluster", len(on_parts), min(on_parts)))
            if floors and (on_parts or min(floors) < objective):
                options.append(BoundTerm.of("other parts of the cluster", len(floors), min(floors)))
            if least > objective:
                options.append(
                    BoundTerm("this one, which needs more memory than was reckoned with", 1, objective)
                )
            terms = replace(terms, options=tuple(options))
        whole = [own.whole_ops_bound_seconds for own in proved if own.whole_ops_bound_seconds]
        return Certificate(
            objective=provider.objective,
            objective_seconds=objective,
            bound_seconds=bound,
            gap=relative_gap(objective, bound),
            whole_ops_bound_seconds=min(whole, default=0.0),
            simulated_lower_bound_seconds=0.0,
            space="; or ".join(own.space for own in proved) + self._parts_space()
            if proved
            else provider.words,
            method="; ".join(dict.fromkeys(own.method for own in proved))
            if proved
            else "nothing was searched",
            solver_status=stopped or ("optimal" if bound >= objective * (1 - OPTIMAL) else "bounded"),
            search_seconds=time.perf_counter() - self.started,
            terms=terms,
        )

    def _parts_space(self) -> str:
        """Say which parts of the cluster the families were looked at on too."""
        searched = len(self.searched)
        if not searched and not self.late:
            return ""
        count = counted(searched + len(self.left_out), "part")
        return (
            f"; and the same on {count} of the cluster, fewer nodes of a kind or fewer devices of each, "
            f"{searched} searched, the rest bounded"
        )


def _held(simulated: Simulated) -> tuple[int, int]:
    """Return the bytes on the fullest device, and the number of devices in use."""
    return simulated.most_bytes, len({rank for group in simulated.candidate.groups for rank in group})


def _least_ratio(tried: Sequence[Judged[Any]]) -> float:
    """Return the least simulated / surrogate seconds."""
    return min(own.simulated.step_seconds / own.proposal.seconds for own in tried)


def _later(deadline: float, share: float) -> float:
    """Return the moment when this share of the time until the deadline is gone."""
    now = time.perf_counter()
    return deadline if math.isinf(deadline) else now + share * (deadline - now)
