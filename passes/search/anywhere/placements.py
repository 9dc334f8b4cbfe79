"""Placements under change: R of one problem at once, as arrays, so that a move costs some twenty array operations.

home [n, R]   device of every unit          held [E, R, K]   units of a net on a device, the producer's included
load, memory [R, K]   as ``evaluate`` has them          tied [T, R, K]   units of a tie on a device
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cost_models.arrays import FloatArray, IntArray
from passes.search.anywhere.problem import Home, PlacementProblem
from passes.search.touches import BoolArray

OVERFLOW_PRICE = 4.0
"""Price of exceeding a device's memory by all of it, in multiples of all work: worse than any balance is good."""


@dataclass(frozen=True, eq=False)
class BatchMove:
    """A move of S units in all placements, and their loads after it; D nets and ties touch the units."""

    units: Sequence[int]
    target: IntArray
    """[S, R]"""
    nets: NDArray[np.intp]
    held: FloatArray
    """[D, R, K]"""
    ties: NDArray[np.intp]
    tied: FloatArray
    load: FloatArray
    memory: FloatArray


class PlacementBatch:
    """R placements of one problem, moved together."""

    def __init__(self, problem: PlacementProblem, homes: Sequence[Sequence[int]]) -> None:
        self.problem = problem
        self.one = np.eye(problem.devices)
        self.home = np.array(homes, dtype=np.int64).T.copy()
        self.seconds = problem.seconds.T.copy()
        self.producer = np.array([net.producer for net in problem.nets], dtype=np.intp)
        self.nets_of = [np.array(nets, dtype=np.intp) for nets in problem.nets_of]
        self.ties_of = [np.array(ties, dtype=np.intp) for ties in problem.ties_of]
        self._sums: dict[tuple[int, bytes], float] = {}
        work = float(problem.seconds.max(axis=0).sum()) or 1.0
        self.byte_price = OVERFLOW_PRICE * work / np.maximum(problem.capacity_bytes, 1e-300)
        where, chains = self.one[self.home], self.home.shape[1]
        self.held = np.zeros((len(problem.nets), chains, problem.devices))
        for e, net in enumerate(problem.nets):
            self.held[e] = where[list(net.members)].sum(axis=0)
        self.tied = np.zeros((len(problem.ties), chains, problem.devices))
        for tie, members in enumerate(problem.ties):
            self.tied[tie] = where[list(members)].sum(axis=0)
        self.load = np.einsum("urk,uk->rk", where, self.seconds)
        self.memory = np.einsum("urk,u->rk", where, problem.unit_bytes)
        nets, ties = np.arange(len(problem.nets)), np.arange(len(problem.ties))
        for load, memory in (
            self._messages(nets, self.held, self.home[self.producer]),
            self._copies(ties, self.tied),
        ):
            self.load += load
            self.memory += memory

    def _messages(
        self, nets: NDArray[np.intp], held: FloatArray, source: IntArray
    ) -> tuple[FloatArray, FloatArray]:
        """Return [R, K] seconds paid for nets, and bytes received. ``source``: [D, R] the producers' devices."""
        problem, touched = self.problem, held > 0
        if problem.paid_once is not None:
            paid = touched & (touched.sum(axis=2) > 1)[:, :, None]
            load = np.einsum("drk,d->rk", paid, problem.net_bytes[nets]) * problem.paid_once
            return load, np.zeros_like(load)
        away = touched & (self.one[source] == 0)
        pair = problem.messages[nets][:, None, None] * problem.latency[source]
        pair += problem.net_bytes[nets][:, None, None] * problem.seconds_per_byte[source]
        pair *= away
        load = pair.sum(axis=0) + np.einsum("dr,drk->rk", pair.sum(axis=2), self.one[source])
        return load, np.einsum("drk,d->rk", away, problem.received_bytes[nets])

    def _copies(self, ties: NDArray[np.intp], tied: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return [R, K] seconds and bytes of ties' copies, sums of gradients included."""
        problem, there = self.problem, tied > 0
        load = np.einsum("trk,kt->rk", there, problem.tie_seconds[:, ties])
        for row, tie in zip(there, ties.tolist(), strict=True):
            if problem.sum_bytes[tie]:
                load += row * np.array([[self._sum(tie, devices)] for devices in row])
        return load, np.einsum("trk,t->rk", there, problem.tie_bytes[ties])

    def _sum(self, tie: int, there: BoolArray) -> float:
        key = tie, there.tobytes()
        if key not in self._sums:
            self._sums[key] = self.problem.sum_seconds(tie, np.flatnonzero(there).tolist())
        return self._sums[key]

    def trial(self, units: Sequence[int], target: IntArray) -> BatchMove:
        """Compute what all placements would cost with ``units`` on ``target`` [S, R]."""
        problem = self.problem
        change = self.one[target] - self.one[self.home[units]]
        load = self.load + np.einsum("srk,sk->rk", change, self.seconds[units])
        memory = self.memory + np.einsum("srk,s->rk", change, problem.unit_bytes[units])
        nets, held = self._after(
            self.nets_of, units, self.held, change, [net.members for net in problem.nets]
        )
        ties, tied = self._after(self.ties_of, units, self.tied, change, problem.ties)
        if len(nets):
            before = self.home[self.producer[nets]]
            source = before.copy()
            for s, u in enumerate(units):
                source[self.producer[nets] == u] = target[s]
            for sign, counts, at in ((1.0, held, source), (-1.0, self.held[nets], before)):
                paid, received = self._messages(nets, counts, at)
                load += sign * paid
                memory += sign * received
        if len(ties):
            for sign, counts in ((1.0, tied), (-1.0, self.tied[ties])):
                paid, copies = self._copies(ties, counts)
                load += sign * paid
                memory += sign * copies
        return BatchMove(units, target, nets, held, ties, tied, load, memory)

    def _after(
        self,
        groups_of: Sequence[NDArray[np.intp]],
        units: Sequence[int],
        counts: FloatArray,
        change: FloatArray,
        members: Sequence[Sequence[int]],
    ) -> tuple[NDArray[np.intp], FloatArray]:
        """Return the groups (nets or ties) that ``units`` are in, and their ``counts`` after the ``change`` [S, R, K]."""
        if len(units) == 1:
            groups = groups_of[units[0]]
            return groups, counts[groups] + change
        groups = np.unique(np.concatenate([groups_of[u] for u in units]))
        inside = np.array([[u in members[g] for u in units] for g in groups.tolist()], dtype=float)
        return groups, counts[groups] + np.tensordot(inside.reshape(len(groups), len(units)), change, axes=1)

    def accept(self, trial: BatchMove, chosen: BoolArray) -> None:
        """Make a trial the state of the ``chosen`` [R] placements."""
        self.load[chosen], self.memory[chosen] = trial.load[chosen], trial.memory[chosen]
        for s, u in enumerate(trial.units):
            self.home[u, chosen] = trial.target[s, chosen]
        some = np.flatnonzero(chosen)
        if len(trial.nets):
            self.held[trial.nets[:, None], some] = trial.held[:, some]
        if len(trial.ties):
            self.tied[trial.ties[:, None], some] = trial.tied[:, some]

    def copy(self, source: IntArray, target: IntArray) -> None:
        """Replace the placements ``target`` by the placements ``source``."""
        for state in (self.home, self.held, self.tied):
            state[:, target] = state[:, source]
        self.load[target], self.memory[target] = self.load[source], self.memory[source]

    def felt(self, load: FloatArray, memory: FloatArray) -> FloatArray:
        """Return [R, K] loads, with a price for every byte beyond a device's memory."""
        over = np.maximum(memory - self.problem.capacity_bytes, 0.0)
        priced: FloatArray = load + self.byte_price * over
        return priced

    def homes(self) -> list[Home]:
        """Return the placements."""
        return list(map(tuple, self.home.T.tolist()))
