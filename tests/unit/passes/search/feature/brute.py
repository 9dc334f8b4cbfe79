"""The feature-wise optimum by looking at every combination: shares no code with the bound or the integer program."""

from __future__ import annotations

import math

import numpy as np

from passes.search.feature.problem import FeatureProblem


def every_cost(problem: FeatureProblem) -> tuple[np.ndarray, np.ndarray]:
    """(seconds, bytes) of every combination of options: arrays with one dimension per unit of several options."""
    sizes = [len(unit.seconds) for unit in problem.units]
    axis = {u: i for i, u in enumerate(u for u, size in enumerate(sizes) if size > 1)}
    shape = tuple(sizes[u] for u in axis)
    seconds, held, buffer, working = (np.zeros(shape) for _ in range(4))

    def along(u: int, values: np.ndarray) -> np.ndarray:
        if u not in axis:
            return np.asarray(values).reshape((1,) * len(shape))
        return np.asarray(values).reshape(tuple(-1 if i == axis[u] else 1 for i in range(len(shape))))

    for u, unit in enumerate(problem.units):
        seconds = seconds + along(u, unit.seconds)
        held = held + along(u, unit.bytes)
        working = np.maximum(working, along(u, unit.working_bytes))
    for w, wire in enumerate(problem.space.wires):
        made = problem.units[wire.producer].outputs[wire.output]
        sources = sorted(set(made.tolist()))
        needs = sorted({c for u, i in wire.readers for c in problem.units[u].inputs[i].tolist()})
        table = problem.table(w, sources, needs)
        row = along(wire.producer, np.array([sources.index(c) for c in made.tolist()]))
        columns = [
            along(u, np.array([needs.index(c) for c in problem.units[u].inputs[i].tolist()]))
            for u, i in wire.readers
        ]
        at_once = np.zeros(shape)
        for n in range(len(needs)):
            used = np.zeros((1,) * len(shape), dtype=bool)
            for column in columns:
                used = used | (column == n)
            seconds = seconds + np.where(
                used, np.where(table.allowed[row, n], table.seconds[row, n], math.inf), 0.0
            )
            held = held + np.where(used, table.copies[row, n], 0.0)
            at_once = at_once + np.where(used, table.buffers[row, n], 0.0)
        for hidden, column in zip(problem.hidden(w, sources, needs), columns, strict=False):
            seconds = seconds - hidden[row, column]
        buffer = np.maximum(buffer, at_once)
    return seconds, held + buffer + working


def combinations(problem: FeatureProblem) -> int:
    return math.prod(len(unit.seconds) for unit in problem.units)
