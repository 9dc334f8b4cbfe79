"""Local search: units, pairs of units and stretches of the program's order are moved while the busiest device gets less.

Simulated annealing on a p-norm of the loads (Kirkpatrick, Gelatt, Vecchi 1983); the best legal placement is kept, not the
last. A move costs O(nets of what moves · K). Deterministic for a seed, but for the deadline.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from passes.search.free.moves import Moves
from passes.search.free.problem import FreeProblem
from passes.search.free.tuning import DEFAULT, FreeTuning

LOOK_AT_CLOCK = 64
"""Steps between two looks at the clock."""


@dataclass(frozen=True)
class Cooling:
    """Number of steps; first and last temperature relative to the energy at the start."""

    steps: int
    first: float
    last: float


def anneal(
    problem: FreeProblem,
    home: Sequence[int],
    cooling: Cooling,
    seed: int,
    deadline: float,
    tuning: FreeTuning = DEFAULT,
) -> tuple[int, ...]:
    """Return the best placement seen, the start included."""
    if problem.devices < 2 or problem.units < 1:
        return tuple(home)
    return _Annealer(problem, home, seed, tuning).run(cooling, deadline)


class _Annealer:
    def __init__(self, problem: FreeProblem, home: Sequence[int], seed: int, tuning: FreeTuning) -> None:
        self.problem, self.tuning = problem, tuning
        self.random = random.Random(seed)
        self.moves = Moves(problem, home, tuning.overflow_price)
        self.near = problem.neighbours
        self.open = [
            [d for d in range(problem.devices) if column[d]] for column in problem.allowed.T.tolist()
        ]
        self.may = problem.allowed.T.tolist()
        self.movable = [u for u, devices in enumerate(self.open) if len(devices) > 1]

    def run(self, cooling: Cooling, deadline: float) -> tuple[int, ...]:
        moves, draw = self.moves, self.random
        power, refresh = self.tuning.norm_power, self.tuning.refresh_steps
        if not self.movable:
            return tuple(moves.home)
        energy = moves.energy(power)
        best, best_home = (moves.objective(), energy), tuple(moves.home)
        temperature = cooling.first * energy
        decay = (cooling.last / cooling.first) ** (1.0 / max(1, cooling.steps))
        for step in range(cooling.steps):
            if step % LOOK_AT_CLOCK == 0 and time.perf_counter() > deadline:
                break
            if step % refresh == refresh - 1:
                moves.refresh()
                energy = moves.energy(power)
            temperature *= decay
            undo = self._propose()
            if not undo:
                continue
            after = moves.energy(power)
            change = after - energy
            if change <= 0 or draw.random() < math.exp(-change / max(temperature, 1e-300)):
                energy = after
                value = (moves.objective(), after)
                if value < best:
                    best, best_home = value, tuple(moves.home)
            else:
                for unit, device in undo:
                    moves.move(unit, device)
        return best_home

    def _propose(self) -> list[tuple[int, int]]:
        """Make a random move; return (unit, its device before) of all that moved, in the order that undoes it."""
        draw = self.random.random()
        if draw < self.tuning.one_share:
            return self._one()
        if draw < self.tuning.one_share + self.tuning.swap_share:
            return self._swap()
        return self._stretch()

    def _pick(self) -> int:
        """Draw a movable unit; in half of all draws, one of the busiest device if four tries find one."""
        moves = self.moves
        unit = self.movable[self.random.randrange(len(self.movable))]
        if self.random.random() < 0.5:
            busiest = max(range(len(moves.load)), key=moves.load.__getitem__)
            for _ in range(4):
                if moves.home[unit] == busiest:
                    break
                unit = self.movable[self.random.randrange(len(self.movable))]
        return unit

    def _target(self, unit: int) -> int:
        """Draw a device for ``unit``: a neighbour's (7 of 10 draws) or any; -1 if it may not or need not move there."""
        home, near = self.moves.home, self.near[unit]
        if near and self.random.random() < 0.7:
            target = home[near[self.random.randrange(len(near))]]
        else:
            target = self.open[unit][self.random.randrange(len(self.open[unit]))]
        return target if target != home[unit] and self.may[unit][target] else -1

    def _one(self) -> list[tuple[int, int]]:
        """Move one unit."""
        unit = self._pick()
        target = self._target(unit)
        if target < 0:
            return []
        was = self.moves.home[unit]
        self.moves.move(unit, target)
        return [(unit, was)]

    def _swap(self) -> list[tuple[int, int]]:
        """Exchange the devices of two units."""
        home = self.moves.home
        first = self._pick()
        second = self.movable[self.random.randrange(len(self.movable))]
        a, b = home[first], home[second]
        if a == b or not self.may[first][b] or not self.may[second][a]:
            return []
        self.moves.move(first, b)
        self.moves.move(second, a)
        return [(second, b), (first, a)]

    def _stretch(self) -> list[tuple[int, int]]:
        """Move a stretch of the program's order that is on one device to another device."""
        home = self.moves.home
        begin = self._pick()
        source, target = home[begin], self._target(begin)
        if target < 0:
            return []
        length = 2 + int(self.random.expovariate(1.0) * max(2.0, self.problem.units / 16))
        step = 1 if self.random.random() < 0.5 else -1
        undo: list[tuple[int, int]] = []
        unit = begin
        while 0 <= unit < self.problem.units and len(undo) < length:
            if home[unit] == source and self.may[unit][target]:
                self.moves.move(unit, target)
                undo.append((unit, source))
            elif home[unit] != target:
                break
            unit += step
        return undo[::-1]
