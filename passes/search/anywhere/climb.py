"""Local search on any measure of placements: units, pairs, stretches and whole modules change device."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from passes.search.anywhere.problem import Home, PlacementProblem

KINDS = ("swap", "unit", "stretch", "module")
"""Kinds of neighbours, equally often: two units change places, one moves, a stretch of a line does, a module does."""
SLACK = 0.02
"""Share by which a neighbour may be worse and be gone on from."""
MISSES = 1000
"""Draws in a row that move nothing, after which there is nothing to move."""


@dataclass(frozen=True, eq=False)
class Neighbourhood:
    """Neighbours of placements, drawn at random.

    lines      units along the graph: neighbours there are moved together
    modules    module path of each unit; empty where there are none
    """

    problem: PlacementProblem
    lines: Sequence[Sequence[int]]
    modules: Sequence[str] = ()

    def draw(self, home: Home, draw: random.Random) -> Iterator[Home]:
        """Yield neighbours without end, none equal to ``home``; none at all if no unit can move."""
        problem = self.problem
        movable = np.flatnonzero(problem.allowed.sum(axis=0) > 1).tolist()
        near = sorted(set(problem.borders(home)).intersection(movable)) or movable
        misses = 0 if near and problem.devices > 1 else MISSES
        while misses < MISSES:
            changed = self._moved(home, near[draw.randrange(len(near))], draw)
            misses = misses + 1 if changed == home else 0
            if not misses:
                yield changed

    def _moved(self, home: Home, unit: int, draw: random.Random) -> Home:
        """Move ``unit``, or what goes with it; what may not be on the device stays."""
        kind, target = draw.choice(KINDS), self._target(home, unit, draw)
        moves = {unit: target}
        if kind == "swap":
            other = draw.randrange(self.problem.units)
            moves = {unit: home[other], other: home[unit]}
        elif kind == "module" and self.modules:
            moves = dict.fromkeys(self._module(unit, draw), target)
        elif kind != "unit":
            moves = dict.fromkeys(self._stretch(home, unit, target, draw), target)
        changed = list(home)
        for u, device in moves.items():
            if self.problem.allowed[device, u]:
                changed[u] = device
        return tuple(changed)

    def _module(self, unit: int, draw: random.Random) -> list[int]:
        """Return the units of a module that ``unit`` is in, of any depth."""
        path = self.modules[unit].split(".")
        prefix = ".".join(path[: draw.randrange(len(path)) + 1])
        return [u for u, other in enumerate(self.modules) if f"{other}.".startswith(f"{prefix}.")]

    def _target(self, home: Home, unit: int, draw: random.Random) -> int:
        """Draw a device for ``unit``: mostly one of its neighbours'."""
        away = sorted({home[v] for v in self.problem.neighbours[unit]} - {home[unit]})
        if away and draw.random() < 0.8:
            return away[draw.randrange(len(away))]
        return draw.randrange(self.problem.devices)

    def _stretch(self, home: Home, unit: int, target: int, draw: random.Random) -> list[int]:
        """Return units of one device that follow each other on a line, from ``unit`` on, either way."""
        line = self.lines[draw.randrange(len(self.lines))]
        length = 2 + int(draw.expovariate(1.0) * max(2.0, len(line) / 12))
        step = 1 if draw.random() < 0.5 else -1
        moved: list[int] = []
        at = line.index(unit)
        while 0 <= at < len(line) and len(moved) < length:
            if home[line[at]] == home[unit]:
                moved.append(line[at])
            elif home[line[at]] != target:
                break
            at += step
        return moved


def climb(
    measure: Callable[[Home], float],
    home: Home,
    around: Callable[[Home], Iterator[Home]],
    *,
    quiet: int,
    deadline: float,
    least: float = 0.0,
) -> Home:
    """Walk from neighbour to neighbour; return the best placement seen.

    A neighbour may be worse by ``SLACK``, by less and less until the walk is quiet (threshold accepting: Dueck, Scheuer
    1990).

    measure    seconds of a placement; infinite where it does not fit
    around     draws neighbours of a placement
    quiet      neighbours without a new best that end the walk
    least      a value that nothing is below: the walk ends there
    """
    value = best = measure(home)
    best_home, silent, neighbours = home, 0, around(home)
    while silent < quiet and best > least and time.perf_counter() < deadline:
        other = next(neighbours, None)
        if other is None:
            break
        silent += 1
        seconds = measure(other)
        if seconds < best * (1 - 1e-9):
            best, best_home, silent = seconds, other, 0
        if seconds <= value * (1 + SLACK * (1 - silent / quiet)):
            home, value, neighbours = other, seconds, around(other)
    return best_home
