"""A GPU's profile as a person reads it: the machine, what was measured, and what it makes of the rates."""

from __future__ import annotations

from collections import defaultdict

from cost_models.gpu.fit import Fitted
from cost_models.gpu.profile import GpuProfile
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


def render_profile(profile: GpuProfile) -> str:
    """Write the machine, the best of each class and type, the overheads, memory and links."""
    machine, records = profile.machine, profile.records
    unsupported = sorted(name for name, record in records.items() if record.unsupported is not None)
    power = "" if machine.power_limit_watts is None else f", limited to {machine.power_limit_watts:.0f} W"
    lines = [
        f"{machine.card}{power}, driver {machine.driver or 'unknown'}, "
        f"CUDA {machine.cuda or 'none'}, torch {machine.torch}",
        f"  measured    {counted(len(records) - len(unsupported), 'record')} in {format_seconds(profile.seconds)}; "
        f"{len(unsupported)} not supported" + (f": {listed(unsupported, 3)}" if unsupported else ""),
    ]
    best: defaultdict[str, list[tuple[float, str]]] = defaultdict(list)
    for name, record in records.items():
        for phase, part in record.parts.items():
            if record.kind in ("linear", "matmul", "conv2d", "scaled_dot_product_attention") and part.flops:
                kind = {"scaled_dot_product_attention": "attention"}.get(record.kind, record.kind)
                best[f"{kind} {record.number}"].append(
                    (record.share * part.flops / part.seconds, f"{name} {phase}")
                )
    for kind, found in sorted(best.items()):
        rate, name = max(found)
        lines.append(f"  {kind:<20} at most {format_flops_rate(rate)} ({name})")
    overheads = records["overheads"].values if "overheads" in records else {}
    if overheads:
        parts = [f"{name.removesuffix('_seconds')} {format_seconds(s)}" for name, s in overheads.items()]
        lines.append(
            f"  smallest op {', '.join(parts)}: the device's kernel, the host's forward and backward"
        )
    memory = records["memory"].values if "memory" in records else {}
    if memory:
        lines.append(f"  context     {format_bytes(memory['context_bytes'])} beside tensors")
    links = sorted(name for name, record in records.items() if record.kind == "link")
    lines.append(
        f"  links       {listed(links)}"
        if links
        else "  links       not measured: they take two GPUs; defaults hold"
    )
    return printable("\n".join(lines))


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
