"""The search over placements for one number of micro-batches, from coarse to fine; anytime, with a proved bound.

    starts ─► coarse units: annealing, or one integer program if all are few ─► level by level: annealing
           ─► neighbourhoods: integer programs over the units at the borders of pairs of devices
           ─► hill climbing on the predicted step

Everything that was found is kept: placements that are best for the busiest device, and those that are predicted best.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from passes.lower.candidate import Origin, Trail
from passes.search.bound import Bound, BoundMethod
from passes.search.free.anneal import Cooling, anneal
from passes.search.free.bound import simple_bound
from passes.search.free.climb import Neighbourhood, climb
from passes.search.free.coarsen import Level, levels
from passes.search.free.ilp import program_terms, solve_program
from passes.search.free.model import FreeModel
from passes.search.free.moves import borders
from passes.search.free.predict import Predictor
from passes.search.free.problem import FreeProblem, evaluate, overflow_bytes
from passes.search.free.starts import Home, all_starts, obeying
from passes.search.free.tuning import DEFAULT, FreeTuning

log = logging.getLogger("partitioner")


class Method(Enum):
    """A way of looking for placements; its value is for people to read."""

    ANNEALING = "annealing"
    INTEGER_PROGRAM = "integer program"
    NEIGHBOURHOODS = "integer programs over neighbourhoods"
    CLIMBING = "hill climbing"


@dataclass
class Found:
    """A placement of the search's units. ``trail``: the method that found it, and from what."""

    home: Home
    trail: Trail
    objective_seconds: float
    fits: bool


