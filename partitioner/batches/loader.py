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
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset

from cost_models.errors import UsageError
from partitioner.batches.agreement import LoaderPlan, agreed, order_fields, order_of, refuse_options
from partitioner.batches.part_batch import DataPlace
from partitioner.batches.sources import BatchSource, Counted, Indexed, Stream, collate_numbers, reported
from passes.graph.graph import OpGraph
from runtime.execute.execute import Executor
from runtime.ranks.side_group import SideGroup


@dataclass(frozen=True)
class Consumer:
    """The engine that a loader loads for, as far as the loader knows it. ``batch_size``: the plan's."""

    executor: Executor
    graph: OpGraph
    side: SideGroup
    batch_size: int
    place: DataPlace


class EngineDataLoader:
    """Yields batches for one engine. Made by ``engine.dataloader``; every rank iterates over its own, alike.

    Each ``for`` begins another epoch, except the first one after ``load_state_dict``, which goes on where the saved one
    was.
    """

    def __init__(self, plan: LoaderPlan, source: BatchSource) -> None:
        self.epoch = 0
        """The number of the epoch that is under way, or of the next one."""
        self.position = 0
        """The number of its batches that were yielded."""
        self._plan, self._source = plan, source
        self._loop: object | None = None

    def __len__(self) -> int:
        """Count the batches in an epoch. Raises TypeError for iterable datasets without a length."""
        if self._plan.length is None:
            raise TypeError("an iterable dataset has no length")
        return len(order_of(self._plan))

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
        return {"epoch": self.epoch, "position": self.position, **order_fields(self._plan)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the batch after the last one that was yielded. Raises UsageError for a loader of other batches."""
        now = order_fields(self._plan)
        other = [
            f"{name} was {state.get(name)}, now {value}"
            for name, value in now.items()
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

    def own() -> LoaderPlan:
        refuse_options(dataset, options, sampler, shuffle=shuffle)
        iterable = isinstance(dataset, IterableDataset)
        length = None if iterable or dataset is None else len(dataset if sampler is None else sampler)
        size = consumer.batch_size if batch_size is None else batch_size
        own_seed = consumer.executor.seed if seed is None else seed
        parts = consumer.place.world > 1 and not everywhere and not iterable
        return LoaderPlan(length, iterable, size, shuffle, own_seed, drop_last, reads, parts)

    plan = agreed(consumer.side.agree("making a data loader", own), consumer.side.rank)
    collate = collate_fn or collate_numbers
    pinned = consumer.executor.device.type == "cuda" if pin_memory is None else pin_memory
    given = {**options, "pin_memory": pinned}
    if plan.iterable:
        stream = Stream(consumer.executor, dataset, plan, {**given, "collate_fn": collate})
        return EngineDataLoader(plan, reported(stream, consumer.executor))
    order, place = order_of(plan, sampler), consumer.place if plan.parts else DataPlace()
    if not plan.reads:
        return EngineDataLoader(plan, Counted(order, place, consumer.graph))
    indexed = Indexed(dataset, order, place, collate, given)
    return EngineDataLoader(plan, reported(indexed, consumer.executor))
