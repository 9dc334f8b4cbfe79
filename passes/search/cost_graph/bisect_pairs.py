"""Bisection of pairs: two devices divide what they hold anew, at best, by an integer program.

Groups of all other devices stay. A net that touches a third device is cut anyway, and what that device pays for it does not
change while the net still touches one of the two: so only the two loads count, and all other loads stay as they are.

    y[g] = 1: on device a, 0: on device b        T ≥ load(a), T ≥ load(b)        minimize T
    ta[e] ≥ y[g]     tb[e] ≥ 1 - y[g]     net e touches a, touches b
    cut[e] ≥ ta[e] + tb[e] - 1 where no third device holds a part of e, else 1
    an accelerator pays weight·(touches + cut - 1): nothing for a net that it holds whole
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from passes.search.cost_graph.groups import GroupProblem, fits, group_loads
from passes.search.cost_graph.tuning import TUNING
from passes.search.ilp import IntegerProgram, Terms

LEAST_GAIN = 1e-9


def bisect_pairs(
    problem: GroupProblem, homes: Sequence[int], loads: Sequence[float], deadline: float
) -> tuple[int, ...]:
    """Improve ``homes``: the busiest device shares with each other one, as long as the largest load falls."""
    best, current = tuple(homes), list(loads)
    improved = True
    while improved and time.monotonic() < deadline:
        improved = False
        busiest = int(np.argmax(current))
        others = sorted((d for d in range(len(current)) if d != busiest), key=lambda d: current[d])
        for other in others:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            found = _divide(problem, best, (busiest, other), min(left, 5.0))
            if found is None:
                continue
            changed = group_loads(problem, found)
            if max(changed) < max(current) * (1 - LEAST_GAIN) and fits(problem, found):
                best, current, improved = found, changed, True
                break
    return best


def _divide(
    problem: GroupProblem, homes: tuple[int, ...], pair: tuple[int, int], seconds: float
) -> tuple[int, ...] | None:
    machine = problem.machine
    groups = [g for g, home in enumerate(homes) if home in pair]
    if not 2 <= len(groups) <= TUNING.most_bisected_groups:
        return None
    first_pays, second_pays = (device < machine.accelerators for device in pair)
    scale = 100.0 / max(group_loads(problem, homes)[d] for d in pair)
    program = IntegerProgram("divide")
    top = program.variable("top")
    program.minimize({top: 1.0})
    y = {}
    first: Terms = {}
    second: Terms = {}
    constant = [0.0, 0.0]
    for g in groups:
        on_first = float((problem.accelerator_cost if first_pays else problem.cpu_cost)[g])
        on_second = float((problem.accelerator_cost if second_pays else problem.cpu_cost)[g])
        low, high = float(np.isinf(on_second)), float(np.isfinite(on_first))
        y[g] = program.variable(f"y_{g}", low, high, integer=True)
        on_first, on_second = (cost if np.isfinite(cost) else 0.0 for cost in (on_first, on_second))
        first[y[g]] = on_first * scale
        second[y[g]] = -on_second * scale
        constant[1] += on_second * scale
    for e in sorted({e for g in groups for e in problem.nets_of[g]}):
        pins, weight = problem.nets[e], float(problem.weight[e]) * scale
        own = [g for g in pins if g in y]
        elsewhere = len(own) < len(pins)
        touches_first, touches_second = program.variable(f"a_{e}", 0, 1), program.variable(f"b_{e}", 0, 1)
        for g in own:
            program.row({touches_first: 1.0, y[g]: -1.0}, ">=", 0.0)
            program.row({touches_second: 1.0, y[g]: 1.0}, ">=", 1.0)
        if elsewhere:
            first[touches_first] = second[touches_second] = weight
            continue
        # T ≥ … pays weight·(touches a + touches b - 1): one where both are touched, zero where one is
        for load, pays, at in ((first, first_pays, 0), (second, second_pays, 1)):
            if pays:
                load[touches_first] = load[touches_second] = weight
                constant[at] -= weight
    for load, pays, own_work in ((first, first_pays, constant[0]), (second, second_pays, constant[1])):
        held = load if pays else {variable: load[variable] for variable in y.values()}
        program.row({top: 1.0, **{v: -seconds for v, seconds in held.items()}}, ">=", own_work)
    if problem.memory_binds:
        total = float(problem.size[groups].sum())
        held = {v: float(problem.size[g]) / machine.memory_size for g, v in y.items()}
        if first_pays:
            program.row(held, "<=", 1.0)
        if second_pays:
            program.row(held, ">=", total / machine.memory_size - 1)
    values = program.solve(seconds, 1e-7).values
    if values is None:
        return None
    found = list(homes)
    for g, variable in y.items():
        found[g] = pair[0] if values[variable] > 0.5 else pair[1]
    return tuple(found)
