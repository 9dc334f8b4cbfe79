"""Rates of a device from its calibration, in the words of the cost model (``cost_models.compute``).

A GPU's are parts of the data sheet's peaks:

    t = k + s·W / (P · e) + Q / (B · e_memory)     seconds of a kernel

    k           the time of the smallest kernel
    e_memory    median of Q / (B · (t - k)) of large ops that only move bytes
    e           median of s·W / (P · (t - k - Q / (B · e_memory))) of the ops of a class, with P the data sheet's peak

Only what arithmetic dominates counts towards an e: where it takes less than half of t, an error in the rest would be all
of it. Of attention the fastest backend counts, which is what ``scaled_dot_product_attention`` takes. A part of more than 1
is cut to 1.

A CPU worker has no data sheet: each kind of op has its own seconds (``OpTimes``), curves through points and lines by least
squares.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, cast

import numpy as np
import torch

from cost_models.compute import OpClass, efficiency_name
from cost_models.devices import Device
from cost_models.measure.calibration import Calibration, Measurement
from cost_models.measure.messages import fit_latency
from cost_models.measure.ops import DEFAULT_WAY
from cost_models.op_profile import ARITHMETIC, GENERIC, PHASES, Cost, CostCurve, CostLine, OpTimes, Phase
from cost_models.spec.rates import MeasuredRates
from cost_models.spec.sections import HostSpec

_CLASS: Mapping[str, OpClass] = {
    "linear": "matmul",
    "matmul": "matmul",
    "scaled_dot_product_attention": "attention",
    "conv2d": "conv",
}
_MOVING = ("add", "mul", "contiguous", "relu")
"""Kinds that compute next to nothing."""
_LARGE_BYTES = 2**27
"""Ops that move less may find their operands in a cache: the largest L2 of the presets' cards has 50 MB."""
_DOMINATES = 0.5
STANDS_FOR_ALL = "mul"
"""The kind that stands for all that were not measured: it reads, computes little, and writes."""
_COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")

OpSample = tuple[float, float, float]
"""(FLOPs, bytes, seconds)."""


# --------------------------------------------------------------------------------------------------
# GPUs


class Fitted(NamedTuple):
    """Rates of a device, and how many measurements each part of them rests on."""

    rates: MeasuredRates
    samples: Mapping[str, int]


def fit(calibration: Calibration, device: Device, names: Collection[str] | None = None) -> Fitted:
    """Fit rates for ``device``, whose peaks are the data sheet's. ``names``: the records that arithmetic is fitted to."""
    records = {n: r for n, r in calibration.records.items() if r.unsupported is None}
    overheads = records["overheads"].values if "overheads" in records else {}
    kernel = overheads.get("kernel_seconds", device.kernel_overhead_seconds)
    bandwidth = device.memory_bandwidth_bytes_per_second
    moving = [
        part.moved_bytes / (bandwidth * (part.seconds - kernel))
        for record in records.values()
        if record.kind in _MOVING
        for part in record.parts.values()
        if part.moved_bytes >= _LARGE_BYTES and part.seconds > kernel
    ]
    memory = min(1.0, statistics.median(moving)) if moving else device.efficiency["memory"]
    shares: defaultdict[str, list[float]] = defaultdict(list)
    for record in _fastest(r for n, r in records.items() if names is None or n in names):
        for phase, part in record.parts.items():
            name = _efficiency_of(record, phase, device)
            if name is None:
                continue
            rest = part.seconds - kernel - part.moved_bytes / (bandwidth * memory)
            if rest > _DOMINATES * part.seconds:
                peak = device.flops_per_second[record.number]
                shares[name].append(record.share * part.flops / (peak * rest))
    efficiency = {name: min(1.0, statistics.median(found)) for name, found in shares.items() if found}
    if moving:
        efficiency["memory"] = memory
    launches = [overheads[name] for name in ("forward_seconds", "backward_seconds") if name in overheads]
    latency, link = _link(records) or (None, None)
    rates = MeasuredRates(
        efficiency=efficiency or None,
        launch_overhead_seconds=statistics.mean(launches) if launches else None,
        kernel_overhead_seconds=kernel if overheads else None,
        op_times=OpTimes(tuple(optimizers)) if (optimizers := _optimizers(calibration)) else None,
        link_bandwidth_bytes_per_second=link,
        link_latency_seconds=latency,
    )
    samples = {name: len(found) for name, found in shares.items()}
    return Fitted(rates, {**samples, "memory": len(moving), "link": int(link is not None)})


def _dtype(record: Measurement) -> torch.dtype:
    return getattr(torch, record.number)  # type: ignore[no-any-return]


def _efficiency_of(record: Measurement, phase: str, device: Device) -> str | None:
    """Return the key of the efficiency that a record tells of; None for what the device's rates do not speak of."""
    op_class = _CLASS.get(record.kind)
    if (
        record.number == "tf32"
    ):  # convolutions take it unless they are told not to, products only if they are told to
        return "conv" if op_class == "conv" and "tf32" in device.flops_per_second else None
    if op_class is None or not device.supports(_dtype(record)):
        return None
    if op_class == "attention" and record.number == "float32":
        return None  # one number stands for all types, and models attend in 16 bits
    return efficiency_name(device.counted_as, op_class, _dtype(record), phase == "backward")


