"""Sources of an epoch's batches: torch's DataLoader over samples with indices, or over a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from numbers import Number
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from cost_models.errors import UsageError
from partitioner.batches.order import BatchOrder, Draw, batch_seed, drawing
from partitioner.batches.part_batch import AbsentBatch, DataPlace, PartBatch
from passes.graph.graph import OpGraph
from runtime.execute.execute import Executor

BatchSource = Callable[[int, int], Iterator[Any]]
"""A function (epoch, number of a batch) -> the batches of that epoch from that one on."""

_END: Any = object()


def reported(source: BatchSource, executor: Executor) -> BatchSource:
    """Return ``source`` such that what loading raises on one rank is told to the others, who wait in the next step."""

    def batches(epoch: int, first: int) -> Iterator[Any]:
        with executor.reported():
            found = source(epoch, first)
        while True:
            with executor.reported():
                batch = next(found, _END)
            if batch is _END:
                return
            yield batch

    return batches


class Counted:
    """Stand-ins of the right sizes, for a rank that reads nothing."""

    def __init__(self, order: BatchOrder, place: DataPlace, graph: OpGraph) -> None:
        self._order, self._place, self._graph = order, place, graph

    def __call__(self, epoch: int, first: int) -> Iterator[AbsentBatch]:
        # Counted, not drawn: an order costs memory, and a sampler of the user's may look at the data.
        for samples in map(self._order.samples, range(first, len(self._order))):
            yield AbsentBatch(samples, self._graph, in_parts=bool(self._place.sizes(samples)))


class Indexed:
    """Batches of a dataset with indices, or their parts at ``place``."""

    def __init__(
        self,
        dataset: Any,
        order: BatchOrder,
        place: DataPlace,
        collate: Callable[[list[Any]], Any],
        options: Mapping[str, Any],
    ) -> None:
        self._order, self._place = order, place
        self._upcoming = _Upcoming(order, place)
        made: Any = DataLoader  # options are the user's
        self._loader = made(
            _Fetching(dataset, collate),
            batch_sampler=self._upcoming,
            collate_fn=_unchanged,
            # A generator for workers' seeds: the script's own would move on, and more often in a resumed run.
            **{**options, "generator": torch.Generator()},
        )

    def __call__(self, epoch: int, first: int) -> Iterator[Any]:
        self._upcoming.epoch, self._upcoming.first = epoch, first
        for number, batch in enumerate(self._loader, first):
            samples = self._order.samples(number)
            yield PartBatch(batch, samples, self._place) if self._place.sizes(samples) else batch


class _Upcoming:
    """The batch sampler that torch's loader sees: the draws of one epoch, from one batch on."""

    def __init__(self, order: BatchOrder, place: DataPlace) -> None:
        self._order, self._place = order, place
        self.epoch = self.first = 0

    def __iter__(self) -> Iterator[Draw]:
        return self._order.draws(self.epoch, self.first, self._place)


class _Fetching:
    """The dataset that torch's loader sees: one draw becomes one collated batch, random numbers included."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self._dataset, self._collate = dataset, collate

    def __getitems__(self, draw: Draw) -> Any:
        with drawing(draw.seed):
            if callable(getattr(self._dataset, "__getitems__", None)):
                samples = self._dataset.__getitems__(draw.indices)
            else:
                samples = [self._dataset[index] for index in draw.indices]
            return self._collate(samples)


class Stream:
    """Batches of an iterable dataset, which every rank goes through; all end together or all raise."""

    def __init__(
        self, executor: Executor, dataset: Any, order: BatchOrder, options: Mapping[str, Any]
    ) -> None:
        self._executor, self._seed = executor, order.seed
        self._generator = torch.Generator()
        self._dataset = dataset
        made: Any = DataLoader
        self._loader = made(
            dataset,
            batch_size=order.batch_size,
            drop_last=order.drop_last,
            generator=self._generator,
            **options,
        )

    def __call__(self, epoch: int, first: int) -> Iterator[Any]:
        self._generator.manual_seed(batch_seed(self._seed, epoch, -1))  # of worker processes
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)
        with drawing(batch_seed(self._seed, epoch, -1)):
            batches = iter(self._loader)
        number = 0
        while True:
            with drawing(batch_seed(self._seed, epoch, number)):
                batch = next(batches, _END)
            self._refuse_other_end(number, batch is _END)
            if batch is _END:
                return
            if number >= first:  # before: replayed, a stream cannot jump
                yield batch
            number += 1

    def _refuse_other_end(self, number: int, ended: bool) -> None:
        """Raise UsageError on every rank where some ranks have a batch and others have none."""
        collectives = self._executor.collectives
        if len(collectives.ranks) < 2:
            return
        mine = torch.zeros(len(collectives.ranks), device=collectives.device)
        mine[self._executor.program.rank] = float(ended)
        over = collectives.all_reduce(mine, f"batch {number} of the data").wait().tolist()
        if 0 < sum(over) < len(over):
            raise UsageError(
                "the dataset has more batches on some ranks than on others",
                [
                    f"rank {rank} {'has no batch' if none else 'has a batch'} {number}"
                    for rank, none in enumerate(over)
                ],
                ["give the same data on every rank: the engine takes the whole batch everywhere"],
            )


def collate_numbers(samples: list[Any]) -> Any:
    """Collate as torch's ``default_collate`` does, but make a sample's list of numbers a tensor; torch turns it inside out.

    [{"tokens": [1, 2, 3]}, {"tokens": [4, 5, 6]}]  ->  {"tokens": tensor of shape (2, 3)}
    """
    return default_collate([_tensors_of(sample) for sample in samples])


def _tensors_of(sample: Any) -> Any:
    if isinstance(sample, Mapping):
        return {key: _as_tensor(value) for key, value in sample.items()}
    return sample


def _as_tensor(value: Any) -> Any:
    """Return a list (of lists) of numbers as a tensor; anything else as it is."""
    inner = value
    while isinstance(inner, list) and inner:
        inner = inner[0]
    return torch.tensor(value) if inner is not value and isinstance(inner, Number) else value


def _unchanged(batch: Any) -> Any:
    return batch
