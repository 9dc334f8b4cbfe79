"""Rates of a device from its measurements, in the words of the cost model (``cost_models.compute``).

    t = k + s·W / (P · e) + Q / (B · e_memory)     seconds of a kernel

    k           the time of the smallest kernel
    e_memory    median of Q / (B · (t - k)) of large ops that only move bytes
    e           median of s·W / (P · (t - k - Q / (B · e_memory))) of the ops of a class, with P the data sheet's peak

Only what arithmetic dominates counts towards an e: where it takes less than half of t, an error in the rest would be all
of it. Of attention the fastest backend counts, which is what ``scaled_dot_product_attention`` takes. A part of more than 1
is cut to 1.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import torch

from cost_models.cluster import ClusterSpec
from cost_models.compute import OpClass, efficiency_name
from cost_models.devices import Device
from cost_models.errors import ClusterError
from cost_models.gpu.profile import GpuProfile, Measured
from cost_models.measure_links import fit_latency
from cost_models.op_profile import CostLine, OpTimes
from cost_models.rates import MeasuredRates

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
_DEFAULT_WAY = "foreach"
"""The way in which torch.optim steps on a GPU if nobody says anything."""


class Fitted(NamedTuple):
    """Rates of a device, and how many measurements each part of them rests on."""

    rates: MeasuredRates
    samples: Mapping[str, int]


def fit(profile: GpuProfile, device: Device, names: Collection[str] | None = None) -> Fitted:
    """Fit rates for ``device``, whose peaks are the data sheet's. ``names``: the records that arithmetic is fitted to."""
    records = {n: r for n, r in profile.records.items() if r.unsupported is None}
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
    latency, link = _link(records)
    rates = MeasuredRates(
        efficiency=efficiency or None,
        launch_overhead_seconds=statistics.mean(launches) if launches else None,
        kernel_overhead_seconds=kernel if overheads else None,
        op_times=_optimizers(records),
        link_bandwidth_bytes_per_second=link,
        link_latency_seconds=latency,
    )
    samples = {name: len(found) for name, found in shares.items()}
    return Fitted(rates, {**samples, "memory": len(moving), "link": int(link is not None)})


def calibrated(
    cluster: ClusterSpec, profile: GpuProfile, names: Collection[str] | None = None
) -> ClusterSpec:
    """Return the cluster with the GPUs that were measured at their measured rates."""
    model = calibrated_model(cluster, profile)
    like = next(device for device in cluster.devices if device.model == model)
    provenance = f"calibration of {profile.date} on {profile.machine.card}, torch {profile.machine.torch}"
    return cluster.with_device_rates(fit(profile, like, names).rates, provenance, model)


def calibrated_model(cluster: ClusterSpec, profile: GpuProfile) -> str:
    """Return the model of the cluster's devices that the profile is of: the only one, or the one called like the card."""
    kinds = sorted({device.model for device in cluster.devices if device.kind == "cuda"})
    found = kinds if len(kinds) == 1 else [model for model in kinds if _is_card(profile, model)]
    if len(found) != 1:
        raise ClusterError(
            f"cannot give {cluster.name} the rates of {profile.machine.card}",
            [f"it has {', '.join(kinds) or 'no GPU'}"],
            ["give a cluster of this card, such as H100-80GB:1"],
        )
    return found[0]


def _is_card(profile: GpuProfile, model: str) -> bool:
    """Tell whether "H100-80GB" is the card that calls itself "NVIDIA H100 80GB HBM3"."""
    return all(word in profile.machine.card for word in model.split("-"))


def _dtype(record: Measured) -> torch.dtype:
    return getattr(torch, record.number)  # type: ignore[no-any-return]


def _efficiency_of(record: Measured, phase: str, device: Device) -> str | None:
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
    return efficiency_name(device.kind, op_class, _dtype(record), phase == "backward")


def _fastest(records: Iterable[Measured]) -> Iterable[Measured]:
    """Yield of attention the fastest backend of each shape; everything else as it is."""
    best: dict[tuple[object, ...], Measured] = {}
    for record in records:
        if record.backend is None or record.kind != "scaled_dot_product_attention":
            yield record
            continue
        forward = record.parts["forward"]
        key = record.number, forward.flops, forward.moved_bytes, record.share
        if key not in best or forward.seconds < best[key].parts["forward"].seconds:
            best[key] = record
    yield from best.values()


def _optimizers(records: Mapping[str, Measured]) -> OpTimes | None:
    """Return the cost of each optimizer's step in torch's own way."""
    lines = {
        record.kind: CostLine(record.values["seconds_per_tensor"], 0.0, record.values["seconds_per_byte"])
        for record in records.values()
        if record.kind.startswith("optimizer ") and record.backend == _DEFAULT_WAY
    }
    return (
        OpTimes(tuple(((kind, "forward"), line) for kind, line in sorted(lines.items()))) if lines else None
    )


def _link(records: Mapping[str, Measured]) -> tuple[float | None, float | None]:
    """Return latency and bandwidth between two devices; None where there is one device."""
    found = records.get("message x2")
    if found is None:
        return None, None
    return fit_latency(tuple(sorted((int(size), seconds) for size, seconds in found.values.items())))
