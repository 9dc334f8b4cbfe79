"""A calibration as a person reads it: the machine, what was measured, and what it makes of the rates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from cost_models.measure.calibration import Calibration
from cost_models.measure.fit import Fitted, worker_rates
from cost_models.shown import printable
from cost_models.units import (
    counted,
    format_bandwidth,
    format_bytes,
    format_flops_rate,
    format_seconds,
    listed,
    percent,
)


def render_calibration(calibration: Calibration) -> str:
    """Write the machine, and the rates of its workers, or what was measured of its GPU."""
    lines = _of_workers(calibration) if calibration.workers is not None else _of_a_gpu(calibration)
    return printable("\n".join(lines))


def _of_workers(calibration: Calibration) -> Iterator[str]:
    machine, rates, costs = calibration.machine, worker_rates(calibration), calibration.records["host"].values
    products = ", ".join(
        f"{rate / 1e9:.0f} GFLOP/s {name}" for name, rate in (rates.flops_per_second or {}).items()
    )
    kinds = len({kind for (kind, _), _ in rates.op_times.costs}) if rates.op_times is not None else 0
    yield (
        f"{machine.card}, {machine.count} cores, torch {machine.torch}: "
        f"{counted(calibration.workers or 0, 'worker')} measured at once in {calibration.seconds:.1f} s"
    )
    yield f"  products   {products}; {costs.get('busy_slowdown', 1.0):.2f}x the time of a worker alone"
    yield f"  memory     {(rates.memory_bandwidth_bytes_per_second or 0) / 1e9:.1f} GB/s; {kinds} kinds of ops"
    host = rates.host_costs
    assert host is not None  # of workers
    if rates.link_latency_seconds is not None and rates.link_bandwidth_bytes_per_second is not None:
        yield (
            f"  link       {rates.link_latency_seconds * 1e6:.0f} us + bytes at "
            f"{rates.link_bandwidth_bytes_per_second / 1e9:.2f} GB/s; "
            f"computing beside it takes {host.contention:.2f}x"
        )
    yield (
        f"  host       {host.compute_overhead * 1e6:.0f} us per compute, "
        f"{host.send_overhead * 1e6:.0f} us per send, {host.receive_overhead * 1e6:.0f} us per receive"
    )


def _of_a_gpu(calibration: Calibration) -> Iterator[str]:
    """Write the best of each class and type, the overheads, memory and links."""
    machine, records = calibration.machine, calibration.records
    unsupported = sorted(name for name, record in records.items() if record.unsupported is not None)
    power = "" if machine.power_limit_watts is None else f", limited to {machine.power_limit_watts:.0f} W"
    yield (
        f"{machine.card}{power}, driver {machine.driver or 'unknown'}, "
        f"CUDA {machine.cuda or 'none'}, torch {machine.torch}"
    )
    yield (
        f"  measured    {counted(len(records) - len(unsupported), 'record')} in "
        f"{format_seconds(calibration.seconds)}; "
        f"{len(unsupported)} not supported" + (f": {listed(unsupported, 3)}" if unsupported else "")
    )
    best: defaultdict[str, list[tuple[float, str]]] = defaultdict(list)
    for name, record in records.items():
        for phase, part in record.parts.items():
            if record.kind in ("linear", "matmul", "conv2d", "scaled_dot_product_attention") and part.flops:
                kind = {"scaled_dot_product_attention": "attention"}.get(record.kind, record.kind)
                best[f"{kind} {record.number}"].append(
                    (record.share * part.flops / part.seconds, f"{name} {phase}")
                )
    for kind, rated in sorted(best.items()):
        rate, name = max(rated)
        yield f"  {kind:<20} at most {format_flops_rate(rate)} ({name})"
    overheads = records["overheads"].values if "overheads" in records else {}
    if overheads:
        parts = [f"{name.removesuffix('_seconds')} {format_seconds(s)}" for name, s in overheads.items()]
        yield f"  smallest op {', '.join(parts)}: the device's kernel, the host's forward and backward"
    memory = records["memory"].values if "memory" in records else {}
    if memory:
        yield f"  context     {format_bytes(memory['context_bytes'])} beside tensors"
    links = sorted(name for name, record in records.items() if record.kind == "link")
    yield f"  links       {listed(links) if links else 'not measured: they take two GPUs; defaults hold'}"


def render_rates(fitted: Fitted, model: str) -> str:
    """Write the rates that a cluster of ``model`` gets."""
    rates, lines = fitted.rates, [f"{model} with these rates:"]
    for name, part in sorted((rates.efficiency or {}).items()):
        lines.append(
            f"  {name:<20} {percent(part)} of the data sheet's rate ({counted(fitted.samples[name], 'measurement')})"
        )
    for name, seconds in (
        ("launch overhead", rates.launch_overhead_seconds),
        ("kernel overhead", rates.kernel_overhead_seconds),
        ("link latency", rates.link_latency_seconds),
    ):
        if seconds is not None:
            lines.append(f"  {name:<20} {format_seconds(seconds)}")
    if rates.link_bandwidth_bytes_per_second is not None:
        lines.append(f"  {'link':<20} {format_bandwidth(rates.link_bandwidth_bytes_per_second)}")
    return "\n".join(lines)
