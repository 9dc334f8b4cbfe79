"""Residuals of predictions: measured over predicted, a row per measured run, in benchmarks/residuals.csv.

    benchmark   source                   plan          kind        rates    device  step    memory  counts
    published   LLMs-from-scratch, a100  rasbt-bf16    one device  presets  cuda    1.1475  0.9964  reserved

``source``: who measured, and on what: rows of one source err alike. ``step``, ``memory``: measured / predicted, of the
step and of the fullest device's peak; empty where it was not measured. ``counts``: what the measured memory is of, and so
the predicted: tensors that are "allocated", what torch's allocator "reserved" for them, or that as the "driver" counts it,
less the process's context. Benchmarks replace their own rows (``--residuals``).
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from partitioner.plan import Plan

Counts: TypeAlias = Literal["allocated", "reserved", "driver"]
"""What a measured peak counts."""

FILE = Path(__file__).with_suffix(".csv")
HELD_OUT_FILE = Path(__file__).with_name("data") / "published_held_out.csv"
"""Rows predicted without what was fitted on their source: the intervals know nothing of them."""


@dataclass(frozen=True)
class Residual:
    """One measured run beside its prediction."""

    benchmark: str
    source: str
    plan: str
    kind: str
    rates: str
    device: str
    step: float | None
    memory: float | None
    counts: str = ""


def counted_bytes(plan: Plan, counts: Counts) -> int:
    """Return what is predicted of the fullest device that such a measurement counts, without a context."""
    parts = plan.prediction.memory_parts(plan.fullest_device)
    return parts["tensors"] + (0 if counts == "allocated" else parts.get("allocator", 0))


def residual_of(
    benchmark: str,
    source: str,
    name: str,
    plan: Plan,
    step_seconds: float,
    peak_bytes: float,
    counts: Counts = "allocated",
) -> Residual:
    """Return the residual of a plan that was measured; ``peak_bytes`` of its fullest device, 0 if unknown."""
    predicted, intervals = plan.prediction, plan.intervals
    fullest = plan.fullest_device
    return Residual(
        benchmark,
        source,
        name,
        intervals.kind,
        intervals.origin.rates or "",
        plan.cluster.devices[fullest].kind,
        step_seconds / predicted.step_seconds,
        peak_bytes / counted_bytes(plan, counts) if peak_bytes else None,
        counts if peak_bytes else "",
    )


def read_residuals(path: Path = FILE) -> list[Residual]:
    """Read all rows."""
    with path.open(newline="") as file:
        return [
            Residual(
                **{
                    key: row[key]
                    for key in ("benchmark", "source", "plan", "kind", "rates", "device", "counts")
                },
                step=float(row["step"]) if row["step"] else None,
                memory=float(row["memory"]) if row["memory"] else None,
            )
            for row in csv.DictReader(file)
        ]


def replace_residuals(benchmark: str, rows: Sequence[Residual], path: Path = FILE) -> None:
    """Write ``rows`` in place of those that the benchmark wrote before."""
    kept = [row for row in read_residuals(path) if row.benchmark != benchmark] if path.exists() else []
    write_residuals(sorted([*kept, *rows], key=lambda row: (row.benchmark, row.source, row.plan)), path)


def write_residuals(rows: Sequence[Residual], path: Path = FILE) -> None:
    """Write all rows, ratios with four digits after the point."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Residual)], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            ratios = {"step": row.step, "memory": row.memory}
            texts = {key: "" if ratio is None else f"{ratio:.4f}" for key, ratio in ratios.items()}
            writer.writerow({**asdict(row), **texts})
