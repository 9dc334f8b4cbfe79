"""``engine.dataloader``: the same batches in the same order on every rank, loaded only where they are read.

rank 0   reads the tokens             loads every batch
rank 1   reads no input               gets an AbsentBatch: how many samples, nothing else
rank 2   reads the labels             loads every batch

loader = engine.dataloader(dataset, shuffle=True, seed=1)
for batch in loader:                          another order every epoch
    engine.train_step(batch)
engine.save(directory, extra={"loader": loader.state_dict()})

loader.load_state_dict(engine.load(directory)["loader"])         goes on with the next batch
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from numbers import Number
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate
from torch.utils.data.distributed import DistributedSampler

from cost_models.errors import UsageError
from partitioner.absent_batch import AbsentBatch
from partitioner.data_order import BatchOrder, Draw, Sampler, batch_seed, drawing, epoch_samples
from passes.graph import OpGraph
from runtime.execute import Executor
from runtime.side_group import SideGroup

_OURS = {
    "batch_sampler": "batches of one size make one order for all ranks: sampler=, shuffle= and batch_size=",
    "generator": "the order must be the same on every rank: seed=",
}
"""Options of torch's loader that would break the order, and what to use."""


@dataclass(frozen=True)
class Consumer:
    """What a loader knows of the engine that it loads for. ``batch_size``: the plan's."""

    executor: Executor
    graph: OpGraph
    side: SideGroup
    batch_size: int
    data_rank: int
    data_world: int


@dataclass(frozen=True)
class LoaderPlan:
    """What all ranks must agree on. ``length``: samples in an epoch; None for iterables, and where there is no dataset."""

    length: int | None
    iterable: bool
    batch_size: int
    shuffle: bool
    seed: int
    drop_last: bool
    reads: bool
    """Whether this rank loads; the one thing that may differ."""


