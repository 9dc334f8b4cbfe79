"""Simulated annealing of free placements: many chains at once, as arrays.

All chains look at the same move (one group, two that change places, or a stretch of the graph) but each has a target
and a coin of its own: a step costs some twenty array operations, however many chains take it. R chains, K devices, E nets:

    home [G, R]   device of every group          held [E, R, K]   groups of a net on a device
    load [R, K]   as in ``graph``, with what exceeds a memory as load      memory [R, K]

A chain minimizes the p-norm of its loads, p rising while the temperature falls; the best largest load is kept, not the
last. From time to time the worst chains are replaced by copies of the best ("go with the winners").
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cost_models.arrays import FloatArray
from passes.search.cost_graph.groups import GroupProblem
from passes.search.cost_graph.tuning import TUNING

COLDEST = 2e-5
"""The last temperature, relative to the value that the chains start from."""
POWERS = (6.0, 40.0)
"""The p of the p-norm while chains are hot, and when they are cold."""


class AnnealingChains:
    """R placements of one problem, moved together."""

    def __init__(
        self,
        problem: GroupProblem,
        starts: NDArray[np.int64],
        seed: int,
        lines: Sequence[Sequence[int]] = (),
    ) -> None:
        self.problem = problem
        self.lines = [list(line) for line in lines] or [list(range(problem.count))]
        self.position = [{g: i for i, g in enumerate(line)} for line in self.lines]
        self.random = np.random.default_rng(seed)
        machine = problem.machine
        self.devices = len(machine.devices)
        total = float(np.where(np.isinf(problem.accelerator_cost), 0.0, problem.accelerator_cost).sum())
        total = max(total, float(problem.cpu_cost.max(initial=0.0)), 1e-300)
        allowed = np.where(
            np.isinf(problem.accelerator_cost), TUNING.forbidden * total, problem.accelerator_cost
        )
        self.cost = np.empty((problem.count, self.devices))
        self.cost[:, : machine.accelerators] = allowed[:, None]
        self.cost[:, machine.accelerators :] = problem.cpu_cost[:, None]
        self.pays = np.zeros(self.devices)
        self.pays[: machine.accelerators] = 1.0
        self.limited = problem.memory_binds
        self.capacity = np.full(self.devices, math.inf)
        self.capacity[: machine.accelerators] = machine.memory_size
        self.byte_price = 4.0 * total / max(machine.memory_size, 1e-300) if self.limited else 0.0
        self.unit = np.eye(self.devices)
        self.nets_of = [np.array(nets, dtype=np.intp) for nets in problem.nets_of]
        self.start(np.asarray(starts, dtype=np.int64).T)

    def start(self, home: NDArray[np.int64]) -> None:
        """Begin at ``home``, shape [G, R]."""
        problem, chains = self.problem, home.shape[1]
        self.home = home.copy()
        where = self.unit[self.home]
        self.held = np.zeros((len(problem.nets), chains, self.devices))
        for e, pins in enumerate(problem.nets):
            self.held[e] = where[list(pins)].sum(axis=0)
        self.load = np.einsum("grk,gk->rk", where, self.cost)
        if len(problem.nets):
            self.load += self._sent(self.held, problem.weight)
        self.memory = np.einsum("grk,g->rk", where, problem.size)
        self.best_home = self.home.copy()
        self.best = self._value(self.load, self.memory)

    def _sent(self, held: FloatArray, weight: FloatArray) -> FloatArray:
        """Return [R, K]: what accelerators pay for nets with ``held`` [D, R, K] groups on each device."""
        touched = held > 0
        cut = touched.sum(axis=2) > 1
        paid: FloatArray = np.einsum("drk,d->rk", touched & cut[:, :, None], weight)
        return paid * self.pays

    def _value(self, load: FloatArray, memory: FloatArray) -> FloatArray:
        found: FloatArray = self._felt(load, memory).max(axis=1)
        return found

    def _felt(self, load: FloatArray, memory: FloatArray) -> FloatArray:
        if not self.limited:
            return load
        felt: FloatArray = load + self.byte_price * np.maximum(memory - self.capacity, 0.0)
        return felt

    def _energy(self, load: FloatArray, memory: FloatArray, power: float) -> FloatArray:
        felt = np.maximum(self._felt(load, memory), 0.0)  # zero but for rounding
        top = np.maximum(felt.max(axis=1), 1e-300)
        energy: FloatArray = top * ((felt / top[:, None]) ** power).sum(axis=1) ** (1.0 / power)
        return energy

    def move(
        self, groups: Sequence[int], target: NDArray[np.int64], temperature: float, power: float
    ) -> None:
        """Bring ``groups`` to ``target`` [S, R] in the chains that accept it."""
        problem = self.problem
        change = self.unit[target] - self.unit[self.home[groups]]
        load = self.load + np.einsum("srk,sk->rk", change, self.cost[groups])
        nets, held = self._nets(groups), None
        if len(nets):
            held = self.held[nets]
            if len(groups) == 1:
                after = held + change
            else:
                inside = np.array([[g in problem.nets[e] for g in groups] for e in nets], dtype=float)
                after = held + np.tensordot(inside, change, axes=1)
            weight = problem.weight[nets]
            load += self._sent(after, weight) - self._sent(held, weight)
        memory = self.memory
        if self.limited:
            memory = memory + np.einsum("srk,s->rk", change, problem.size[groups])
        energy = self._energy(load, memory, power)
        worse = energy - self.energy
        taken = worse <= temperature * self.random.standard_exponential(len(worse))
        taken &= change.any(axis=(0, 2))
        if not taken.any():
            return
        self.energy[taken] = energy[taken]
        self.load[taken] = load[taken]
        for s, g in enumerate(groups):
            self.home[g, taken] = target[s, taken]
        if len(nets):
            self.held[nets[:, None], np.flatnonzero(taken)[None, :]] = after[:, taken]
        if self.limited:
            self.memory[taken] = memory[taken]
        value = self._value(self.load, self.memory)
        better = value < self.best - 1e-12 * self.best
        if better.any():
            self.best[better] = value[better]
            self.best_home[:, better] = self.home[:, better]

    def _nets(self, groups: Sequence[int]) -> NDArray[np.intp]:
        if len(groups) == 1:
            return self.nets_of[groups[0]]
        return np.unique(np.concatenate([self.nets_of[g] for g in groups]))

    def anneal(self, steps: int, hottest: float, deadline: float) -> tuple[int, ...]:
        """Cool down once, until ``deadline`` at most, and return the best placement of all chains.

        ``hottest``: the first temperature, relative to the value that the chains start from.
        """
        low, high = POWERS
        scale = float(np.median(self._value(self.load, self.memory)))
        count = self.problem.count
        kinds = self.random.random(steps)
        picks = self.random.integers(0, count, (steps, 2))
        begun = time.monotonic()
        for step in range(steps):
            if step % 64 == 0:
                spent = (time.monotonic() - begun) / max(deadline - begun, 1e-9)
                if spent >= 1:
                    break
                share = max(step / steps, spent)  # cold when time is up, whatever that takes
                temperature = scale * hottest * (COLDEST / hottest) ** share
                power = low * (high / low) ** share
                self.energy = self._energy(self.load, self.memory, power)
                if step % 4096 == 0 and step:
                    self._go_with_the_winners()
                    self.energy = self._energy(self.load, self.memory, power)
            g, h = picks[step].tolist()
            if step % 2 and count > 1:
                g = self._on_the_busiest(g)
            self._step(g, h, float(kinds[step]), temperature, power)
        return tuple(self.best_home[:, self.best.argmin()].tolist())

    def _step(self, g: int, h: int, kind: float, temperature: float, power: float) -> None:
        """Try a move: a group to anywhere or to a neighbour, two that change places, a stretch to anywhere or its end."""
        chains = self.home.shape[1]
        if kind < 0.25 or self.problem.count == 1:
            self.move([g], self.random.integers(0, self.devices, (1, chains)), temperature, power)
        elif kind < 0.5:
            self.move([g], self.home[[self._beside(g)]], temperature, power)
        elif kind < 0.8:
            if g != h:
                self.move([g, h], self.home[[h, g]], temperature, power)
        else:
            line, start, end = self._stretch(g)
            if kind < 0.9:
                target = self.random.integers(0, self.devices, (1, chains))
            else:
                target = self.home[[line[start - 1] if start else line[end % len(line)]]]
            self.move(line[start:end], np.repeat(target, end - start, axis=0), temperature, power)

    def _on_the_busiest(self, otherwise: int) -> int:
        """Draw a group from the busiest device of some chain: only such moves can lower the largest load."""
        chain = int(self.random.integers(0, self.home.shape[1]))
        groups = np.flatnonzero(self.home[:, chain] == self.load[chain].argmax())
        return int(groups[int(self.random.integers(0, len(groups)))]) if len(groups) else otherwise

    def _beside(self, g: int) -> int:
        """Draw a group that shares a net with ``g``."""
        nets = self.nets_of[g]
        if not len(nets):
            return g
        pins = self.problem.nets[int(nets[int(self.random.integers(0, len(nets)))])]
        return pins[int(self.random.integers(0, len(pins)))]

    def _stretch(self, g: int) -> tuple[list[int], int, int]:
        """Draw a stretch around ``g``, (line, start, end), of any length up to half a line; short ones more often."""
        which = int(self.random.integers(0, len(self.lines)))
        line, at = self.lines[which], self.position[which][g]
        length = min(len(line), int(2 * max(1.0, len(line) / 4) ** self.random.random()))
        start = min(max(0, at - int(self.random.integers(0, length))), len(line) - length)
        return line, start, start + length

    def _go_with_the_winners(self) -> None:
        ranked = np.argsort(self._value(self.load, self.memory))
        some = max(1, len(ranked) // 8)
        good, bad = ranked[:some], ranked[-some:]
        self.home[:, bad] = self.home[:, good]
        self.held[:, bad] = self.held[:, good]
        self.load[bad] = self.load[good]
        self.memory[bad] = self.memory[good]
