"""The order of samples in batches: the same on every rank, another one every epoch, any batch at once.

    samples 0 … 9, batches of 4, shuffled     epoch 0   [4 1 7 5]   [0 8 2 9]   [6 3]
                                              epoch 1   [7 0 4 8]   [3 1 5 2]   [9 6]
    part 0 of 2 (``batches.part_batch``)      epoch 0   [4 1]       [0 8]       [6]
    part 1 of 2                               epoch 0   [7 5]       [2 9]       [3]

The order is a function of (seed, epoch) alone, and each batch has a seed of its own, a function of (seed, epoch, number)
and of the part, where it is one: whatever a dataset or a collate function draws at random (augmentation, masked words) is
the same on every rank that loads it, in every worker process, and in a resumed run.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from cost_models.errors import UsageError
from partitioner.batches.part_batch import DataPlace
from runtime.ops.random import mix

_ORDER, _BATCH = 1, 2
"""The purposes of seeds: an epoch's order, and what is random in a batch."""


@dataclass(frozen=True)
class Draw:
    """The samples of one batch (or of a part of it), and the seed of what is random in them."""

    indices: Sequence[Any]
    seed: int


@dataclass(frozen=True)
class BatchOrder:
    """The batches of every epoch. ``length``: samples in the dataset; with ``sampler``, as many as it yields.

    It is None where that is not known: of iterable datasets, and on ranks that were given none.
    """

    length: int | None
    batch_size: int
    shuffle: bool = False
    seed: int = 0
    drop_last: bool = False
    sampler: Iterable[Any] | None = None

    def __len__(self) -> int:
        """Count the batches in an epoch. Raises TypeError for iterable datasets without a length."""
        if self.length is None:
            raise TypeError("an iterable dataset has no length")
        full, rest = divmod(self.length, self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def samples(self, number: int) -> int:
        """Count the samples in batch ``number``."""
        assert self.length is not None
        return min(self.batch_size, self.length - number * self.batch_size)

    def draws(self, epoch: int, first: int = 0, part: DataPlace | None = None) -> Iterator[Draw]:
        """Yield the batches of ``epoch`` from number ``first``, or a part of each."""
        order = self._order(epoch)
        for number in range(first, len(self)):
            start, samples, seed = (
                number * self.batch_size,
                self.samples(number),
                batch_seed(self.seed, epoch, number),
            )
            if part is None or not part.sizes(samples):
                yield Draw(_taken(order, start, start + samples), seed)
                continue
            spans = [_taken(order, start + begin, start + end) for begin, end in part.spans(samples)]
            yield Draw(list(itertools.chain(*spans)), mix(seed, part.rank))

    def settings(self) -> dict[str, Any]:
        """Return what decides the batches, as plain numbers."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "sampler"}

    def _order(self, epoch: int) -> Any:
        assert self.length is not None
        if self.sampler is not None:
            if hasattr(self.sampler, "set_epoch"):
                self.sampler.set_epoch(epoch)
            with drawing(mix(self.seed, epoch, _ORDER)):
                order = list(self.sampler)
            if len(order) != self.length:
                raise UsageError(f"the sampler yielded {len(order)} indices, its length is {self.length}")
            return order
        if self.shuffle:
            generator = torch.Generator().manual_seed(mix(self.seed, epoch, _ORDER))
            return torch.randperm(self.length, generator=generator)
        return range(self.length)


def _taken(order: Any, start: int, end: int) -> Sequence[Any]:
    taken = order[start:end]
    return taken.tolist() if isinstance(taken, torch.Tensor) else list(taken)


def batch_seed(seed: int, epoch: int, number: int) -> int:
    """Return the seed of what is drawn at random while batch ``number`` of ``epoch`` is made."""
    return mix(seed, epoch, _BATCH, number)


@contextmanager
def drawing(seed: int) -> Iterator[None]:
    """Draw random numbers of torch (on the CPU), Python and numpy from ``seed``; afterwards they are as before."""
    before = torch.default_generator.get_state(), random.getstate(), np.random.get_state()
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    try:
        yield
    finally:
        torch.default_generator.set_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])