class EngineDataLoader:
    """Yields batches for one engine. Made by ``engine.dataloader``; every rank iterates over its own, alike.

    Each ``for`` begins another epoch, except the first one after ``load_state_dict``, which goes on where the saved one
    was.
    """

    def __init__(self, plan: LoaderPlan, source: Callable[[int, int], Iterator[Any]]) -> None:
        self.epoch = 0
        """The number of the epoch that is under way, or of the next one."""
        self.position = 0
        """How many of its batches were yielded."""
        self._plan, self._source = plan, source
        self._loop: object | None = None

    def __len__(self) -> int:
        """Batches in an epoch. TypeError for iterable datasets without a length."""
        if self._plan.length is None:
            raise TypeError("an iterable dataset has no length")
        return len(_order_of(self._plan))

    def __iter__(self) -> Iterator[Any]:
        if self._loop is not None:  # the last loop was left early
            self.epoch, self.position = self.epoch + 1, 0
        loop = self._loop = object()
        for batch in self._source(self.epoch, self.position):
            self._refuse_other_loop(loop)
            self.position += 1
            yield batch
        self._refuse_other_loop(loop)
        self.epoch, self.position, self._loop = self.epoch + 1, 0, None

    def set_epoch(self, epoch: int) -> None:
        """The next ``for`` runs epoch ``epoch``, from its beginning unless it is the one that was resumed."""
        if self._loop is not None or epoch != self.epoch:
            self.epoch, self.position, self._loop = epoch, 0, None

    def state_dict(self) -> dict[str, Any]:
        """Where it is: plain numbers, for ``engine.save(extra=...)``."""
        return {"epoch": self.epoch, "position": self.position, **_order_fields(self._plan)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the batch after the last one that was yielded. Raises UsageError for a loader of other batches."""
        now = _order_fields(self._plan)
        other = [f"{name} was {state.get(name)}, now {value}" for name, value in now.items()]
        other = [
            text for text, (name, value) in zip(other, now.items(), strict=True) if state.get(name) != value
        ]
        if other:
            raise UsageError(
                "this data loader makes other batches than the one whose state was saved",
                other,
                ["make it as it was made then", "set_epoch(n) begins an epoch anew"],
            )
        self.epoch, self.position, self._loop = state["epoch"], state["position"], None

    def _refuse_other_loop(self, loop: object) -> None:
        if loop is not self._loop:
            raise UsageError(
                "another loop over this data loader has begun",
                ["a loader has one position, which checkpoints store"],
                ["make a second loader"],
            )


def make_loader(
    consumer: Consumer,
    dataset: Any,
    *,
    batch_size: int | None,
    shuffle: bool,
    seed: int | None,
    drop_last: bool,
    collate_fn: Callable[[list[Any]], Any] | None,
    pin_memory: bool | None,
    everywhere: bool,
    sampler: Sampler | None,
    options: Mapping[str, Any],
) -> EngineDataLoader:
    """See ``Engine.dataloader``. Collective."""
    reads = everywhere or bool(consumer.executor.leaf_names)

    def own() -> LoaderPlan:
        refuse_options(dataset, options, sampler, shuffle=shuffle)
        iterable = isinstance(dataset, IterableDataset)
        length = None if iterable or dataset is None else epoch_samples(dataset, sampler)
        size = consumer.batch_size if batch_size is None else batch_size
        own_seed = consumer.executor.seed if seed is None else seed
        return LoaderPlan(length, iterable, size, shuffle, own_seed, drop_last, reads)

    plan = agreed(consumer.side.agree("making a data loader", own), consumer.side.rank)
    collate = collate_fn or collate_numbers
    pinned = consumer.executor.device.type == "cuda" if pin_memory is None else pin_memory
    given = {**options, "pin_memory": pinned}
    if plan.iterable:
        stream = _Stream(consumer.executor, dataset, plan, {**given, "collate_fn": collate})
        return EngineDataLoader(plan, stream)
    order = _order_of(plan, sampler)
    place = consumer.data_rank, consumer.data_world
    if not plan.reads:

        def absent(epoch: int, first: int) -> Iterator[AbsentBatch]:
            quick = BatchOrder(order.length, order.batch_size, drop_last=order.drop_last)
            for draw in quick.draws(epoch, first, *place):
                yield AbsentBatch(len(draw.indices), consumer.graph)

        return EngineDataLoader(plan, absent)
    return EngineDataLoader(plan, _Indexed(dataset, order, place, collate, given))


class _Indexed:
    """Batches of a dataset with indices."""

    def __init__(
        self,
        dataset: Any,
        order: BatchOrder,
        place: tuple[int, int],
        collate: Callable[[list[Any]], Any],
        options: Mapping[str, Any],
    ) -> None:
        self._upcoming = _Upcoming(order, place)
        made: Any = DataLoader  # options are the user's
        self._loader = made(
            _Fetching(dataset, collate), batch_sampler=self._upcoming, collate_fn=_unchanged, **options
        )

    def __call__(self, epoch: int, first: int) -> Iterator[Any]:
        self._upcoming.epoch, self._upcoming.first = epoch, first
        return iter(self._loader)


class _Upcoming:
    """What torch's loader takes for a batch sampler: the draws of one epoch, from one batch on."""

    def __init__(self, order: BatchOrder, place: tuple[int, int]) -> None:
        self._order, self._place = order, place
        self.epoch = self.first = 0

    def __iter__(self) -> Iterator[Draw]:
        return self._order.draws(self.epoch, self.first, *self._place)


class _Fetching:
    """What torch's loader takes for a dataset: one draw becomes one collated batch, random numbers included."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self._dataset, self._collate = dataset, collate

    def __getitems__(self, draw: Draw) -> Any:
        with drawing(draw.seed):
            if callable(getattr(self._dataset, "__getitems__", None)):
                samples = self._dataset.__getitems__(draw.indices)
            else:
                samples = [self._dataset[index] for index in draw.indices]
            return self._collate(samples)


class _Stream:
    """Batches of an iterable dataset, which every rank goes through; all end together or all raise."""

    def __init__(
        self, executor: Executor, dataset: Any, plan: LoaderPlan, options: Mapping[str, Any]
    ) -> None:
        self._executor, self._plan = executor, plan
        self._generator = torch.Generator()
        self._dataset = dataset
        made: Any = DataLoader
        self._loader = made(
            dataset,
            batch_size=plan.batch_size,
            drop_last=plan.drop_last,
            generator=self._generator,
            **options,
        )

    def __call__(self, epoch: int, first: int) -> Iterator[Any]:
        seed = self._plan.seed
        self._generator.manual_seed(batch_seed(seed, epoch, -1))  # of worker processes
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)
        with drawing(batch_seed(seed, epoch, -1)):
            batches = iter(self._loader)
        number = 0
        while True:
            with drawing(batch_seed(seed, epoch, number)):
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


_END: Any = object()


def refuse_options(dataset: Any, options: Mapping[str, Any], sampler: Any, *, shuffle: bool) -> None:
    """Raise UsageError for what would make ranks load different batches."""
    problems = [f"{name} is not taken: {use}" for name, use in _OURS.items() if options.get(name) is not None]
    if isinstance(sampler, DistributedSampler):
        problems.append(
            "a DistributedSampler gives each rank other samples; all ranks train on the same batch here"
        )
    if sampler is not None and shuffle:
        problems.append("sampler= and shuffle=True are two orders")
    if isinstance(dataset, IterableDataset) and (shuffle or sampler is not None):
        problems.append("an iterable dataset makes its own order: no shuffle=True, no sampler=")
    if problems:
        raise UsageError("cannot make this data loader", problems)


def agreed(plans: list[LoaderPlan], rank: int) -> LoaderPlan:
    """This rank's plan, once all ranks' are seen to fit. Raises the same UsageError on every rank."""
    problems = []
    for name in (
        field.name for field in fields(LoaderPlan) if field.name not in ("reads", "length", "iterable")
    ):
        problems += _differences(name, {r: getattr(plan, name) for r, plan in enumerate(plans)})
    given = {r: plan for r, plan in enumerate(plans) if plan.iterable or plan.length is not None}
    problems += [
        f"rank {r} was given no dataset, and its part of the model reads inputs"
        for r, plan in enumerate(plans)
        if r not in given and (plan.reads or any(p.iterable for p in given.values()))
    ]
    problems += _differences("kind", {r: "iterable" if p.iterable else "by index" for r, p in given.items()})
    problems += _differences("samples", {r: plan.length for r, plan in given.items()})
    batch_size = plans[rank].batch_size
    if batch_size < 1:
        problems.append(f"batch_size is {batch_size}, expected 1 or more")
    if problems:
        raise UsageError(
            "cannot make this data loader",
            problems,
            ["give the same dataset and options on every rank; each loads only what it reads"],
        )
    length = next((plan.length for plan in given.values()), None)
    return LoaderPlan(**{**asdict(plans[rank]), "length": length})


def _differences(name: str, by_rank: Mapping[int, Any]) -> list[str]:
    if len(set(by_rank.values())) < 2:
        return []
    return [f"{name}: " + ", ".join(f"{value} on rank {rank}" for rank, value in by_rank.items())]


def _order_fields(plan: LoaderPlan) -> dict[str, Any]:
    return {name: value for name, value in asdict(plan).items() if name not in ("reads", "iterable")}


def _order_of(plan: LoaderPlan, sampler: Sampler | None = None) -> BatchOrder:
    assert plan.length is not None
    return BatchOrder(plan.length, plan.batch_size, plan.shuffle, plan.seed, plan.drop_last, sampler)


def collate_numbers(samples: list[Any]) -> Any:
    """torch's ``default_collate``, which would turn a sample's list of numbers inside out: here it is a tensor.

    [{"tokens": [1, 2, 3]}, {"tokens": [4, 5, 6]}]  ->  {"tokens": tensor of shape (2, 3)}
    """
    return default_collate([_tensors_of(sample) for sample in samples])


def _tensors_of(sample: Any) -> Any:
    if isinstance(sample, Mapping):
        return {key: _as_tensor(value) for key, value in sample.items()}
    return sample


def _as_tensor(value: Any) -> Any:
    """A list (of lists) of numbers as a tensor; anything else as it is."""
    inner = value
    while isinstance(inner, list) and inner:
        inner = inner[0]
    return torch.tensor(value) if inner is not value and isinstance(inner, Number) else value


def _unchanged(batch: Any) -> Any:
    return batch
