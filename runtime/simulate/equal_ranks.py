"""Ranks of a simulated step that do the same at the same times: one of them tells what all of them do."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from runtime.program.program import ReduceGradients
from runtime.simulate.simulate import Simulation, Span


def equal_ranks(simulation: Simulation) -> list[tuple[int, ...]]:
    """Group the ranks that do anything: equal spans, and equal memory over time. By the first rank of each group.

    Sums of gradients count as equal where they sum the same parameters at the same time, each on ranks of its own.
    """
    found: dict[Hashable, list[int]] = {}
    for rank, spans in enumerate(simulation.timeline):
        if spans:
            memory = tuple(
                (curve.seconds.tobytes(), curve.bytes_held.tobytes())
                for curve in simulation.memory[rank : rank + 1]
            )
            found.setdefault((tuple(_alike(spans)), memory), []).append(rank)
    return [tuple(ranks) for ranks in found.values()]


def _alike(spans: tuple[Span, ...]) -> Iterator[Hashable]:
    for start, end, instruction in spans:
        if isinstance(instruction, ReduceGradients):
            yield start, end, instruction.parameters, instruction.scattered
        else:
            yield start, end, instruction
