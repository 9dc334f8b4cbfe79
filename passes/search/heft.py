"""HEFT: tasks in the order of their longest way to the end, each on the device where it ends soonest.

Topcuoglu, Hariri and Wu, "Performance-effective and low-complexity task scheduling for heterogeneous computing" (2002),
without insertion into gaps. Tasks of one unit share a device: the first of them chooses it for all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence


def earliest_finish(
    order: Sequence[int],
    producers: Sequence[Sequence[int]],
    seconds: Sequence[Sequence[float]],
    arrival: Callable[[int, float, int, int], float],
    unit_of: Sequence[int],
    allowed: Sequence[Sequence[int]],
    *,
    sizes: Sequence[float] | None = None,
    room: Sequence[float] | None = None,
) -> tuple[int, ...]:
    """Return a device for every unit; device 0 for a unit that fits on none.

    order               tasks, the longest way to the end first, so that producers come before readers
    producers           tasks that each task reads
    seconds[d][t]       of task t on device d
    arrival(p, e, a, b) when the output of task p, which ends at e on device a, is on device b
    unit_of             unit of each task
    allowed             devices that each unit may be on
    sizes, room         what each unit takes and each device has, in any unit; None: there is room for everything

    Time: O((tasks + edges) · devices).
    """
    homes = [-1] * len(allowed)
    left = list(room or [math.inf] * len(seconds))
    free = [0.0] * len(seconds)
    ended = [0.0] * len(unit_of)
    for task in order:
        unit = unit_of[task]
        size = 0.0 if sizes is None else sizes[unit]
        settled = homes[unit] >= 0
        best, best_end = homes[unit] if settled else 0, math.inf
        for device in [homes[unit]] if settled else allowed[unit]:
            if not settled and size > left[device]:
                continue
            begin = free[device]
            for producer in producers[task]:
                begin = max(begin, arrival(producer, ended[producer], homes[unit_of[producer]], device))
            end = begin + seconds[device][task]
            if end < best_end:
                best, best_end = device, end
        if not settled:
            homes[unit] = best
            left[best] -= size
        free[best] = ended[task] = best_end
    return tuple(homes)