def _fastest(records: Iterable[Measurement]) -> Iterable[Measurement]:
    """Yield of attention the fastest backend of each shape; everything else as it is."""
    best: dict[tuple[object, ...], Measurement] = {}
    for record in records:
        if record.backend is None or record.kind != "scaled_dot_product_attention":
            yield record
            continue
        forward = record.parts["forward"]
        key = record.number, forward.flops, forward.moved_bytes, record.share
        if key not in best or forward.seconds < best[key].parts["forward"].seconds:
            best[key] = record
    yield from best.values()


# --------------------------------------------------------------------------------------------------
# CPU workers


def worker_rates(calibration: Calibration, workers: int = 1) -> MeasuredRates:
    """Return the rates of ``workers`` workers; with more workers than cores each has a part of a core.

    Raises ``ValueError`` where the calibration lacks a record that they rest on.
    """
    records, slowdown = calibration.records, max(1.0, workers / calibration.machine.count)
    missing = {"copy", "host", "product float32"} - records.keys()
    if missing:
        raise ValueError(f"expected records of {', '.join(sorted(missing))}")
    copied, costs = records["copy"].parts["forward"], records["host"].values
    latency, link = _link(records) or (None, None)
    times = _op_times(calibration)
    curves = {kind: records[f"{kind} x2"].values for kind in _COLLECTIVES if f"{kind} x2" in records}
    return MeasuredRates(
        flops_per_second={
            record.number: record.parts["forward"].flops / record.parts["forward"].seconds / slowdown
            for record in records.values()
            if record.kind == "product"
        },
        memory_bandwidth_bytes_per_second=copied.moved_bytes / copied.seconds / slowdown,
        op_times=times.slower(slowdown) if slowdown > 1.0 else times,
        link_bandwidth_bytes_per_second=link,
        link_latency_seconds=latency,
        host_costs=HostSpec.model_validate(
            {
                "contention": costs.get("contention", 1.0),
                "compute_overhead": costs["compute_seconds"] * slowdown,
                "send_overhead": costs.get("send_seconds", 0.0) * slowdown,
                "receive_overhead": costs.get("receive_seconds", 0.0) * slowdown,
                "collectives": [
                    {"kind": kind, "measured": [(size, s * slowdown) for size, s in by_size(curve)]}
                    for kind, curve in curves.items()
                ],
            }
        ),
    )


def _op_times(calibration: Calibration) -> OpTimes:
    """Fit the cost of every kind and phase that was measured, and of the optimizers."""
    samples: defaultdict[tuple[str, Phase], list[OpSample]] = defaultdict(list)
    for record in calibration.records.values():
        if record.kind not in ("product", "copy"):
            for phase, part in record.parts.items():
                samples[record.kind, cast("Phase", phase)].append(
                    (part.flops, part.moved_bytes, part.seconds)
                )
    if (STANDS_FOR_ALL, "forward") not in samples:
        raise ValueError(f'expected records of the kind "{STANDS_FOR_ALL}"')
    costs: list[tuple[tuple[str, Phase], Cost]] = [
        (key, fit_line(points) if key[0] in ARITHMETIC else fit_curve(points))
        for key, points in samples.items()
    ]
    costs += [((GENERIC, phase), cost) for (kind, phase), cost in costs if kind == STANDS_FOR_ALL]
    return OpTimes(tuple(sorted((*costs, *_optimizers(calibration)), key=lambda item: item[0])))


def fit_curve(samples: Sequence[OpSample]) -> CostCurve:
    """Lay a curve through the samples, by bytes; more bytes never take less time."""
    points: dict[float, float] = {}
    for _, moved, seconds in samples:
        points[max(1.0, moved)] = seconds
    longest = 0.0
    rising = []
    for moved in sorted(points):
        longest = max(longest, points[moved])
        rising.append((float(moved), longest))
    return CostCurve(tuple(rising))


def fit_line(samples: Sequence[OpSample]) -> CostLine:
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


# --------------------------------------------------------------------------------------------------
# Both


def _optimizers(calibration: Calibration) -> list[tuple[tuple[str, Phase], Cost]]:
    """Return the cost of each optimizer's step in torch's own way, sorted by name."""
    way = DEFAULT_WAY[calibration.machine.kind]
    lines = {
        record.kind: CostLine(record.values["seconds_per_tensor"], 0.0, record.values["seconds_per_byte"])
        for record in calibration.records.values()
        if record.kind.startswith("optimizer ") and record.backend == way and record.unsupported is None
    }
    return [((kind, PHASES[0]), line) for kind, line in sorted(lines.items())]


def _link(records: Mapping[str, Measurement]) -> tuple[float, float] | None:
    """Return latency and bandwidth between two devices; None where there is one device."""
    messages = records.get("message x2")
    return None if messages is None else fit_latency(by_size(messages.values))


def by_size(values: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    """Return (bytes, seconds) of a link's record, by rising bytes."""
    return tuple(sorted((int(size), seconds) for size, seconds in values.items()))
