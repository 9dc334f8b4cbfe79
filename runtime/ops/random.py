"""Random numbers of a segment: the same for the same seed, whatever else a rank runs.

Every forward that draws random numbers (dropout) runs with a seed made of (seed, step, segment, micro-batch);
afterwards the generator is as it was before. Which micro-batch a rank runs when, and what ran before it, thus
do not change the masks. Another partition has other segments, so its masks differ.

Ranks that run one segment together have the same seed: what they all compute, they draw alike. Ops that they run on
shards draw from seeds of their own (``runtime.ops.local``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

_MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """Return a 63-bit hash of ``numbers`` (chained splitmix64; Steele, Lea and Flood, 2014)."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state ^ number) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1


def generators_of(device: torch.device) -> list[torch.Generator]:
    """Return the generators that ops on ``device`` may draw from: the CPU's, and a GPU's own."""
    if device.type != "cuda":
        return [torch.default_generator]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]


@contextmanager
def seeded(generators: Sequence[torch.Generator], seed: int) -> Iterator[None]:
    """Seed ``generators`` meanwhile; restore them afterwards."""
    before = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)


class Seeded:
    """Random numbers for functions that run under a seed of their own."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed, self._generators = seed, generators_of(device)

    def run(
        self, step: int, segment: int, microbatch: int, function: Callable[[], Sequence[Any]]
    ) -> Sequence[Any]:
        """Call ``function`` with the generators seeded for this place in the training; restore them afterwards."""
        with seeded(self._generators, mix(self.seed, step, segment, microbatch)):
            return function()
