"""Simulated annealing of placements (Kirkpatrick, Gelatt, Vecchi 1983): many chains at once, as arrays.

All chains look at the same move (one unit, two that change places, or a stretch of the graph) but each has a target and a
coin of its own. A chain minimizes the p-norm of its loads; what exceeds a device's memory is felt as load. The best largest
load is kept, not the last. From time to time the worst chains are replaced by copies of the best ("go with the winners").
Deterministic for a seed, but for the deadline.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from cost_models.arrays import FloatArray, IntArray
from passes.search.anywhere.placements import PlacementBatch
from passes.search.anywhere.problem import Home, PlacementProblem

POWER = 12.0
"""Power of the norm of loads that is minimized: of six devices, it is at most 1.16 times their maximum."""
COLDEST = 2e-5
"""The last temperature, relative to the value that the chains start from."""
LOOK_AT_CLOCK = 64
"""Steps between two looks at the clock."""
SELECT = 4096
"""Steps between two selections among chains."""


def anneal(
    problem: PlacementProblem,
    starts: Sequence[Home],
    lines: Sequence[Sequence[int]],
    *,
    steps: int,
    hottest: float,
    seed: int,
    deadline: float,
) -> list[Home]:
    """Cool one chain from each start down once, until ``deadline`` at most; return the best of each, best first.

    lines      units along the graph: neighbours there are moved together
    hottest    the first temperature, relative to the value that the chains start from
    """
    if problem.devices < 2 or not (problem.allowed.sum(axis=0) > 1).any():
        return list(starts)
    chains = _AnnealingChains(problem, starts, lines, seed)
    chains.run(steps, hottest, deadline)
    ranked = np.argsort(chains.best, kind="stable").tolist()
    return [tuple(chains.best_home[:, r].tolist()) for r in ranked]


class _AnnealingChains:
    def __init__(
        self,
        problem: PlacementProblem,
        starts: Sequence[Home],
        lines: Sequence[Sequence[int]],
        seed: int,
    ) -> None:
        self.problem = problem
        self.now = PlacementBatch(problem, starts)
        self.lines = [list(line) for line in lines]
        self.position = [{u: i for i, u in enumerate(line)} for line in self.lines]
        self.random = np.random.default_rng(seed)
        self.movable = np.flatnonzero(problem.allowed.sum(axis=0) > 1)
        self.open = bool(problem.allowed.all())
        self.best_home = self.now.home.copy()
        self.best = self._value(self.now.load, self.now.memory)
        self.energy = self.best

    def _value(self, load: FloatArray, memory: FloatArray) -> FloatArray:
        value: FloatArray = self.now.felt(load, memory).max(axis=1)
        return value

    def _energy(self, load: FloatArray, memory: FloatArray) -> FloatArray:
        felt = np.maximum(self.now.felt(load, memory), 0.0)  # below zero by rounding
        top = np.maximum(felt.max(axis=1), 1e-300)
        energy: FloatArray = top * ((felt / top[:, None]) ** POWER).sum(axis=1) ** (1.0 / POWER)
        return energy

    def run(self, steps: int, hottest: float, deadline: float) -> None:
        """Cool down once."""
        now = self.now
        scale = float(np.median(self._value(now.load, now.memory)))
        kinds = self.random.random(steps)
        picks = self.movable[self.random.integers(0, len(self.movable), (steps, 2))]
        begun = time.perf_counter()
        for step in range(steps):
            if step % LOOK_AT_CLOCK == 0:
                spent = (time.perf_counter() - begun) / max(deadline - begun, 1e-9)
                if spent >= 1:
                    break
                share = max(step / steps, spent)  # cold when time is up, whatever that takes
                temperature = scale * hottest * (COLDEST / hottest) ** share
                if step % SELECT == 0 and step:
                    self._select()
                self.energy = self._energy(now.load, now.memory)
            u, v = picks[step].tolist()
            if step % 2:
                u = self._on_the_busiest(u)
            self._step(u, v, float(kinds[step]), temperature)

    def _step(self, u: int, v: int, kind: float, temperature: float) -> None:
        """Try a move: a unit to anywhere or to a neighbour, two that change places, a stretch to anywhere or its end."""
        home, chains = self.now.home, self.now.home.shape[1]
        if kind < 0.25:
            self._move([u], self._anywhere(chains), temperature)
        elif kind < 0.5:
            self._move([u], home[[self._beside(u)]], temperature)
        elif kind < 0.8:
            if u != v:
                self._move([u, v], home[[v, u]], temperature)
        else:
            line, start, end = self._stretch(u)
            next_to = line[start - 1] if start else line[end % len(line)]
            target = self._anywhere(chains) if kind < 0.9 else home[[next_to]]
            self._move(line[start:end], np.repeat(target, end - start, axis=0), temperature)

    def _anywhere(self, chains: int) -> IntArray:
        return self.random.integers(0, self.problem.devices, (1, chains))

    def _move(self, units: Sequence[int], target: IntArray, temperature: float) -> None:
        """Bring ``units`` to ``target`` [S, R] in the chains that accept it."""
        now = self.now
        if not self.open:  # what may not move stays
            may = self.problem.allowed[target, np.array(units)[:, None]]
            target = np.where(may, target, now.home[units])
        trial = now.trial(units, target)
        energy = self._energy(trial.load, trial.memory)
        worse = energy - self.energy
        taken = worse <= temperature * self.random.standard_exponential(len(worse))
        taken &= (target != now.home[units]).any(axis=0)
        if not taken.any():
            return
        self.energy[taken] = energy[taken]
        now.accept(trial, taken)
        value = self._value(now.load, now.memory)
        better = value < self.best * (1 - 1e-12)
        if better.any():
            self.best[better] = value[better]
            self.best_home[:, better] = now.home[:, better]

    def _on_the_busiest(self, otherwise: int) -> int:
        """Draw a unit from the busiest device of some chain: only such moves can lower the largest load."""
        chain = int(self.random.integers(0, self.now.home.shape[1]))
        there = np.flatnonzero(self.now.home[:, chain] == self.now.load[chain].argmax())
        return int(there[int(self.random.integers(0, len(there)))]) if len(there) else otherwise

    def _beside(self, u: int) -> int:
        """Draw a unit that shares a net with ``u``."""
        nets = self.problem.nets_of[u]
        if not nets:
            return u
        members = self.problem.nets[nets[int(self.random.integers(0, len(nets)))]].members
        return members[int(self.random.integers(0, len(members)))]

    def _stretch(self, u: int) -> tuple[list[int], int, int]:
        """Draw a stretch around ``u``, (line, start, end), of any length up to half a line; short ones more often."""
        which = int(self.random.integers(0, len(self.lines)))
        line, at = self.lines[which], self.position[which][u]
        length = min(len(line), int(2 * max(1.0, len(line) / 4) ** self.random.random()))
        start = min(max(0, at - int(self.random.integers(0, length))), len(line) - length)
        return line, start, start + length

    def _select(self) -> None:
        """Replace the worst eighth of the chains by copies of the best."""
        ranked = np.argsort(self._value(self.now.load, self.now.memory), kind="stable")
        some = max(1, len(ranked) // 8)
        self.now.copy(ranked[:some], ranked[-some:])
