"""Small random layer-wise problems, and the exhaustive solver that the real ones are compared with."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np

from passes.search.layer.problem import (
    DevicePool,
    LayerProblem,
    LayerStructure,
    Recompute,
    StageSplit,
    Working,
    evaluate,
)
from passes.search.layer.tuning import TUNING
from passes.search.touches import Crossing, Touch


def all_downsets(units: int, edges: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    """Every downset of a DAG as a bit mask, by trying all sets."""
    return tuple(
        mask for mask in range(1 << units) if all(mask >> u & 1 or not mask >> v & 1 for u, v in edges)
    )


def random_problem(
    seed: int, *, chain: bool, assignment: str, tight: bool, pinned: bool, recompute: str = "none"
) -> LayerProblem:
    """A problem of 2-6 units and 1-3 devices with whole-number costs, so that ties are exact.

    ``recompute``: none, auto (stages that do not fit otherwise may) or full (every stage does).
    """
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 7 if chain else 6))
    edges = tuple((u, v) for v in range(n) for u in range(v) if (chain and u == v - 1) or rng.random() < 0.35)
    crossings = tuple(
        Crossing(u, tuple(sorted(v for a, v in edges if a == u)))
        for u in range(n)
        if any(a == u for a, _ in edges)
    )
    storages = []
    for _ in range(int(rng.integers(1, 6))):
        savers = tuple(sorted({int(u) for u in rng.integers(0, n, int(rng.integers(0, 4)))}))
        carried = [c for c in crossings if rng.random() < 0.5]
        if carried:
            storages.append(Touch(savers, carried[0].producer, carried[0].readers))
        elif savers:
            storages.append(Touch(savers))
    states = tuple(Touch(tuple(sorted({int(u) for u in rng.integers(0, n, 2)}))) for _ in range(n))
    deferred = tuple(replace(t, keeps_sent=False) for t in storages if rng.random() < 0.7)
    structure = LayerStructure(
        n,
        edges,
        tuple(storages),
        states,
        crossings,
        deferred,
        None if chain else all_downsets(n, edges),
    )
    devices = int(rng.integers(1, 4))
    rows = int(rng.integers(1, devices + 1))
    state_bytes = rng.integers(0, 9, len(states)).astype(float)
    storage_bytes = rng.integers(0, 9, len(storages)).astype(float)
    deferred_bytes = rng.integers(0, 9, len(deferred)).astype(float)
    m = int(rng.integers(1, 7))
    moments = tuple(((min(m, k), int(rng.integers(0, 3))), (1, 3)) for k in range(1, 4))
    demand = state_bytes.sum() + storage_bytes.sum() * min(m, 2)
    sequence: tuple[int, ...] = ()
    if assignment == "unordered":
        kinds = tuple(
            DevicePool(f"k{r}", r, _capacity(rng, demand, tight), int(rng.integers(1, 3)))
            for r in range(rows)
        )
    else:
        kinds = tuple(DevicePool(f"d{i}", i % rows, _capacity(rng, demand, tight)) for i in range(devices))
    if assignment == "sequence":
        sequence = tuple(int(i) for i in rng.integers(0, devices, 3))
    pins = {int(rng.integers(0, n)): int(rng.integers(0, 2)) for _ in range(2)} if pinned else {}
    blocks = _recompute(rng, structure, rows, recompute == "full") if recompute != "none" else None
    if blocks is not None:
        kept = tuple(Touch(t.savers[:1], t.producer, t.readers) for t in structure.storages)
        structure = replace(structure, recomputed=kept)
    size = len(kinds)
    low = int(rng.integers(1, 3)) if rng.random() < 0.3 else 1
    return LayerProblem(
        structure=structure,
        seconds=rng.integers(1, 12, (rows, n)).astype(float),
        storage_bytes=storage_bytes,
        state_bytes=state_bytes,
        forward_bytes=rng.integers(0, 9, len(crossings)).astype(float),
        gradient_bytes=rng.integers(0, 9, len(crossings)).astype(float),
        working=_working(rng, n) if rng.random() < 0.7 else Working.none(n),
        kinds=kinds,
        link_latency_seconds=rng.integers(0, 3, (size, size)).astype(float),
        link_seconds_per_byte=rng.integers(0, 5, (size, size)) / 4,
        in_flight=tuple(min(m, k) for k in range(1, 4)) if rng.random() < 0.7 else (m, m, m),
        microbatches=m,
        fill=float(rng.choice([1.0, 0.5, 0.25])),
        chunks=int(rng.choice([1, 1, 2])),
        deferred_bytes=deferred_bytes,
        moments=moments if rng.random() < 0.4 else (),
        alternating=bool(rng.random() < 0.5),
        assignment=assignment,  # type: ignore[arg-type]
        sequence=sequence,
        stage_counts=(low, 3),
        pins=pins,
        recompute=blocks,
    )


def _recompute(rng: np.random.Generator, structure: LayerStructure, rows: int, always: bool) -> Recompute:
    n = structure.units
    return Recompute(
        seconds=rng.integers(0, 4, (rows, n)).astype(float),
        storage_bytes=rng.integers(0, 4, len(structure.storages)).astype(float),
        working=_working(rng, n),
        always=always,
    )


def _working(rng: np.random.Generator, units: int) -> Working:
    return Working(rng.integers(0, 6, units).astype(float), rng.integers(0, 4, units).astype(float))


def _capacity(rng: np.random.Generator, demand: float, tight: bool) -> float:
    return float(math.ceil(demand * rng.uniform(0.4, 1.1))) if tight else math.inf


def brute_force(problem: LayerProblem) -> StageSplit | None:
    """The best legal split among all assignments of units to stages and of stages to kinds."""
    best: StageSplit | None = None
    n = problem.structure.units
    for p in range(1, problem.max_stages + 1):
        for stage_of in monotone(problem, n, p):
            for kinds in product(range(len(problem.kinds)), repeat=p):
                split = evaluate(problem, stage_of, kinds)
                if violations(problem, split):
                    continue
                if best is None or split.objective_seconds < best.objective_seconds:
                    best = split
    return best


def monotone(problem: LayerProblem, n: int, p: int) -> Iterator[tuple[int, ...]]:
    """Yield the stages of all units in which no stage is empty and no edge goes back."""
    for stage_of in product(range(p), repeat=n):
        if set(stage_of) == set(range(p)) and all(
            stage_of[u] <= stage_of[v] for u, v in problem.structure.edges
        ):
            yield stage_of


def _overflow_bytes(problem: LayerProblem, split: StageSplit) -> tuple[float, ...]:
    """Per stage: bytes that do not fit its device; 0 where it fits."""
    return tuple(
        max(0.0, used - problem.kinds[kind].capacity_bytes * (1 + TUNING.memory_tolerance))
        for used, kind in zip(split.memory_bytes, split.kinds, strict=True)
    )


def violations(problem: LayerProblem, split: StageSplit) -> list[str]:
    """Every rule of the problem that ``split`` breaks; empty for a legal split."""
    found: list[str] = []
    p = split.stages
    if not problem.stage_counts[0] <= p <= problem.max_stages:
        found.append(f"{p} stages")
    if set(split.stage_of) != set(range(p)):
        found.append("an empty stage")
    found += [
        f"edge {u}->{v} leads back"
        for u, v in problem.structure.edges
        if split.stage_of[u] > split.stage_of[v]
    ]
    found += [f"unit {u} is pinned to stage {s}" for u, s in problem.pins.items() if split.stage_of[u] != s]
    found += [
        f"stage {s} is too large" for s, excess in enumerate(_overflow_bytes(problem, split)) if excess > 0
    ]
    if problem.structure.downsets is None:
        if list(split.stage_of) != sorted(split.stage_of):
            found.append("a stage is no interval of the numbering")
    else:
        family = set(problem.structure.downsets)
        for s in range(p):
            if sum(1 << u for u, stage in enumerate(split.stage_of) if stage <= s) not in family:
                found.append(f"cut {s + 1} is not in the family")
    if not _kinds_allowed(problem, split.kinds):
        found.append("devices")
    return found


def _kinds_allowed(problem: LayerProblem, kinds: tuple[int, ...]) -> bool:
    if problem.assignment == "sequence":
        return kinds == problem.sequence[len(problem.sequence) - len(kinds) :]
    if problem.assignment == "ordered":
        return all(a < b for a, b in itertools.pairwise(kinds))
    return all(kinds.count(k) <= problem.kinds[k].count for k in set(kinds))
