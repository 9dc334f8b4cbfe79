"""Local search on any measure of placements: units at borders, stretches behind them and whole modules change device."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from passes.search.free.moves import borders
from passes.search.free.problem import FreeProblem
from passes.search.free.starts import Home
from passes.search.free.tuning import DEFAULT, FreeTuning


@dataclass(frozen=True, eq=False)
class Neighbourhood:
    """Neighbours of placements, drawn at random. ``modules``: module path of each unit."""

    problem: FreeProblem
    modules: Sequence[str]
    tuning: FreeTuning = DEFAULT

    def draw(self, home: Sequence[int], draw: random.Random) -> Iterator[Home]:
        """Yield neighbours without end, none equal to ``home``; none at all if no unit can move."""
        problem = self.problem
        edge = borders(problem, home) or list(range(problem.units))
        may = problem.allowed
        movable = [u for u in edge if may[:, u].sum() > 1] or [
            u for u in range(problem.units) if may[:, u].sum() > 1
        ]
        if not movable or problem.devices < 2:
            return
        by_module: dict[str, list[int]] = defaultdict(list)
        for u, path in enumerate(self.modules):
            by_module[path].append(u)
        misses = 0
        while misses < 1000:
            unit = movable[draw.randrange(len(movable))]
            target = self._target(home, unit, draw)
            kind = draw.random()
            if kind < self.tuning.moved_one:
                moved = [unit]
            elif kind < self.tuning.moved_one + self.tuning.moved_stretch:
                moved = self._stretch(home, unit, target, draw)
            else:
                path = self.modules[unit]
                depth = draw.randrange(path.count(".") + 1) + 1
                prefix = ".".join(path.split(".")[:depth])
                moved = [
                    u
                    for other, units in by_module.items()
                    if other == prefix or other.startswith(prefix + ".")
                    for u in units
                ]
            changed = list(home)
            for u in moved:
                if may[target, u]:
                    changed[u] = target
            if changed == list(home):
                misses += 1
                continue
            misses = 0
            yield tuple(changed)

    def _target(self, home: Sequence[int], unit: int, draw: random.Random) -> int:
        """Draw a device for ``unit``: mostly one of its neighbours'."""
        away = sorted({home[v] for v in self.problem.neighbours[unit]} - {home[unit]})
        if away and draw.random() < 0.8:
            return away[draw.randrange(len(away))]
        return draw.randrange(self.problem.devices)

    def _stretch(self, home: Sequence[int], unit: int, target: int, draw: random.Random) -> list[int]:
        """Return units of one device that follow each other in the program's order, from ``unit`` on, either way."""
        most = max(2.0, self.problem.units / 12)
        length = 2 + int(draw.expovariate(1.0) * most)
        step = 1 if draw.random() < 0.5 else -1
        moved: list[int] = []
        u = unit
        while 0 <= u < self.problem.units and len(moved) < length:
            if home[u] == home[unit]:
                moved.append(u)
            elif home[u] != target:
                break
            u += step
        return moved


def climb(
    measure: Callable[[Home], float],
    home: Home,
    around: Neighbourhood,
    *,
    tries: int,
    quiet: int,
    seed: int,
    deadline: float,
    slack: float = DEFAULT.climb_slack,
) -> Home:
    """Walk from neighbour to neighbour, ``tries`` times; return the best placement seen.

    Ends early after ``quiet`` neighbours without a new best. ``measure``: seconds of a placement.

    Threshold accepting (Dueck, Scheuer 1990): a neighbour that is worse by a share of at most ``slack``, less and less
    towards the end, is gone on from too.
    """
    draw = random.Random(seed)
    value = best = measure(home)
    best_home, silent = home, 0
    neighbours = around.draw(home, draw)
    for step in range(tries):
        if silent >= quiet or time.perf_counter() > deadline:
            break
        other = next(neighbours, None)
        if other is None:
            break
        found = measure(other)
        silent += 1
        if found < best * (1 - 1e-9):
            best, best_home, silent = found, other, 0
        if found <= value * (1 + slack * (1 - step / tries)):
            home, value = other, found
            neighbours = around.draw(home, draw)
    return best_home
