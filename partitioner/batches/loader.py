"""``engine.dataloader``: the same batches in the same order on every rank, loaded only where they are read.

rank 0   reads the tokens             loads every batch
rank 1   reads no input               gets an AbsentBatch: how many samples, nothing else
rank 2   reads the labels             loads every batch

loader = engine.dataloader(dataset, shuffle=True, seed=1)
for batch in loader:                                             another order every epoch
    engine.train_step(batch)
engine.save(directory, extra={"loader": loader.state_dict()})

loader.load_state_dict(engine.load(directory)["loader"])         goes on with the next batch
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import IterableDataset
from torch.utils.data.distributed import DistributedSampler

from cost_models.errors import UsageError
from partitioner.batches.order import BatchOrder
from partitioner.batches.part_batch import DataPlace
from partitioner.batches.sources import BatchSource, Counted, Indexed, Stream, collate_numbers, reported
from passes.graph.graph import OpGraph
from runtime.execute.execute import Executor
from runtime.ranks.side_group import SideGroup

_OURS = {
    "batch_sampler": "batches of one size make one order for all ranks: sampler=, shuffle= and batch_size=",
    "generator": "the order must be the same on every rank: seed=",
}
"""Options of torch's loader that would break the order, and what to use instead."""


@dataclass(frozen=True)
class LoaderWish:
    """The loader that a rank would make. ``order``: without its sampler; ranks must agree on it, and on ``parts``."""

    order: BatchOrder
    iterable: bool
    reads: bool
    """True if this rank loads; the one thing that may differ."""
    parts: bool
    """True if ranks load parts of batches, those that they read."""


@dataclass(frozen=True)
class Consumer:
    """The engine that a loader loads for, as far as the loader knows it."""

    executor: Executor
    graph: OpGraph
    side: SideGroup
    place: DataPlace


class EngineDataLoader:
    """Yields batches for one engine. Made by ``engine.dataloader``; every rank iterates over its own, alike.

    Each ``for`` begins another epoch, except the first one after ``load_state_dict``, which goes on where the saved one
    was.
    """

    def __init__(self, order: BatchOrder, source: BatchSource) -> None:
        self.epoch = 0
        """The number of the epoch that is under way, or of the next one."""
        self.position = 0
        """The number of its batches that were yielded."""
        self._order, self._source = order, source
        self._loop: object | None = None

    def __len__(self) -> int:
        """Count the batches in an epoch. Raises TypeError for iterable datasets without a length."""
        return len(self._order)

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
        """Let the next ``for`` run epoch ``epoch``, from its beginning unless it is the one that was resumed."""
        if self._loop is not None or epoch != self.epoch:
            self.epoch, self.position, self._loop = epoch, 0, None

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position as plain numbers, for ``engine.save(extra=...)``."""
        return {"epoch": self.epoch, "position": self.position, **self._order.settings()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the batch after the last one that was yielded. Raises UsageError for a loader of other batches."""
        other = [
            f"{name} was {state.get(name)}, now {value}"
            for name, value in self._order.settings().items()
            if state.get(name) != value
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
    sampler: Any,
    options: Mapping[str, Any],
) -> EngineDataLoader:
    """Make a loader; see ``Engine.dataloader``. Collective."""
    reads = everywhere or bool(consumer.executor.leaf_names)

    def wish() -> LoaderWish:
        _refuse_options(dataset, options, sampler, shuffle=shuffle)
        iterable = isinstance(dataset, IterableDataset)
        length = None if iterable or dataset is None else len(dataset if sampler is None else sampler)
        size = consumer.place.cuts.batch_size if batch_size is None else batch_size
        order_seed = consumer.executor.seed if seed is None else seed
        parts = consumer.place.world > 1 and not everywhere and not iterable
        return LoaderWish(BatchOrder(length, size, shuffle, order_seed, drop_last), iterable, reads, parts)

    agreed = _agreed(consumer.side.agree("making a data loader", wish), consumer.side.rank)
    order, place = replace(agreed.order, sampler=sampler), consumer.place if agreed.parts else DataPlace()
    collate = collate_fn or collate_numbers
    pinned = consumer.executor.device.type == "cuda" if pin_memory is None else pin_memory
    torchs = {**options, "pin_memory": pinned}
    if agreed.iterable:
        stream = Stream(consumer.executor, dataset, order, {**torchs, "collate_fn": collate})
        return EngineDataLoader(order, reported(stream, consumer.executor))
    if not reads:
        return EngineDataLoader(order, Counted(order, place, consumer.graph))
    indexed = Indexed(dataset, order, place, collate, torchs)
    return EngineDataLoader(order, reported(indexed, consumer.executor))


def _agreed(wishes: list[LoaderWish], rank: int) -> LoaderWish:
    """Return this rank's wish, once all ranks' are seen to fit. Raises the same UsageError on every rank."""
    problems = []
    for name in ("batch_size", "shuffle", "seed", "drop_last"):
        problems += _differences(name, {r: getattr(wish.order, name) for r, wish in enumerate(wishes)})
    problems += _differences("parts", {r: wish.parts for r, wish in enumerate(wishes)})
    with_data = {r: wish for r, wish in enumerate(wishes) if wish.iterable or wish.order.length is not None}
    problems += [
        f"rank {r} was given no dataset, and its part of the model reads inputs"
        for r, wish in enumerate(wishes)
        if r not in with_data and (wish.reads or any(w.iterable for w in with_data.values()))
    ]
    kinds = {r: "iterable" if wish.iterable else "by index" for r, wish in with_data.items()}
    lengths = {r: wish.order.length for r, wish in with_data.items()}
    problems += _differences("kind", kinds) + _differences("samples", lengths)
    mine = wishes[rank]
    if mine.order.batch_size < 1:
        problems.append(f"batch_size is {mine.order.batch_size}, expected 1 or more")
    if problems:
        raise UsageError(
            "cannot make this data loader",
            problems,
            ["give the same dataset and options on every rank; each loads only what it reads"],
        )
    return replace(mine, order=replace(mine.order, length=next(iter(lengths.values()), None)))


def _differences(name: str, by_rank: Mapping[int, Any]) -> list[str]:
    if len(set(by_rank.values())) < 2:
        return []
    return [f"{name}: " + ", ".join(f"{value} on rank {rank}" for rank, value in by_rank.items())]


def _refuse_options(dataset: Any, options: Mapping[str, Any], sampler: Any, *, shuffle: bool) -> None:
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
