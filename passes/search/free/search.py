"""The search for one number of micro-batches; anytime, with a proved bound.

    starts ─► integer programs: over all units if they are few, then over pairs of devices
           ─► local search on the predicted step

Everything that was found is kept: placements that are best for the busiest device, and those that are predicted best.
"""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

import numpy as np

from cost_models.arrays import FloatArray
from passes.lower.candidate import Origin, Trail
from passes.search.anywhere.bound import simple_bound
from passes.search.anywhere.climb import Neighbourhood, climb
from passes.search.anywhere.pairs import divided
from passes.search.anywhere.problem import Home, Loads, PlacementProblem, evaluate
from passes.search.anywhere.program import MOST_CHOICES, PROGRAM_SECONDS, solve_program
from passes.search.bound import Bound, BoundMethod
from passes.search.free.model import FreeModel
from passes.search.free.predict import Predictor
from passes.search.heft import earliest_finish
from passes.search.microbatches import spread

SEED = 0
"""First random number."""
RUN_BISECTIONS = 40
"""Halvings of the longest run's seconds: what is left is rounding."""
CLIMBED_PREDICTING = 6
"""Placements that are climbed from, one after the other: a limit of work."""
QUIET_WORK, LEAST_QUIET, MOST_QUIET = 80_000, 25, 600
"""Tasks played without a better placement that end climbing, as a number of predictions; and the limits of that number.
A limit of work: about a second."""
MANY_TASKS, FEW_PREDICTED = 1000, 4
"""Tasks from which on placements are not all predicted: a prediction takes milliseconds. Then so many are, at least."""
PROVED = 1e-6
"""Relative distance of a placement and the bound below which nothing is left to prove: rounding."""


class Method(Enum):
    """A way of looking for placements; its value is for people to read."""

    INTEGER_PROGRAM = "integer program"
    PAIRS = "integer programs over pairs of devices"
    CLIMBING = "hill climbing"


@dataclass(frozen=True, eq=False)
class KnownPlacement:
    """A placement of the search's units. ``trail``: the method that found it, and from what."""

    home: Home
    trail: Trail
    loads: Loads