@dataclass(eq=False)
class CountSearch:
    """Search for one number of micro-batches: its problems and the placements found.

    ``seed``: first random number; ``capacity_scale``: part of every device's memory that may be used.
    """

    model: FreeModel
    batch_size: int
    microbatches: int
    seed: int = 0
    capacity_scale: float = 1.0
    tuning: FreeTuning = DEFAULT
    found: dict[Home, Found] = field(default_factory=dict)

    def __post_init__(self) -> None:
        model, m = self.model, self.microbatches
        self.problem = self._scaled(model.problem(model.unit_of, self.batch_size, m))
        self.exact = self._scaled(model.problem(model.exact_unit_of, self.batch_size, m))
        self.lossless = self.exact.units == self.problem.units
        self.tasks = model.tasks(self.batch_size, m)
        self.predict = Predictor(self.problem, self.tasks, model.unit_of_task, m, self.tuning)
        self.bound: Bound = simple_bound(self.exact, steps=self.tuning.bound_steps)
        self.methods: list[Method] = []

    def _scaled(self, problem: FreeProblem) -> FreeProblem:
        problem.capacity_bytes[:] *= self.capacity_scale
        return problem

    def offer(self, home: Sequence[int], trail: Trail) -> Found:
        """Remember a placement; pins are made to hold."""
        key = obeying(self.problem, home)
        if key not in self.found:
            loads = evaluate(self.problem, key)
            fits = overflow_bytes(self.problem, loads.memory_bytes) == 0
            self.found[key] = Found(key, trail, loads.objective_seconds, fits)
        return self.found[key]

    def start(self) -> float:
        """Begin with simple placements; return the least predicted seconds of them."""
        for home, trail in all_starts(
            self.problem, self.tasks, self.model.unit_of_task, self.model.module_of_unit, self.tuning
        ):
            self.offer(home, trail)
        return min(self.predict(found.home) for found in self._promising(self.tuning.few_predicted))

    def best(self) -> Found:
        """Return the best by the surrogate; placements that fit come first."""
        return min(self.found.values(), key=lambda f: (not f.fits, f.objective_seconds))

    def ranked(self, count: int) -> list[Found]:
        """Return the ``count`` best, in turn the next by prediction and the next by the surrogate."""
        promising = self._promising(max(self.tuning.few_predicted, 2 * count))
        rankings = {
            "prediction": heapq.nsmallest(count, promising, key=lambda f: self.predict(f.home)),
            "load": heapq.nsmallest(
                count, self.found.values(), key=lambda f: (not f.fits, f.objective_seconds)
            ),
        }
        chosen: dict[Home, Found] = {}
        for pair in itertools.zip_longest(*(rankings[name] for name in self.tuning.ranked_by)):
            for each in pair:
                if each is not None:
                    chosen.setdefault(each.home, each)
        return list(chosen.values())[:count]

    def _promising(self, count: int) -> list[Found]:
        """Choose the placements to predict: all; of a large graph, the best by the surrogate and the first offered."""
        if len(self.tasks) <= self.tuning.many_tasks:
            return list(self.found.values())
        known = [found for found in self.found.values() if self.predict.knows(found.home)]
        first = list(self.found.values())[: self.tuning.first_predicted]
        best = heapq.nsmallest(count, self.found.values(), key=lambda f: (not f.fits, f.objective_seconds))
        return list({found.home: found for found in (*known, *first, *best)}.values())

    def run(self, deadline: float, *, latency: bool = False) -> None:
        """Improve until nothing helps or the time is over; large problems with other random numbers too."""
        if self.problem.devices < 2 or not (self.problem.allowed.sum(axis=0) > 1).any():
            return
        tuning = self.tuning
        first, silent = self.seed, 0
        large = self.problem.units * self.problem.devices > tuning.exact_choices
        best = math.inf
        for self.seed in range(first, first + (tuning.most_seeds if large else 1)):
            began = time.perf_counter()
            self._once(deadline, latency and self.microbatches == 1)
            found = min(self.predict(each.home) for each in self._promising(tuning.few_predicted))
            silent = 0 if found < best * (1 - tuning.seed_gain) else silent + 1
            best = min(best, found)
            now = time.perf_counter()
            if silent == tuning.quiet_seeds or now + tuning.seed_time * (now - began) > deadline:
                break
        self.seed = first

    def _once(self, deadline: float, latency: bool) -> None:
        """Search once with one set of random numbers.

        The surrogate, the busiest device, is no measure of latency, but balanced placements are a start.
        """
        now = time.perf_counter()
        balance, refine = (0.3, 0.5) if latency else (0.55, 0.75)
        self._multilevel(now + balance * (deadline - now))
        self._neighbourhoods(now + refine * (deadline - now))
        self._climb(deadline, 2 * self.tuning.climb_leaders if latency else self.tuning.climb_leaders)

    @property
    def proved(self) -> bool:
        """True if the best by the surrogate meets the bound."""
        best = self.best()
        return best.fits and best.objective_seconds <= self.bound.seconds * (1 + 1e-6)

    def _multilevel(self, deadline: float) -> None:
        """Improve the leaders on coarse units, by annealing and a program, then refine them level by level."""
        tuning = self.tuning
        chain = levels(self.problem, tuning.coarse_units, tuning)
        coarse = chain[-1].problem if chain else self.problem
        leaders = heapq.nsmallest(
            tuning.leaders, self.found.values(), key=lambda f: (not f.fits, f.objective_seconds)
        )
        steps = min(tuning.anneal_most_steps, tuning.anneal_steps_per_unit * coarse.units)
        cooling = Cooling(steps, tuning.anneal_first, tuning.anneal_last)
        best: list[tuple[Home, float]] = []
        share = (deadline - time.perf_counter()) * 0.5 / (len(leaders) + 1)
        for number, leader in enumerate(leaders):
            home = _up(chain, leader.home)
            until = time.perf_counter() + share
            home = anneal(coarse, home, cooling, self.seed + number, until, tuning)
            best.append((home, self._value(coarse, home)))
        self.methods.append(Method.ANNEALING)
        if not best:
            return
        best.sort(key=lambda pair: pair[1])
        solved = None if chain else self._program(best[0][0], time.perf_counter() + share)
        homes = [home for home, _ in best] if solved is None else [solved, *(home for home, _ in best)]
        for number, home in enumerate(dict.fromkeys(homes)):
            self._down(chain, home, number, deadline)

    def _value(self, problem: FreeProblem, home: Home) -> float:
        """Return the surrogate in seconds; ten times as many if the placement does not fit."""
        loads = evaluate(problem, home)
        over = overflow_bytes(problem, loads.memory_bytes)
        return loads.objective_seconds * (10.0 if over > 0 else 1.0)

    def _down(self, chain: Sequence[Level], home: Home, number: int, deadline: float) -> None:
        """Refine a coarse placement level by level."""
        tuning = self.tuning
        for depth in reversed(range(len(chain))):
            below = chain[depth - 1].problem if depth else self.problem
            home = chain[depth].down(home)
            steps = min(tuning.refine_most_steps, tuning.refine_steps_per_unit * below.units)
            left = deadline - time.perf_counter()
            if left > 0:
                cooling = Cooling(steps, tuning.refine_first, tuning.anneal_last)
                until = time.perf_counter() + 0.3 * left
                home = anneal(below, home, cooling, self.seed + number, until, tuning)
        self.offer(home, Trail.of(Origin.ANNEALED))

    def _program(self, home: Home, deadline: float) -> Home | None:
        """Solve one integer program over all units; None if it was not tried or found nothing better."""
        problem, tuning = self.problem, self.tuning
        seconds = min(tuning.program_seconds, deadline - time.perf_counter())
        few = (
            problem.units * problem.devices <= tuning.exact_choices
            and program_terms(problem) <= tuning.program_terms
        )
        if not tuning.exact_program or not few or seconds < 0.2 or (self.lossless and self.proved):
            return None
        value = self._value(problem, home)
        known = self.bound.seconds if self.lossless else 0.0
        found = solve_program(problem, home, value, bound_seconds=known, limit_seconds=seconds)
        self.methods.append(Method.INTEGER_PROGRAM)
        if self.lossless and self.capacity_scale == 1 and found.bound_seconds > self.bound.seconds:
            self.bound = Bound(found.bound_seconds, BoundMethod.INTEGER_PROGRAM)
        return found.home

    def _neighbourhoods(self, deadline: float) -> None:
        """Fix most units and free some of the busiest device and another, while that helps."""
        tuning, draw = self.tuning, np.random.default_rng(self.seed)
        silent = 0
        while silent < tuning.quiet_neighbourhoods and time.perf_counter() < deadline and not self.proved:
            best = self.best()
            loads = evaluate(self.problem, best.home).seconds
            busiest = int(loads.argmax())
            others = [d for d in np.argsort(loads, kind="stable").tolist() if d != busiest]
            other = others[silent % len(others)] if silent < 2 else others[int(draw.integers(len(others)))]
            free = self._freed(best.home, (busiest, other), draw)
            small = program_terms(self.problem, free) <= tuning.program_terms
            if tuning.neighbourhood_programs and len(free) > 1 and small:
                seconds = min(tuning.neighbourhood_seconds, deadline - time.perf_counter())
                solved = solve_program(
                    self.problem,
                    best.home,
                    self._value(self.problem, best.home),
                    free=free,
                    bound_seconds=self.bound.seconds,
                    limit_seconds=seconds,
                    gap=tuning.neighbourhood_gap,
                )
                if solved.home is not None:
                    self.offer(solved.home, Trail.of(Origin.INTEGER_PROGRAM))
            after = self.best()
            improved = after.objective_seconds < best.objective_seconds * (1 - 1e-6) or (
                after.fits and not best.fits
            )
            silent = 0 if improved else silent + 1
        self.methods.append(Method.NEIGHBOURHOODS)

    def _freed(self, home: Home, pair: tuple[int, int], draw: np.random.Generator) -> list[int]:
        """Choose units of the pair: those at borders, then their neighbours, up to ``freed_units``."""
        problem = self.problem
        edge = [u for u in borders(problem, home) if home[u] in pair]
        if len(edge) > self.tuning.freed_units:
            edge = sorted(draw.choice(edge, self.tuning.freed_units, replace=False).tolist())
        free = dict.fromkeys(
            edge or [u for u in range(problem.units) if home[u] in pair][: self.tuning.freed_units]
        )
        queue = list(free)
        for u in queue:
            for v in problem.neighbours[u]:
                if len(free) >= self.tuning.freed_units:
                    return list(free)
                if v not in free and home[v] in pair:
                    free[v] = None
                    queue.append(v)
        return list(free)

    def _climb(self, deadline: float, count: int) -> None:
        """Climb on the predicted step, from the best few by prediction."""
        tuning = self.tuning
        around = Neighbourhood(self.problem, self.model.module_of_unit, tuning)
        work = len(self.tasks) * min(3, self.microbatches)
        tries = max(tuning.climb_least_tries, min(tuning.climb_most_tries, tuning.climb_work // work))
        promising = self._promising(tuning.few_predicted)
        leaders = heapq.nsmallest(count, promising, key=lambda f: self.predict(f.home))
        for number, leader in enumerate(leaders):
            now = time.perf_counter()
            home = climb(
                self.predict,
                leader.home,
                around,
                tries=tries,
                quiet=int(tuning.climb_quiet_share * tries),
                seed=self.seed + number,
                deadline=now + (deadline - now) / (len(leaders) - number),
                slack=tuning.climb_slack,
            )
            self.offer(home, leader.trail if home == leader.home else leader.trail.then(Origin.MOVED))
        self.methods.append(Method.CLIMBING)


def _up(chain: Sequence[Level], home: Home) -> Home:
    for level in chain:
        home = level.up(home)
    return home
