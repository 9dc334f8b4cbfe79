"""Shortfalls in words: which device lacks how much memory. Every search that finds nothing that fits says it so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cost_models.devices import Device
from cost_models.units import format_bytes

MOST_ROWS = 8
"""Devices that are named; more are counted."""


def overflow_bytes(peak_bytes: Iterable[float], devices: Sequence[Device]) -> int:
    """Bytes that do not fit the fullest device, of the peak per rank; 0 or less if all fit."""
    return int(max(peak - device.memory_bytes for peak, device in zip(peak_bytes, devices, strict=True)))


def shortfalls(needed_bytes: Iterable[tuple[int, int]], devices: Sequence[Device]) -> list[str]:
    """Say of each (rank, bytes needed) that does not fit by how much."""
    rows = []
    for rank, size in needed_bytes:
        device = devices[rank]
        short = size - device.memory_bytes
        if short > 0:
            rows.append(
                f"rank {rank} ({device.model}) needs {format_bytes(size)}, has {format_bytes(device.memory_bytes)}: "
                f"{format_bytes(short)} short ({short:,} bytes)"
            )
    more = [f"… and {len(rows) - MOST_ROWS} more devices"] if len(rows) > MOST_ROWS else []
    return [*rows[:MOST_ROWS], *more]
