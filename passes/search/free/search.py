"""The search over placements for one number of micro-batches, from coarse to fine; anytime, with a proved bound.

    starts ─► coarse units: annealing, one integer program ─► level by level: annealing
           ─► neighbourhoods: minimum cuts of pairs of devices, integer programs over the units at their borders
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
from passes.search.free.cut import Cuts, minimum_cuts
from passes.search.free.ilp import MOST_TERMS, program_terms, solve_program
from passes.search.free.model import FreeModel
from passes.search.free.moves import borders
from passes.search.free.predict import Predictor
from passes.search.free.problem import FreeProblem, evaluate, overflow_bytes
from passes.search.free.starts import Home, all_starts, obeying

log = logging.getLogger("partitioner")

COARSE_UNITS = 96
"""Where annealing begins; an integer program over them often closes its gap in seconds."""
EXACT_CHOICES = 900
"""Units times devices up to which the integer program is over all units, and its bound proves optimality."""
ANNEAL_PER_UNIT, MOST_STEPS = 120, 24_000
REFINE_PER_UNIT, MOST_REFINE_STEPS = 12, 8_000
LEADERS = 3
"""Placements that are annealed from, beside the best."""
FREED_UNITS = 48
"""Units that one neighbourhood leaves open."""
QUIET_NEIGHBOURHOODS = 4
MANY_TASKS, FEW, FIRST = 1000, 4, 2
"""From so many tasks on, placements are not predicted by the dozen."""
CLIMB_LEADERS = 2
CLIMB_WORK, MOST_TRIES, LEAST_TRIES = 150_000, 1200, 100
"""Tasks that are played while climbing from one placement, as tries; a quarter of them without success ends it."""
PROGRAM_SECONDS = 4.0
MOST_SEEDS, QUIET_SEEDS = 8, 2
"""Random numbers that a large problem is searched with; so many in a row without a better prediction end it."""
ENOUGH = 0.5
"""Of what the last took: so much time must be left for the next."""


class Method(Enum):
    """A way of looking for placements; the value is how people read it."""

    MINIMUM_CUTS = "minimum s-t cuts"
    ANNEALING = "annealing"
    INTEGER_PROGRAM = "integer program"
    NEIGHBOURHOODS = "integer programs over neighbourhoods"
    CLIMBING = "hill climbing"


@dataclass
class Found:
    """A placement of the search's units."""

    home: Home
    trail: Trail
    objective_seconds: float
    fits: bool