@dataclass(eq=False)
class CountSearch:
    """Search for one number of micro-batches: its problems and the placements found.

    ``capacity_scale``: part of every device's memory that may be used.
    """

    model: FreeModel
    batch_size: int
    microbatches: int
    capacity_scale: float = 1.0
    known: dict[Home, KnownPlacement] = field(default_factory=dict)

    def __post_init__(self) -> None:
        model, m = self.model, self.microbatches
        self.seed = SEED
        self.problem = self._scaled(model.problem(model.unit_of, self.batch_size, m))
        self.exact = self._scaled(model.problem(model.exact_unit_of, self.batch_size, m))
        self.lossless = self.exact.units == self.problem.units
        self.tasks = model.tasks(self.batch_size, m)
        self.predict = Predictor(self.problem, self.tasks, model.unit_of_task, m)
        self.around = Neighbourhood(self.problem, [range(self.problem.units)], model.module_of_unit)
        self.bound: Bound = simple_bound(self.exact)
        self.methods: list[Method] = []

    def _scaled(self, problem: PlacementProblem) -> PlacementProblem:
        problem.capacity_bytes[:] *= self.capacity_scale
        return problem

    def offer(self, home: Sequence[int], trail: Trail) -> None:
        """Remember a placement; pins are made to hold."""
        key = self.problem.obeying(home)
        if key not in self.known:
            self.known[key] = KnownPlacement(key, trail, evaluate(self.problem, key))

    def start(self) -> float:
        """Begin with simple placements; return the least predicted seconds among them."""
        self.offer(self._soonest(), Trail.of(Origin.EARLIEST_FINISH))
        fastest = np.argsort(self.problem.seconds.sum(axis=1), kind="stable").tolist()
        for used in spread(range(2, len(fastest) + 1)):
            chosen = fastest[:used]
            for devices in dict.fromkeys((tuple(sorted(chosen)), tuple(chosen), tuple(chosen[::-1]))):
                self.offer(equal_runs(self.problem, devices), Trail.of(Origin.CONTIGUOUS_RUNS, used))
        return min(self.predict(each.home) for each in self._promising(FEW_PREDICTED))

    def _soonest(self) -> Home:
        """Place each task where its forward ends soonest; memory is not looked at."""
        tasks = self.tasks
        sent, latency, per_byte = (
            tasks.sent_bytes.tolist(),
            tasks.latency.tolist(),
            tasks.seconds_per_byte.tolist(),
        )

        def arrival(producer: int, end: float, source: int, target: int) -> float:
            return float(end + latency[source][target] + sent[producer] * per_byte[source][target])

        return earliest_finish(
            sorted(range(len(tasks)), key=lambda task: (-tasks.urgency[task], task)),
            tasks.producers,
            tasks.forward.tolist(),
            arrival,
            self.model.unit_of_task.tolist(),
            [np.flatnonzero(allowed).tolist() for allowed in self.problem.allowed.T],
        )

    def best(self, count: int = 1) -> list[KnownPlacement]:
        """Return the best by the objective, what fits first."""
        return heapq.nsmallest(count, self.known.values(), key=lambda each: each.loads.rank)

    def ranked(self, count: int) -> list[KnownPlacement]:
        """Return the ``count`` best by prediction."""
        promising = self._promising(max(FEW_PREDICTED, 2 * count))
        return heapq.nsmallest(count, promising, key=lambda each: self.predict(each.home))

    def _promising(self, count: int) -> list[KnownPlacement]:
        """Choose the placements to predict: all; of a large graph, the best by the objective and what is predicted."""
        if len(self.tasks) <= MANY_TASKS:
            return list(self.known.values())
        predicted = [each for each in self.known.values() if self.predict.knows(each.home)]
        return list({each.home: each for each in (*predicted, *self.best(count))}.values())

    def run(self, deadline: float) -> None:
        """Improve until nothing helps or the time is over.

        The objective, the busiest device, is no measure of latency, but balanced placements are a start.
        """
        if self.problem.devices < 2 or not (self.problem.allowed.sum(axis=0) > 1).any():
            return
        self._balance((time.perf_counter() + deadline) / 2)
        self._climb(deadline)

    @property
    def proved(self) -> bool:
        """True if the best by the objective meets the bound."""
        loads = self.best()[0].loads
        return not loads.overflow_bytes and loads.objective_seconds <= self.bound.seconds * (1 + PROVED)

    def _balance(self, deadline: float) -> None:
        """Make the busiest device less busy: by one program over everything, by programs over pairs."""
        problem = self.problem
        few = problem.units * problem.devices <= MOST_CHOICES
        seconds = min(PROGRAM_SECONDS, deadline - time.perf_counter())
        if few and seconds > 0 and not (self.lossless and self.proved):
            self._solve(seconds)
        if not self.proved and time.perf_counter() < deadline:
            self.offer(divided(problem, self.best()[0].home, deadline), Trail.of(Origin.INTEGER_PROGRAM))
            self.methods.append(Method.PAIRS)

    def _solve(self, seconds: float) -> None:
        """Solve one integer program over all units."""
        best = self.best()[0]
        # where nothing that fits is known, a slower placement may
        value = best.loads.objective_seconds * (10.0 if best.loads.overflow_bytes else 1.0)
        known = self.bound.seconds if self.lossless else 0.0
        answer = solve_program(self.problem, best.home, value, bound_seconds=known, limit_seconds=seconds)
        self.methods.append(Method.INTEGER_PROGRAM)
        if answer.home is not None:
            self.offer(answer.home, Trail.of(Origin.INTEGER_PROGRAM))
        if self.lossless and self.capacity_scale == 1 and answer.bound_seconds > self.bound.seconds:
            self.bound = Bound(answer.bound_seconds, BoundMethod.INTEGER_PROGRAM)

    def _climb(self, deadline: float) -> None:
        """Climb on the predicted step, from the best few by prediction."""
        work = len(self.tasks) * self.predict.played_microbatches
        leaders = self.ranked(CLIMBED_PREDICTING)
        for number, leader in enumerate(leaders):
            now = time.perf_counter()
            home = climb(
                self.predict,
                leader.home,
                partial(self.around.draw, draw=random.Random(self.seed + number)),
                quiet=max(LEAST_QUIET, min(MOST_QUIET, QUIET_WORK // work)),
                deadline=now + (deadline - now) / (len(leaders) - number),
            )
            self.offer(home, leader.trail.then(Origin.MOVED))
        self.methods.append(Method.CLIMBING)


def equal_runs(problem: PlacementProblem, devices: Sequence[int]) -> Home:
    """Cut the program's order into runs on ``devices`` in turn so that the longest is as short as possible."""
    begun = np.concatenate([np.zeros((problem.devices, 1)), np.cumsum(problem.seconds, axis=1)], axis=1)
    low, high = 0.0, float(problem.seconds.max(axis=0).sum())
    best = _filled(begun, devices, high)
    for _ in range(RUN_BISECTIONS):
        middle = (low + high) / 2
        home = _filled(begun, devices, middle)
        if len(home) < problem.units:
            low = middle
        else:
            best, high = home, middle
    return tuple(best)


def _filled(begun: FloatArray, devices: Sequence[int], most: float) -> list[int]:
    """Fill device after device up to ``most`` seconds, as far as that goes. ``begun``: [K, n + 1] seconds before units."""
    home: list[int] = []
    for d in devices:
        first = len(home)
        end = int(np.searchsorted(begun[d], begun[d, first] + most * (1 + 1e-12), side="right")) - 1
        home += [d] * (max(first, end) - first)
    return home
