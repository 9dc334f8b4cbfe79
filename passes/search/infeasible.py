"""Shortfalls in words: which device lacks how much memory. Every search that finds nothing that fits says it so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import fx

from cost_models.devices import Device
from cost_models.units import format_bytes
from passes.graph.graph import OpGraph
from passes.graph.nodes import op_name
from passes.shard.words import operands

MOST_WHOLE = 3
"""Lines whose ops are held whole that are named."""
MOST_ROWS = 8
"""Devices that are named; more are counted."""


def overflow_bytes(peak_bytes: Iterable[float], devices: Sequence[Device]) -> int:
    """Bytes beyond the room of the fullest device, of the peak per rank; 0 or less if all fit."""
    return int(max(peak - device.room_bytes for peak, device in zip(peak_bytes, devices, strict=True)))


def shortfalls(needed_bytes: Iterable[tuple[int, int]], devices: Sequence[Device]) -> list[str]:
    """Say of each (rank, bytes needed) that does not fit by how much."""
    rows = []
    for rank, size in needed_bytes:
        device = devices[rank]
        short = size - device.room_bytes
        if short > 0:
            rows.append(
                f"rank {rank} ({device.model}) needs {format_bytes(size)}, has {room_text(device)}: "
                f"{format_bytes(short)} short ({short:,} bytes)"
            )
    more = [f"… and {len(rows) - MOST_ROWS} more devices"] if len(rows) > MOST_ROWS else []
    return [*rows[:MOST_ROWS], *more]


def room_text(device: Device) -> str:
    """Write "78.1 GiB", or "room for 55.7 of 78.1 GiB" where predictions may not fill it."""
    memory = format_bytes(device.memory_bytes)
    return memory if device.room_share == 1.0 else f"room for {format_bytes(device.room_bytes)} of {memory}"


def held_whole(graph: OpGraph, names: Iterable[str]) -> list[str]:
    """Say which ops (by name) are held whole since no other way is known, with the most parameters first.

    What follows from that holds for the ways that are known, and is no proof about the model.
    """
    lines: dict[str, int] = {}
    parameters = {
        given.node: graph.parameters[given.name] for given in graph.inputs if given.kind == "parameter"
    }
    for node in (graph.nodes[name] for name in names):
        text = f"`{op_words(node)}` at {node.meta.get('source') or node.name}"
        read = [parameters[source.name] for source in operands(node) if source.name in parameters]
        lines[text] = lines.get(text, 0) + sum(spec.elements * spec.dtype.itemsize for spec in read)
    first = sorted(lines.items(), key=lambda line: -line[1])[:MOST_WHOLE]
    said = [
        f"{text}, which reads {format_bytes(size)} of parameters" if size else text for text, size in first
    ]
    more = [f"{len(lines) - MOST_WHOLE} more lines"] if len(lines) > MOST_WHOLE else []
    return [f"no other way is known than to run whole: {'; '.join([*said, *more])}"] if said else []


def op_words(node: fx.Node) -> str:
    """Name an op as people know it: ``embedding_bag``, ``opaque(encoder)``."""
    return op_name(node) if isinstance(node.target, torch._ops.OpOverload) else str(node.target)
