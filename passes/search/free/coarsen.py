"""Units become fewer and larger, level by level, so that searches see the whole graph at once.

    units ──match──► coarse units ──match──► …  ──► about a hundred

Heavy-edge matching (Karypis, Kumar 1998, "A fast and high quality multilevel scheme for partitioning irregular graphs"):
each unit joins the neighbour that it exchanges most with, per unit of work of the two, as long as neither grows beyond a
share of all work. Placements of coarse units are placements of units; what is best there need not be best here, so a
bound of a coarse problem holds for that problem alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cost_models.arrays import FloatArray, IntArray
from passes.search.free.problem import FreeProblem, Net
from passes.search.free.tuning import DEFAULT, FreeTuning


@dataclass(frozen=True, eq=False)
class Level:
    """A coarse problem, and the coarse unit of each unit of the problem below it."""

    problem: FreeProblem
    unit_of: IntArray

    def down(self, home: Sequence[int]) -> tuple[int, ...]:
        """Return the placement of the finer problem that ``home`` means."""
        return tuple(np.asarray(home, dtype=np.int64)[self.unit_of].tolist())

    def up(self, home: Sequence[int]) -> tuple[int, ...]:
        """Return the coarse placement: each coarse unit on the device of most of its units in ``home``."""
        return majority(self.problem, home, self.unit_of, np.ones(len(self.unit_of)))


def majority(
    problem: FreeProblem, home: Sequence[int], unit_of: IntArray, work: FloatArray
) -> tuple[int, ...]:
    """Return for each unit of ``problem`` the allowed device with most work of its parts, ``home`` being theirs."""
    votes = np.zeros((problem.devices, problem.units))
    np.add.at(votes, (np.asarray(home, dtype=np.int64), unit_of), np.maximum(work, 1e-300))
    votes[~problem.allowed] = -1.0
    return tuple(votes.argmax(axis=0).tolist())


def levels(problem: FreeProblem, wanted: int, tuning: FreeTuning = DEFAULT) -> list[Level]:
    """Return ever coarser problems, down to about ``wanted`` units; none if there are no more units than that."""
    found: list[Level] = []
    current = problem
    while current.units > wanted:
        unit_of = _matched(current, tuning.coarse_share / wanted)
        count = int(unit_of.max()) + 1
        if count > tuning.least_shrink * current.units:
            break
        level = Level(contract(current, unit_of), unit_of)
        found.append(level)
        current = level.problem
    return found


def _matched(problem: FreeProblem, share: float) -> IntArray:
    """Return the coarse unit of each unit, numbered by first members; none has more than ``share`` of all work."""
    affinity: list[dict[int, float]] = [defaultdict(float) for _ in range(problem.units)]
    latency, per_byte = _mean_link(problem)
    for e, net in enumerate(problem.nets):
        weight = problem.messages[e] * latency + problem.net_bytes[e] * per_byte
        for reader in net.readers:
            affinity[net.producer][reader] += weight / len(net.readers)
            affinity[reader][net.producer] += weight / len(net.readers)
    work = problem.seconds.mean(axis=0).tolist()
    most = share * sum(work)
    allowed = [tuple(column) for column in problem.allowed.T.tolist()]
    partner = [-1] * problem.units
    floor = sum(work) / problem.units * 1e-3 or 1e-300
    for u in sorted(range(problem.units), key=lambda u: (work[u], u)):
        if partner[u] >= 0:
            continue
        best, best_rating = -1, -1.0
        for v, weight in affinity[u].items():
            if partner[v] >= 0 or allowed[v] != allowed[u]:
                continue
            if work[u] + work[v] > most and min(work[u], work[v]) > floor:
                continue
            rating = weight / (floor + work[v])
            if rating > best_rating:
                best, best_rating = v, rating
        if best >= 0:
            partner[u], partner[best] = best, u
    number: dict[int, int] = {}
    of = [number.setdefault(min(u, p) if p >= 0 else u, len(number)) for u, p in enumerate(partner)]
    return np.array(of, dtype=np.int64)


def _mean_link(problem: FreeProblem) -> tuple[float, float]:
    pairs = max(1, problem.devices * (problem.devices - 1))
    return float(problem.latency.sum()) / pairs, float(problem.seconds_per_byte.sum()) / pairs


def contract(problem: FreeProblem, unit_of: IntArray) -> FreeProblem:
    """Return the problem in which units with one number in ``unit_of`` are one; its placements cost the same as there."""
    count = int(unit_of.max()) + 1
    of = unit_of.tolist()
    seconds = np.stack(
        [np.bincount(unit_of, weights=row, minlength=count) for row in problem.seconds]
    ).astype(np.float64)
    allowed = np.ones((problem.devices, count), dtype=bool)
    for d in range(problem.devices):
        np.logical_and.at(allowed[d], unit_of, problem.allowed[d])
    nets: dict[Net, int] = {}
    net_of: list[int] = []
    for net in problem.nets:
        producer = of[net.producer]
        readers = tuple(sorted({of[r] for r in net.readers} - {producer}))
        net_of.append(nets.setdefault(Net(producer, readers), len(nets)) if readers else -1)
    kept = np.array([i for i, e in enumerate(net_of) if e >= 0], dtype=np.int64)
    group = np.array([e for e in net_of if e >= 0], dtype=np.int64)
    ties = [tuple(sorted({of[u] for u in members})) for members in problem.ties]
    apart = np.array([i for i, members in enumerate(ties) if len(members) > 1], dtype=np.int64)
    unit_bytes = np.bincount(unit_of, weights=problem.unit_bytes, minlength=count).astype(np.float64)
    for i, members in enumerate(ties):
        if len(members) == 1:
            unit_bytes[members[0]] += problem.tie_bytes[i]
            seconds[:, members[0]] += problem.tie_seconds[:, i]

    def summed(values: FloatArray) -> FloatArray:
        return np.bincount(group, weights=values[kept], minlength=len(nets)).astype(np.float64)

    return FreeProblem(
        seconds=seconds,
        unit_bytes=unit_bytes,
        nets=tuple(nets),
        messages=summed(problem.messages),
        net_bytes=summed(problem.net_bytes),
        received_bytes=summed(problem.received_bytes),
        ties=tuple(ties[i] for i in apart.tolist()),
        tie_bytes=problem.tie_bytes[apart],
        tie_seconds=problem.tie_seconds[:, apart],
        sum_bytes=problem.sum_bytes[apart],
        latency=problem.latency,
        seconds_per_byte=problem.seconds_per_byte,
        capacity_bytes=problem.capacity_bytes,
        allowed=allowed,
    )
