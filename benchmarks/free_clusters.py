"""Clusters of unlike devices: rank 0 is three times as fast as each of the others, in everything.

    gpu-4, gpu-2    an H100 and others of a third its rates; a card of 400 Gb/s for each
    cpu-4, cpu-2    a laptop with four cores' speed and others of a third, over Ethernet of 1 Gb/s
    gpu-8           four H100 and four of a third (for the scaling)

``slow-*`` are for verification: rates so small that even tiny models are worth dividing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cost_models.cluster import ClusterSpec
from cost_models.spec.presets import DEVICES

TIMES = 3.0
"""How many times as fast the fast devices are."""


def _third(preset: str) -> dict[str, Any]:
    """The preset, three times as slow in everything: rates, memory bandwidth, launches. Its memory is the same."""
    device = DEVICES[preset]
    return {
        "name": f"third-of-{preset}",
        "kind": device["kind"],
        "memory": device["memory"],
        **{key: device[key] for key in ("memory_context",) if key in device},
        "memory_bandwidth": f"{_number(device['memory_bandwidth'], 'GB/s') / TIMES:.1f}GB/s",
        "flops": {dtype: f"{_number(rate, 'T') / TIMES:.3f}T" for dtype, rate in device["flops"].items()},
        "launch_overhead": f"{_number(device['launch_overhead'], 'us') * TIMES:g}us",
    }


def _number(text: str, unit: str) -> float:
    if not text.endswith(unit):
        raise ValueError(f"{text} is not in {unit}")
    return float(text.removesuffix(unit))


def _cpu(speed: float) -> dict[str, Any]:
    """A worker of ``speed`` hundred GFLOP/s in float32: all cores of a processor."""
    return {
        "name": f"cpu-{speed * 100:.0f}G",
        "kind": "cpu",
        "memory": "16GiB",
        "memory_bandwidth": f"{12 * speed:g}GB/s",
        "flops": {
            "float64": f"{50 * speed:g}G",
            "float32": f"{100 * speed:g}G",
            "bfloat16": f"{100 * speed:g}G",
        },
        "launch_overhead": f"{6 / speed:g}us",
    }


def _slow(speed: float) -> dict[str, Any]:
    return {
        "name": f"slow-{speed:g}M",
        "kind": "cpu",
        "memory": "8GiB",
        "memory_bandwidth": f"{speed:g}MB/s",
        "flops": {"float64": f"{10 * speed:g}M", "float32": f"{20 * speed:g}M"},
        "launch_overhead": f"{6 / speed:g}us",
    }


def _cluster(
    name: str, fast: object, slow: object, counts: tuple[int, int], link: Mapping[str, str]
) -> ClusterSpec:
    """``counts``: fast and slow devices. Every pair is joined by ``link``."""
    nodes = [
        {"name": word, "count": count, "device": device, "links": {"default": dict(link)}}
        for word, count, device in (("fast", counts[0], fast), ("slow", counts[1], slow))
    ]
    network = {**link, "per": "device"}
    return ClusterSpec.from_dict({"name": name, "nodes": nodes, "network": network}, source=name)


def clusters() -> dict[str, ClusterSpec]:
    """All of them, by name."""
    card = {"bandwidth": "400Gb/s", "latency": "9.6us"}
    ethernet = {"bandwidth": "1Gb/s", "latency": "100us"}
    quick = {"bandwidth": "10GB/s", "latency": "1us"}
    third = _third("H100-80GB")
    found = [
        *(_cluster(f"gpu-{n}", "H100-80GB", third, (1, n - 1), card) for n in (4, 2)),
        *(_cluster(f"cpu-{n}", _cpu(3), _cpu(1), (1, n - 1), ethernet) for n in (4, 2)),
        _cluster("gpu-8", "H100-80GB", third, (4, 4), card),
        *(_cluster(f"slow-{n}", _slow(30), _slow(10), (1, n - 1), quick) for n in (4, 2)),
    ]
    return {cluster.name: cluster for cluster in found}
