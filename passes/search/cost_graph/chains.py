"""The best contiguous placement whose cuts are among given downsets, by dynamic programming.

    best[a, c, J] = min over I ⊂ J of   max(best[a-1, c, I], load of J∖I on an accelerator)
                                        max(best[a, c-1, I], load of J∖I on a CPU)

With every downset of the order this is the optimum (the method of the NeurIPS 2020 paper). An accelerator holding S = J∖I
pays the nets that S touches less those that it holds whole. Let n_e(I) be the number of net e's groups in I: for I ⊂ J,

    S does not touch e   iff   n_e(I) = n_e(J)            S holds e whole   iff   n_e(I) = 0 and n_e(J) = |e|

so with rows one-hot in (e, n_e) what is sent of all pairs is one matrix product: Σ weight - onehot(I) · weighted(J).
Downsets are taken by size, so that of each step all smaller ones are known. N downsets take N²·Σ(|e|+1)/2 multiplications.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from cost_models.arrays import FloatArray
from passes.search.cost_graph.downsets import membership
from passes.search.cost_graph.groups import GroupProblem

ROUNDING = 1e-12
WIDEST_NET = 24
"""Groups of a net beyond which it is compared by itself: its one-hot rows would be too long."""
CHUNK = 512
"""Downsets that the dynamic program takes at once, to bound its memory."""


@dataclass(frozen=True)
class Chain:
    """A contiguous placement as a chain of downsets: each device holds what one of them has beyond the one before."""

    homes: tuple[int, ...] | None
    """Device per group, as a position in ``GraphMachine.devices``; None where nothing below the limit was found."""
    value: float
    finished: bool = True
    """False if time ran out before every downset was looked at."""
    cuts: tuple[int, ...] = ()
    """Downsets between devices."""


def multiplications(problem: GroupProblem, downsets: int) -> float:
    """Estimate how many multiplications the whole program takes."""
    return downsets * (downsets / 2) * (sum(min(len(pins), WIDEST_NET) + 1 for pins in problem.nets) + 16)


class Chains:
    """The program over ``downsets``, the empty and the full one among them."""

    def __init__(
        self,
        problem: GroupProblem,
        downsets: Sequence[int],
        *,
        limit: float = math.inf,
        memory_size: float | None = None,
        deadline: float = math.inf,
    ) -> None:
        """``limit``: the largest load must be below it. ``memory_size``: None for the machine's."""
        self.problem, self.limit, self.deadline = problem, limit, deadline
        self.memory_size = problem.machine.memory_size if memory_size is None else memory_size
        self.downsets = sorted(set(downsets), key=int.bit_count)
        self.inside = membership(self.downsets, problem.count)
        self.sizes = self.inside.sum(axis=1)
        self.accelerators = min(problem.machine.accelerators, problem.count)
        self.cpus = min(problem.machine.cpus, problem.count)
        forbidden = np.isinf(problem.accelerator_cost)
        self.work = self.inside @ np.where(forbidden, 0.0, problem.accelerator_cost)
        self.cpu_work = self.inside @ problem.cpu_cost
        self.bytes = self.inside @ problem.size
        self.forbidden = (self.inside @ forbidden.astype(np.int64)) if forbidden.any() else None
        self._nets()
        self.packed = np.packbits(self.inside, axis=1)
        missing = -self.packed.shape[1] % 8
        self.words = np.pad(self.packed, ((0, 0), (0, missing))).view(np.uint64)
        self.best = np.full((self.accelerators + 1, self.cpus + 1, len(self.downsets)), math.inf)
        self.best[:, :, 0] = 0.0

    def _nets(self) -> None:
        problem = self.problem
        columns: list[NDArray[np.bool_]] = []
        weights: list[float] = []
        totals: list[float] = []
        last_of: list[tuple[int, NDArray[np.bool_]]] = []
        self.wide: list[tuple[float, NDArray[np.int64], int]] = []
        for pins, weight in zip(problem.nets, problem.weight.tolist(), strict=True):
            held = self.inside[:, list(pins)].sum(axis=1)
            if len(pins) > WIDEST_NET:
                self.wide.append((weight, held, len(pins)))
                continue
            totals.append(weight)
            full = held == len(pins)
            last_of.append((len(columns), full))
            for number in range(len(pins) + 1):
                columns.append(held == number)
                weights.append(weight)
        self.total = math.fsum(totals)
        shape = (len(self.downsets), 0)
        onehot = np.stack(columns, axis=1) if columns else np.zeros(shape, dtype=bool)
        self.left = onehot.astype(np.float64)
        right = self.left.copy()
        for position, full in last_of:
            right[:, position] += full
        self.right = right * np.array(weights)[None, :]

    def solve(self) -> Chain:
        """Find the best chain."""
        bounds = [0, *(np.flatnonzero(np.diff(self.sizes)) + 1).tolist(), len(self.downsets)]
        for start, stop in pairwise(bounds[1:]):
            for begin in range(start, stop, CHUNK):
                if time.perf_counter() > self.deadline:
                    return Chain(None, math.inf, finished=False)
                self._step(start, begin, min(begin + CHUNK, stop))
        value = float(self.best[-1, -1, -1])
        if value >= self.limit:
            return Chain(None, math.inf)
        homes, cuts = self._walk_back()
        return Chain(homes, value, cuts=cuts)

    def _rows(self, smaller: int, columns: slice) -> NDArray[np.intp]:
        """List downsets that one device can get from to one of ``columns`` below the limit, going by its work alone."""
        reach = self.work[:smaller] >= self.work[columns].min() - self.limit
        if self.cpus:
            reach |= self.cpu_work[:smaller] >= self.cpu_work[columns].min() - self.limit
        reach &= self.best[-1, -1, :smaller] < self.limit
        return np.flatnonzero(reach)

    def _step(self, smaller: int, begin: int, end: int) -> None:
        columns = slice(begin, end)
        rows = self._rows(smaller, columns)
        on_accelerator, on_cpu = self.loads(rows, columns)
        for a in range(self.accelerators + 1):
            for c in range(self.cpus + 1):
                best = self.best[a, c, columns]
                for before, loads in self._before(a, c, on_accelerator, on_cpu):
                    np.minimum(best, before[columns], out=best)
                    if len(rows):
                        np.minimum(best, np.maximum(before[rows][:, None], loads).min(axis=0), out=best)

    def _before(
        self, a: int, c: int, on_accelerator: FloatArray, on_cpu: FloatArray
    ) -> Iterator[tuple[FloatArray, FloatArray]]:
        """Yield the values with one device less, and the loads [rows, columns] of that device."""
        if a:
            yield self.best[a - 1, c], on_accelerator
        if c:
            yield self.best[a, c - 1], on_cpu

    def loads(self, rows: NDArray[np.intp], columns: slice) -> tuple[FloatArray, FloatArray]:
        """Return [rows, columns]: the load of a device that holds the difference, infinite where it cannot."""
        contained = np.ones((len(rows), self.right[columns].shape[0]), dtype=bool)
        for w in range(self.words.shape[1]):
            contained &= (self.words[rows, w][:, None] & ~self.words[columns, w][None, :]) == 0
        on_accelerator = self.total - self.left[rows] @ self.right[columns].T
        for weight, held, count in self.wide:
            before, after = held[rows][:, None], held[columns][None, :]
            whole = (before == 0) & (after == count)
            on_accelerator += weight * ((before != after) & ~whole)
        # what is not sent cancels to a rounding error, never below zero
        np.maximum(on_accelerator, 0.0, out=on_accelerator)
        on_accelerator += self.work[columns][None, :] - self.work[rows][:, None]
        fits = contained & (self.bytes[columns][None, :] - self.bytes[rows][:, None] <= self.memory_size)
        if self.forbidden is not None:
            fits &= self.forbidden[columns][None, :] == self.forbidden[rows][:, None]
        on_accelerator[~fits] = math.inf
        on_cpu = np.where(contained, self.cpu_work[columns][None, :] - self.cpu_work[rows][:, None], math.inf)
        return on_accelerator, on_cpu

    def _walk_back(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        homes = [0] * self.problem.count
        a, c, at = self.accelerators, self.cpus, len(self.downsets) - 1
        cuts = []
        slack = ROUNDING * max(1.0, self.limit if math.isfinite(self.limit) else 1.0)
        while at:
            value = self.best[a, c, at]
            if a and self.best[a - 1, c, at] <= value:
                a -= 1
                continue
            if c and self.best[a, c - 1, at] <= value:
                c -= 1
                continue
            smaller = int(np.searchsorted(self.sizes, self.sizes[at]))
            rows = self._rows(smaller, slice(at, at + 1))
            on_accelerator, on_cpu = self.loads(rows, slice(at, at + 1))
            choices = []
            if a:
                through = np.maximum(self.best[a - 1, c, rows], on_accelerator[:, 0])
                choices.append((float(through.min()), int(through.argmin()), True))
            if c:
                through = np.maximum(self.best[a, c - 1, rows], on_cpu[:, 0])
                choices.append((float(through.min()), int(through.argmin()), False))
            found, row, accelerator = min(choices)
            if found > value + slack + abs(value) * ROUNDING:
                raise AssertionError("a chain of downsets is not as good as it was said to be")
            previous = int(rows[row])
            device = a - 1 if accelerator else self.problem.machine.accelerators + c - 1
            for g in np.flatnonzero(self.inside[at] & ~self.inside[previous]).tolist():
                homes[g] = device
            at = previous
            a, c = (a - 1, c) if accelerator else (a, c - 1)
            cuts.append(self.downsets[at])
        return tuple(homes), tuple(cuts)
