"""Agreement of all ranks before they load data, and refusal of what would make them load different batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch.utils.data import IterableDataset
from torch.utils.data.distributed import DistributedSampler

from cost_models.errors import UsageError
from partitioner.batches.order import BatchOrder

_OURS = {
    "batch_sampler": "batches of one size make one order for all ranks: sampler=, shuffle= and batch_size=",
    "generator": "the order must be the same on every rank: seed=",
}
"""Options of torch's loader that would break the order, and what to use instead."""


@dataclass(frozen=True)
class LoaderPlan:
    """The settings that all ranks must agree on. ``length``: samples in an epoch; None if there is none, or no dataset."""

    length: int | None
    iterable: bool
    batch_size: int
    shuffle: bool
    seed: int
    drop_last: bool
    reads: bool
    """True if this rank loads; the one thing that may differ."""
    parts: bool = False
    """True if ranks load parts of batches, those that they read."""


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
    """Return this rank's plan, once all ranks' are seen to fit. Raises the same UsageError on every rank."""
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


def order_fields(plan: LoaderPlan) -> dict[str, Any]:
    return {name: value for name, value in asdict(plan).items() if name not in ("reads", "iterable", "parts")}


def order_of(plan: LoaderPlan, sampler: Iterable[Any] | None = None) -> BatchOrder:
    assert plan.length is not None
    return BatchOrder(plan.length, plan.batch_size, plan.shuffle, plan.seed, plan.drop_last, sampler)
