"""Placements to begin with: contiguous splits, modules apart, and each task where it ends soonest."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from cost_models.arrays import FloatArray, IntArray
from passes.lower.candidate import Origin, Trail
from passes.search.free.makespan import TaskGraph
from passes.search.free.problem import FreeProblem
from passes.search.free.tuning import DEFAULT, FreeTuning, StartFamily
from passes.search.heft import earliest_finish

Home = tuple[int, ...]


def all_starts(
    problem: FreeProblem,
    tasks: TaskGraph,
    unit_of_task: IntArray,
    modules: Sequence[str],
    tuning: FreeTuning = DEFAULT,
) -> list[tuple[Home, Trail]]:
    """Return distinct placements that obey pins, each with its origin."""
    found: dict[Home, Trail] = {}
    soonest = Trail.of(Origin.EARLIEST_FINISH)
    families: dict[StartFamily, Callable[[], Iterable[tuple[Home, Trail]]]] = {
        "earliest finish": lambda: [(_earliest_finish(problem, tasks, unit_of_task), soonest)],
        "runs": lambda: contiguous(problem, modules, tuning),
        "modules apart": lambda: modules_apart(problem, modules, tuning),
    }
    for home, trail in itertools.chain.from_iterable(families[family]() for family in tuning.starts):
        found.setdefault(obeying(problem, home), trail)
    return list(found.items())


def obeying(problem: FreeProblem, home: Sequence[int]) -> Home:
    """Return ``home`` with every unit that breaks a pin on the fastest device that it may be on."""
    where = np.asarray(home, dtype=np.int64)
    wrong = ~problem.allowed[where, np.arange(problem.units)]
    fastest = np.where(problem.allowed, problem.seconds, np.inf).argmin(axis=0)
    return tuple(np.where(wrong, fastest, where).tolist())


def contiguous(
    problem: FreeProblem, modules: Sequence[str], tuning: FreeTuning
) -> Iterator[tuple[Home, Trail]]:
    """Yield runs that take equally long, of the program's order and of the modules', on the fastest devices."""
    speed = problem.seconds.sum(axis=1)
    fastest = np.argsort(speed, kind="stable").tolist()
    first: dict[str, int] = {}
    for path in modules:
        first.setdefault(path, len(first))
    by_module = np.array(sorted(range(problem.units), key=lambda u: (first[modules[u]], u)), dtype=np.int64)
    numbers = np.unique(np.linspace(2, problem.devices, tuning.run_counts).round().astype(int))
    for used in numbers.tolist() if problem.devices > 1 else []:
        chosen = fastest[:used]
        for order in dict.fromkeys((tuple(sorted(chosen)), tuple(chosen), tuple(chosen[::-1]))):
            yield (
                split(problem, order, np.arange(problem.units), tuning),
                Trail.of(Origin.CONTIGUOUS_RUNS, used),
            )
            yield split(problem, order, by_module, tuning), Trail.of(Origin.RUNS_OF_MODULES, used)


def split(problem: FreeProblem, devices: Sequence[int], line: IntArray, tuning: FreeTuning) -> Home:
    """Cut ``line`` into runs on ``devices`` in turn so that the longest is as short as possible; return the placement."""
    cumulated = np.concatenate(
        [np.zeros((problem.devices, 1)), np.cumsum(problem.seconds[:, line], axis=1)], axis=1
    )
    low, high = 0.0, float(problem.seconds.max(axis=0).sum())
    best = _filled(cumulated, devices, high)
    for _ in range(tuning.run_bisections):
        middle = (low + high) / 2
        found = _filled(cumulated, devices, middle)
        if found is None:
            low = middle
        else:
            best, high = found, middle
    assert best is not None
    home = np.empty(problem.units, dtype=np.int64)
    home[line] = best
    return tuple(home.tolist())


def _filled(cumulated: FloatArray, devices: Sequence[int], most: float) -> list[int] | None:
    """Fill device after device up to ``most`` seconds; None if units are left over. ``cumulated``: [K, n + 1] seconds."""
    home: list[int] = []
    for d in devices:
        begin = len(home)
        end = int(np.searchsorted(cumulated[d], cumulated[d, begin] + most * (1 + 1e-12), side="right")) - 1
        home += [d] * (max(begin, end) - begin)
    return home if len(home) == cumulated.shape[1] - 1 else None


def modules_apart(
    problem: FreeProblem, modules: Sequence[str], tuning: FreeTuning
) -> Iterator[tuple[Home, Trail]]:
    """Yield placements of whole modules, for each depth of their paths: the largest first, where it ends soonest."""
    for depth in range(1, tuning.module_depth + 1):
        groups: dict[str, list[int]] = defaultdict(list)
        for unit, path in enumerate(modules):
            groups[".".join(path.split(".")[:depth])].append(unit)
        if not 1 < len(groups) < tuning.most_modules:
            continue
        load = np.zeros(problem.devices)
        home = [0] * problem.units
        size = {path: problem.seconds[:, units].sum(axis=1) for path, units in groups.items()}
        for path in sorted(groups, key=lambda p: -float(size[p].min())):
            d = int((load + size[path]).argmin())
            load[d] += size[path][d]
            for unit in groups[path]:
                home[unit] = d
        yield tuple(home), Trail.of(Origin.MODULES_APART, depth)


def _earliest_finish(problem: FreeProblem, tasks: TaskGraph, unit_of_task: IntArray) -> Home:
    """Place each task where its forward ends soonest; memory is not looked at."""
    sent = tasks.sent_bytes.tolist()
    latency, per_byte = tasks.latency.tolist(), tasks.seconds_per_byte.tolist()

    def arrival(producer: int, end: float, source: int, target: int) -> float:
        return float(end + latency[source][target] + sent[producer] * per_byte[source][target])

    return earliest_finish(
        sorted(range(len(tasks)), key=lambda task: (-tasks.urgency[task], task)),
        tasks.producers,
        tasks.forward.tolist(),
        arrival,
        unit_of_task.tolist(),
        [np.flatnonzero(allowed).tolist() for allowed in problem.allowed.T],
    )
