"""Ways in which replicas may keep the parameters of a piece, whole or in parts: what each takes at least.

    whole              gradients summed at the end of a step
    its state split    gradients scattered, what is updated gathered (ZeRO-1)
    split              gathered in each micro-batch, too (ZeRO-3), beside what is computed before

They are those of replicas on one device each. Where each of ``t`` shards has its own replicas, no way takes less than a
``t``-th of the same way there: what is kept and sent may be split so, and is not sent any sooner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cost_models.arrays import FloatArray, IntArray
from passes.lower.job import Job
from passes.search.feature.bound import wire_table
from passes.search.feature.problem import FeatureProblem
from passes.search.hybrid.recipes.eliminate import wire_seconds
from passes.search.hybrid.recipes.pieces import GroupKind, PieceSearch
from passes.timings import phase


@dataclass(frozen=True, eq=False)
class Kept:
    """All ways to keep each parameter, those of one parameter behind those of another."""

    once_seconds: FloatArray
    """Per step."""
    use_seconds: FloatArray
    """Per micro-batch."""
    bytes: FloatArray
    begins: IntArray
    """The first of the ways of each parameter."""

    def least(self, microbatches: int, prices: FloatArray) -> FloatArray:
        """[prices] the least seconds per micro-batch of all parameters, with what their bytes cost."""
        if not len(self.begins):
            return np.zeros(len(prices))
        seconds = self.once_seconds / microbatches + self.use_seconds
        each = np.minimum.reduceat(seconds + prices[:, None] * self.bytes, self.begins, axis=1)
        return np.asarray(each.sum(axis=1))


def keeping(search: PieceSearch, kind: int, group: GroupKind, job: Job, *, again: bool) -> FeatureProblem:
    """Make the problem of the parameters of a class of pieces on a group; see ``PieceSearch.problem``."""
    alone = GroupKind(group.ranks[:: group.tensor], group.replicas, 1)
    return search.problem(kind, alone, job, 1, again=again, ops_cost=False)


@phase("recipes")
def kept(problems: Sequence[FeatureProblem], tensor: int, samples: int) -> Kept:
    """List the ways of such problems, each as cheap as in any of them, for groups of ``tensor`` shards.

    ``samples``: of a micro-batch.
    """
    each = [used_seconds(replace(own, samples=samples)) for own in problems]
    problem = problems[0]
    used = {u: np.minimum.reduce([own[u] for own in each]) for u in each[0]}
    own = [u for u, unit in enumerate(problem.space.units) if unit.kind == "parameter"]
    numbers = [problem.units[u] for u in own]
    ends = np.cumsum([len(unit.seconds) for unit in numbers], dtype=np.int64)

    def joined(arrays: list[FloatArray]) -> FloatArray:
        return np.concatenate([np.zeros(0), *arrays]) / tensor

    return Kept(
        joined([unit.seconds for unit in numbers]),
        joined([used[u] for u in own]),
        joined([unit.bytes for unit in numbers]),
        np.concatenate([[0], ends])[:-1],
    )


def used_seconds(problem: FeatureProblem) -> dict[int, FloatArray]:
    """[ways] of each parameter, the least seconds in which its readers get it."""
    found = {u: np.zeros(len(own.seconds)) for u, own in enumerate(problem.units)}
    for w, wire in enumerate(problem.space.wires):
        if problem.space.units[wire.producer].kind == "parameter":
            units, seconds = wire_seconds(problem, w, wire_table(problem, w))
            others = tuple(axis for axis, unit in enumerate(units) if unit != wire.producer)
            found[wire.producer] += seconds.min(axis=others)
    return found