@dataclass(eq=False)
class CountSearch:
    """One number of micro-batches: its problems, and what was found. ``capacity_scale``: devices as if smaller."""

    model: FreeModel
    batch_size: int
    microbatches: int
    seed: int = 0
    capacity_scale: float = 1.0
    found: dict[Home, Found] = field(default_factory=dict)

    def __post_init__(self) -> None:
        model, m = self.model, self.microbatches
        self.problem = self._scaled(model.problem(model.unit_of, self.batch_size, m))
        self.exact = self._scaled(model.problem(model.exact_unit_of, self.batch_size, m))
        self.lossless = self.exact.units == self.problem.units
        self.tasks = model.tasks(self.batch_size, m)
        self.predict = Predictor(self.problem, self.tasks, model.unit_of_task, m)
        self.bound: Bound = simple_bound(self.exact)
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
        """Simple placements; the least predicted seconds of them."""
        for home, trail in all_starts(
            self.problem, self.tasks, self.model.unit_of_task, self.model.module_of_unit
        ):
            self.offer(home, trail)
        return min(self.predict(found.home) for found in self._promising(FEW))

    def best(self) -> Found:
        """By the surrogate; placements that fit come first."""
        return min(self.found.values(), key=lambda f: (not f.fits, f.objective_seconds))

    def ranked(self, count: int) -> list[Found]:
        """Best first, in turn by prediction and by the surrogate."""
        promising = self._promising(max(FEW, 2 * count))
        by_prediction = heapq.nsmallest(count, promising, key=lambda f: self.predict(f.home))
        by_load = heapq.nsmallest(count, self.found.values(), key=lambda f: (not f.fits, f.objective_seconds))
        chosen: dict[Home, Found] = {}
        for pair in itertools.zip_longest(by_prediction, by_load):
            for each in pair:
                if each is not None:
                    chosen.setdefault(each.home, each)
        return list(chosen.values())[:count]

    def _promising(self, count: int) -> list[Found]:
        """What is worth predicting: everything, or of a large graph the best by the surrogate and the first offered."""
        if len(self.tasks) <= MANY_TASKS:
            return list(self.found.values())
        known = [found for found in self.found.values() if self.predict.knows(found.home)]
        first = list(self.found.values())[:FIRST]
        best = heapq.nsmallest(count, self.found.values(), key=lambda f: (not f.fits, f.objective_seconds))
        return list({found.home: found for found in (*known, *first, *best)}.values())

    def run(self, deadline: float, *, latency: bool = False) -> None:
        """Improve until nothing helps or the time is over; large problems with other random numbers too."""
        if self.problem.devices < 2 or not (self.problem.allowed.sum(axis=0) > 1).any():
            return
        now = time.perf_counter()
        self._cuts(now + 0.2 * (deadline - now))
        first, silent = self.seed, 0
        large = self.problem.units * self.problem.devices > EXACT_CHOICES
        best = math.inf
        for self.seed in range(first, first + (MOST_SEEDS if large else 1)):
            began = time.perf_counter()
            self._once(deadline, latency and self.microbatches == 1)
            found = min(self.predict(each.home) for each in self._promising(FEW))
            silent = 0 if found < best * (1 - 1e-3) else silent + 1
            best = min(best, found)
            now = time.perf_counter()
            if silent == QUIET_SEEDS or now + ENOUGH * (now - began) > deadline:
                break
        self.seed = first

    def _once(self, deadline: float, latency: bool) -> None:
        """All moves. The busiest device is no measure of latency, but what is balanced is a start."""
        now = time.perf_counter()
        balance, refine = (0.3, 0.5) if latency else (0.55, 0.75)
        self._multilevel(now + balance * (deadline - now))
        self._neighbourhoods(now + refine * (deadline - now))
        self._climb(deadline, 2 * CLIMB_LEADERS if latency else CLIMB_LEADERS)

    def _cuts(self, deadline: float) -> None:
        if self.problem.devices != 2:
            return
        cuts = minimum_cuts(self.problem, deadline)
        for home in cuts.homes:
            self.offer(home, Trail.of(Origin.MINIMUM_CUT))
        proof: Cuts = cuts if self.lossless else minimum_cuts(self.exact, deadline)
        self._raise_bound(simple_bound(self.exact, proof))
        self.methods.append(Method.MINIMUM_CUTS)

    def _raise_bound(self, bound: Bound) -> None:
        if bound.seconds > self.bound.seconds:
            self.bound = bound

    @property
    def proved(self) -> bool:
        """Whether the best by the surrogate cannot be beaten."""
        best = self.best()
        return best.fits and best.objective_seconds <= self.bound.seconds * (1 + 1e-6)

    def _multilevel(self, deadline: float) -> None:
        chain = levels(self.problem, COARSE_UNITS)
        coarse = chain[-1].problem if chain else self.problem
        leaders = heapq.nsmallest(
            LEADERS, self.found.values(), key=lambda f: (not f.fits, f.objective_seconds)
        )
        steps = min(MOST_STEPS, ANNEAL_PER_UNIT * coarse.units)
        best: list[tuple[Home, float]] = []
        share = (deadline - time.perf_counter()) * 0.5 / (len(leaders) + 1)
        for number, leader in enumerate(leaders):
            home = _up(chain, leader.home)
            until = time.perf_counter() + share
            home = anneal(coarse, home, Cooling(steps), self.seed + number, until)
            best.append((home, self._value(coarse, home)))
        self.methods.append(Method.ANNEALING)
        best.sort(key=lambda pair: pair[1])
        solved = self._program(coarse, best[0][0], time.perf_counter() + share, exact=not chain)
        homes = [home for home, _ in best] if solved is None else [solved, *(home for home, _ in best)]
        for number, home in enumerate(dict.fromkeys(homes)):
            self._down(chain, home, number, deadline)

    def _value(self, problem: FreeProblem, home: Home) -> float:
        loads = evaluate(problem, home)
        over = overflow_bytes(problem, loads.memory_bytes)
        return loads.objective_seconds * (10.0 if over > 0 else 1.0)

    def _down(self, chain: Sequence[Level], home: Home, number: int, deadline: float) -> None:
        """Refine a coarse placement level by level."""
        for depth in reversed(range(len(chain))):
            below = chain[depth - 1].problem if depth else self.problem
            home = chain[depth].down(home)
            steps = min(MOST_REFINE_STEPS, REFINE_PER_UNIT * below.units)
            left = deadline - time.perf_counter()
            if left > 0:
                cooling = Cooling(steps, first=2e-3)
                home = anneal(below, home, cooling, self.seed + number, time.perf_counter() + 0.3 * left)
        self.offer(home, Trail.of(Origin.ANNEALED))

    def _program(self, problem: FreeProblem, home: Home, deadline: float, *, exact: bool) -> Home | None:
        """One integer program over all units of ``problem``."""
        seconds = min(PROGRAM_SECONDS, deadline - time.perf_counter())
        small = problem.units * problem.devices <= EXACT_CHOICES
        if seconds < 0.2 or not small or program_terms(problem) > MOST_TERMS:
            return None
        if exact and self.lossless and self.proved:
            return None
        value = self._value(problem, home)
        known = self.bound.seconds if exact and self.lossless else 0.0
        found = solve_program(problem, home, value, bound_seconds=known, limit_seconds=seconds)
        self.methods.append(Method.INTEGER_PROGRAM)
        if exact and self.lossless and self.capacity_scale == 1:
            self._raise_bound(Bound(found.bound_seconds, BoundMethod.INTEGER_PROGRAM))
        return found.home

    def _neighbourhoods(self, deadline: float) -> None:
        """Fix most, free some, while that helps: around the busiest device of the best placement."""
        draw = np.random.default_rng(self.seed)
        silent = 0
        while silent < QUIET_NEIGHBOURHOODS and time.perf_counter() < deadline and not self.proved:
            best = self.best()
            loads = evaluate(self.problem, best.home).seconds
            busiest = int(loads.argmax())
            others = [d for d in np.argsort(loads, kind="stable").tolist() if d != busiest]
            other = others[silent % len(others)] if silent < 2 else others[int(draw.integers(len(others)))]
            improved = False
            if self.problem.devices > 2:
                cuts = minimum_cuts(self.problem, deadline, pair=(busiest, other), home=best.home, most=6)
                for home in cuts.homes:
                    self.offer(home, Trail.of(Origin.CUT_ANEW))
            free = self._freed(best.home, (busiest, other), draw)
            if len(free) > 1 and program_terms(self.problem, free) <= MOST_TERMS:
                seconds = min(2.0, deadline - time.perf_counter())
                solved = solve_program(
                    self.problem,
                    best.home,
                    self._value(self.problem, best.home),
                    free=free,
                    bound_seconds=self.bound.seconds,
                    limit_seconds=seconds,
                    gap=1e-4,
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
        """Units of the pair at borders, then their neighbours, up to ``FREED_UNITS``."""
        problem = self.problem
        edge = [u for u in borders(problem, home) if home[u] in pair]
        if len(edge) > FREED_UNITS:
            edge = sorted(draw.choice(edge, FREED_UNITS, replace=False).tolist())
        free = dict.fromkeys(edge or [u for u in range(problem.units) if home[u] in pair][:FREED_UNITS])
        queue = list(free)
        for u in queue:
            for v in problem.neighbours[u]:
                if len(free) >= FREED_UNITS:
                    return list(free)
                if v not in free and home[v] in pair:
                    free[v] = None
                    queue.append(v)
        return list(free)

    def _climb(self, deadline: float, count: int) -> None:
        """On the predicted step, from the best few by prediction."""
        around = Neighbourhood(self.problem, self.model.module_of_unit)
        work = len(self.tasks) * min(3, self.microbatches)
        tries = max(LEAST_TRIES, min(MOST_TRIES, CLIMB_WORK // work))
        promising = self._promising(FEW)
        leaders = heapq.nsmallest(count, promising, key=lambda f: self.predict(f.home))
        for number, leader in enumerate(leaders):
            now = time.perf_counter()
            home = climb(
                self.predict,
                leader.home,
                around,
                tries=tries,
                quiet=tries // 4,
                seed=self.seed + number,
                deadline=now + (deadline - now) / (len(leaders) - number),
            )
            self.offer(home, leader.trail if home == leader.home else leader.trail.then(Origin.MOVED))
        self.methods.append(Method.CLIMBING)


def _up(chain: Sequence[Level], home: Home) -> Home:
    for level in chain:
        home = level.up(home)
    return home
