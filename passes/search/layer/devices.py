"""The device that a stage may use, given the stages after it: the device half of the dynamic program's state.

Stages are numbered from the end, because the micro-batches a stage holds depend on how many stages follow
it. A state of level k says which kind the k-th stage from the end uses and what is left for the stages
before it:

    sequence     k                          the last k entries of a fixed list of devices
    ordered      (k, device)                any subsequence of a list of unlike devices
    unordered    (kind, used per kind)      identical devices collapse to a count
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from passes.search.layer.problem import LayerProblem


@dataclass(frozen=True)
class DeviceState:
    """The first of the remaining stages uses ``kind``; ``next`` are the states of level k-1 that may
    follow."""

    kind: int
    next: tuple[int, ...]


def device_levels(problem: LayerProblem) -> list[list[DeviceState]]:
    """States by level; entry k-1 holds level k. The states of level 1 have no successors."""
    if problem.assignment == "sequence":
        return [
            [DeviceState(problem.sequence[-k], (0,) if k > 1 else ())]
            for k in range(1, problem.max_stages + 1)
        ]
    if problem.assignment == "ordered":
        return _ordered(len(problem.kinds), problem.max_stages)
    return _unordered(problem)


def _ordered(devices: int, max_stages: int) -> list[list[DeviceState]]:
    levels: list[list[DeviceState]] = []
    for k in range(1, max_stages + 1):
        # level k can start at device d only if k - 1 devices are left behind it; state index = device index
        count = devices - k + 1
        levels.append([DeviceState(d, tuple(range(d + 1, count + 1)) if k > 1 else ()) for d in range(count)])
    return levels


def _unordered(problem: LayerProblem) -> list[list[DeviceState]]:
    counts = [kind.count for kind in problem.kinds]
    levels: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in range(problem.max_stages)]
    for used in product(*(range(count + 1) for count in counts)):
        k = sum(used)
        if 1 <= k <= problem.max_stages:
            levels[k - 1] += [(kind, used) for kind, n in enumerate(used) if n > 0]
    result: list[list[DeviceState]] = []
    index_of: dict[tuple[int, tuple[int, ...]], int] = {}
    for level in levels:
        states = []
        for kind, used in level:
            rest = tuple(n - (i == kind) for i, n in enumerate(used))
            states.append(DeviceState(kind, tuple(index_of[i, rest] for i, n in enumerate(rest) if n > 0)))
        index_of = {key: position for position, key in enumerate(level)}
        result.append(states)
    return result
