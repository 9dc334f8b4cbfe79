"""The price of computing blocks again in backward: the second forward's seconds, and the memory that it fills.

held between forward and backward   the storages that a region reads from outside (``GraphCosts.held_bytes``)
again in backward                   its ops up to the last one that saves something, but for products that none of them
                                    reads; autograd needs no more
alive meanwhile                     all that the region's ops save; one region at a time, the last one first
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from passes.costs.costs import GraphCosts

Region = Sequence[int]
"""Indices into ``graph.ops``, rising."""


class SavedStorages(Protocol):
    """The part of ``GraphCosts`` that says where a second forward stops."""

    @property
    def saved(self) -> tuple[tuple[str, ...], ...]: ...
    @property
    def maker(self) -> Mapping[str, int]: ...
    @property
    def reads(self) -> tuple[tuple[tuple[int, str | None], ...], ...]: ...
    @property
    def multiplies(self) -> tuple[bool, ...]: ...
    @property
    def weight_half(self) -> tuple[bool, ...]: ...


def computed_again(costs: SavedStorages, region: Region, deferring: bool) -> list[int]:
    """List the ops of ``region`` that run a second time: checkpointing stops as soon as all that was saved is there.

    An op's operands are saved before its kernel runs, its results after. Products whose results lead out of the region
    save their operands without running (``runtime.segment.recompute``). ``deferring``: ops with a weight half are rewritten
    (``runtime.segment.split_backward``), and save after they ran.
    """
    savers = [at for at, op in enumerate(region) if costs.saved[op]]
    if not savers:
        return []
    last = savers[-1]
    op = region[last]
    early = all(costs.maker.get(name) != op for name in costs.saved[op])
    stop = last if early and not (deferring and costs.weight_half[op]) else last + 1
    read = {producer for op in region[: last + 1] for producer, _ in costs.reads[op]}
    return [
        op
        for op in region[:stop]
        if op in read or not costs.multiplies[op] or (deferring and costs.weight_half[op])
    ]


def region_bytes(costs: GraphCosts, region: Region, batch_size: int) -> int:
    """Count bytes that autograd keeps of ``region`` while its backward runs, beside what was held anyway."""
    costs = costs.exact(batch_size)
    sizes = costs.storage_bytes(batch_size)
    inside = set(region)
    saved = {name for op in region for name in costs.saved[op]}
    return sum(sizes[name] for name in saved - costs.inputs_of(inside))
