"""Fits of measured cases: seconds become ``OpTimes``, curves through points and lines by least squares."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cost_models.measure_ops import CaseSeconds
from cost_models.op_cases import ARITHMETIC, OpCase
from cost_models.op_profile import GENERIC, PHASES, Cost, CostCurve, CostLine, OpTimes, Phase

_SHORTEST_SECONDS = 5e-8
STANDS_FOR_ALL = "mul"


@dataclass(frozen=True)
class CaseWork:
    """(FLOPs, bytes) of a case by phase; ``backward_weight`` includes adding to earlier gradients."""

    forward: tuple[float, float]
    backward_input: tuple[float, float]
    backward_weight: tuple[float, float]


def fit_op_times(
    cases: Sequence[OpCase], works: Sequence[CaseWork], seconds: Sequence[CaseSeconds]
) -> OpTimes:
    """Fit the cost of every kind and phase that was measured."""
    samples: defaultdict[tuple[str, Phase], list[tuple[float, float, float]]] = defaultdict(list)
    for case, work, measured in zip(cases, works, seconds, strict=True):
        spent = {
            "forward": measured.forward,
            "backward_input": measured.backward - measured.backward_weight,
            "backward_weight": measured.backward_weight,
        }
        for phase in PHASES:
            flops, moved = getattr(work, phase)
            if phase != "forward" and not flops and not moved and case.kind != "view":
                continue
            if phase == "backward_weight" and not measured.backward_weight:
                continue
            samples[case.kind, phase].append((flops, moved, max(spent[phase], _SHORTEST_SECONDS)))
    costs: list[tuple[tuple[str, Phase], Cost]] = []
    for key, found in sorted(samples.items()):
        costs.append((key, fit_line(found) if key[0] in ARITHMETIC else fit_curve(found)))
    # A product of two tensors stands for all that was not measured: it reads, computes little, and writes.
    costs += [((GENERIC, phase), cost) for (kind, phase), cost in costs if kind == STANDS_FOR_ALL]
    return OpTimes(tuple(sorted(costs, key=lambda item: item[0])))


def fit_curve(samples: Sequence[tuple[float, float, float]]) -> CostCurve:
    """Lay a curve through the samples (FLOPs, bytes, seconds), by bytes; more bytes never take less time."""
    points: dict[float, float] = {}
    for _, moved, seconds in samples:
        points[max(1.0, moved)] = seconds
    longest = 0.0
    rising = []
    for moved in sorted(points):
        longest = max(longest, points[moved])
        rising.append((float(moved), longest))
    return CostCurve(tuple(rising))


def fit_line(samples: Sequence[tuple[float, float, float]]) -> CostLine:
    """Fit a line by least squares of *relative* errors, coefficients ≥ 0: small ops count as much as large ones.

    min over c ≥ 0 of Σ ((c₀ + c₁·FLOPs + c₂·bytes − t) / t)². With three unknowns, every set of unknowns that may be
    zero is tried and the best feasible solution kept.
    """
    rows = np.array([[1.0, flops, moved] for flops, moved, _ in samples])
    target = np.array([seconds for _, _, seconds in samples])
    scaled, ones = rows / target[:, None], np.ones(len(target))
    # Columns to a common size first: the problem is badly scaled otherwise (1 against 1e9 FLOPs).
    norm = np.linalg.norm(scaled, axis=0)
    norm[norm == 0.0] = 1.0
    best, least = np.zeros(3), np.inf
    for used in ([0, 1, 2], [0, 1], [1, 2], [0, 2], [1], [2], [0]):
        solution, *_ = np.linalg.lstsq(scaled[:, used] / norm[used], ones, rcond=None)
        if (solution < 0).any():
            continue
        coefficients = np.zeros(3)
        coefficients[used] = solution / norm[used]
        error = float(((scaled @ coefficients - ones) ** 2).sum())
        if error < least - 1e-12:
            best, least = coefficients, error
    return CostLine(*map(float, best))
