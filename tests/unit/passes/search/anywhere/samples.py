"""Small random placement problems, and the exhaustive solver that the real searches are compared with."""

from __future__ import annotations

from itertools import product

import numpy as np

from passes.search.anywhere.problem import Net, PlacementProblem, evaluate, legal


def random_problem(
    seed: int,
    *,
    units: int = 6,
    devices: int = 2,
    tight: bool = False,
    pinned: bool = False,
    alike: bool = False,
    ties: bool = True,
    once: bool = False,
) -> PlacementProblem:
    """Whole-number costs, so that ties are exact; unlike devices and links unless ``alike``; nets paid ``once``."""
    rng = np.random.default_rng(seed)
    seconds = rng.integers(1, 20, (devices, units)).astype(float)
    if alike:
        seconds[:] = seconds[0]
    nets: dict[Net, None] = {}
    for producer in range(units):
        later = [v for v in range(units) if v != producer and rng.random() < 0.3]
        if later:
            nets[Net(producer, tuple(later))] = None
    latency = rng.integers(0, 3, (devices, devices)).astype(float)
    rate = rng.integers(1, 4, (devices, devices)).astype(float)
    if alike:
        latency[:], rate[:] = 1.0, 1.0
    rates = rate[0].copy()
    for matrix in (latency, rate):
        matrix[:] = np.triu(matrix, 1) + np.triu(matrix, 1).T
    tied = [tuple(sorted(rng.choice(units, 2, replace=False).tolist()))] if ties and units > 2 else []
    unit_bytes = rng.integers(1, 9, units).astype(float)
    capacity = np.full(devices, np.inf)
    if tight:
        capacity[:] = np.ceil(unit_bytes.sum() * rng.uniform(0.6, 1.1, devices)) + 4
        if alike:
            capacity[:] = capacity[0]
    allowed = np.ones((devices, units), dtype=bool)
    if pinned:
        allowed[:, 0] = False
        allowed[int(rng.integers(0, devices)), 0] = True
    each = 0.0 if once else 1.0
    tie_seconds = rng.integers(0, 3, (devices, len(tied))).astype(float)
    if alike:
        tie_seconds[:] = tie_seconds[:1]
    return PlacementProblem(
        seconds=seconds,
        unit_bytes=unit_bytes,
        nets=tuple(nets),
        messages=each * rng.integers(1, 3, len(nets)),
        net_bytes=rng.integers(0, 5, len(nets)).astype(float),
        received_bytes=each * rng.integers(0, 2, len(nets)),
        ties=tuple(tied),
        tie_bytes=rng.integers(0, 3, len(tied)).astype(float),
        tie_seconds=tie_seconds,
        sum_bytes=rng.integers(0, 5, len(tied)).astype(float),
        latency=latency,
        seconds_per_byte=rate,
        capacity_bytes=capacity,
        allowed=allowed,
        paid_once=rates if once else None,
    )


def brute_force(problem: PlacementProblem) -> tuple[float, tuple[int, ...]] | None:
    """The least objective of all legal placements; None if there is none."""
    best: tuple[float, tuple[int, ...]] | None = None
    for home in product(range(problem.devices), repeat=problem.units):
        if legal(problem, home):
            value = evaluate(problem, home).objective_seconds
            if best is None or value < best[0]:
                best = value, home
    return best
