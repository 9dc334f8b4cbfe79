"""Blocks of parameters and buffers that ranks hold as tensors of their own, because an op was split into blocks.

    the model                            what ranks hold, a linear layer's neurons split 60/40
    fc1.weight   [100, 32]               fc1.weight#0 [60, 32]   fc1.weight#1 [40, 32]

Graphs, programs and ranks know the parts only; whatever leaves this process (state dicts, checkpoints, reports) has the
model's own names and shapes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from runtime.mesh.sharding import Block


@dataclass(frozen=True)
class StatePart:
    """``block`` of the model's tensor called ``whole``. The parts of a tensor do not overlap and leave nothing out."""

    whole: str
    block: Block


def part_name(whole: str, number: int) -> str:
    """The name of the ``number``-th part of a tensor."""
    return f"{whole}#{number}"


def names_of_parts(parts: Mapping[str, StatePart]) -> dict[str, tuple[str, ...]]:
    """The parts of every tensor that is held in parts, by its own name."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, part in parts.items():
        found[part.whole].append(name)
    return {whole: tuple(names) for whole, names in found.items()}
