"""Notes of ranks on their shards, put together to notes of the whole values, to hold against the unpartitioned graph's.

y: S(0) on 2 ranks      sums add up, squares of norms too                       one whole value
y: a part of a sum      sums add up; the norm of the sum is in no rank's note   one whole value, norm unknown
y: whole                                                                        two whole values
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

from cost_models.layout import Mesh, Partial, Replicate
from partitioner.record.data import PlanData
from partitioner.record.rebuild import ranks_in_order
from passes.shard.words import Placements
from runtime.measure.record import Note
from runtime.mesh.sharding import coordinates

Wholes: TypeAlias = Iterator[tuple[str, list[Note]]]
"""The copies of a value, each with its ranks in words and a note per micro-batch."""


def noted_copies(plan: PlanData, per_rank: Sequence[Mapping[str, list[Note]]]) -> Callable[[str], Wholes]:
    """Return a function from an op to notes of its whole value, once per copy: each rank's own if no stage shares it."""
    shared: dict[str, tuple[Mesh, Placements]] = {}
    for stage in plan.stages:
        if stage.sharding is None:
            continue
        mesh = stage.sharding.mesh(ranks_in_order(plan).ranks(stage.devices))
        choices = stage.sharding.placement(stage.devices, plan.microbatches).choices
        shared |= dict.fromkeys(stage.ops, (mesh, (Replicate(),) * len(mesh.shape)))
        shared |= {op: (mesh, tuple(choice.outputs[0] for choice in ways)) for op, ways in choices.items()}

    def notes(op: str) -> Wholes:
        if op not in shared:
            yield from ((str(rank), notes.get(op, [])) for rank, notes in enumerate(per_rank))
            return
        mesh, layout = shared[op]
        copies: dict[tuple[int, ...], list[int]] = {}
        for rank in mesh.ranks:
            place = coordinates(mesh, rank)
            key = tuple(i for i, p in zip(place, layout, strict=True) if isinstance(p, Replicate))
            copies.setdefault(key, []).append(rank)
        summed = any(isinstance(p, Partial) for p in layout)
        for ranks in copies.values():
            parts = [per_rank[rank].get(op, []) for rank in ranks]
            yield "+".join(map(str, ranks)), [_together(each, summed) for each in zip(*parts, strict=False)]

    return notes


def _together(parts: Sequence[Note], summed: bool) -> Note:
    if len(parts) == 1:
        return parts[0]
    norm = math.inf if summed else math.sqrt(sum(note[1] ** 2 for note in parts))
    return sum(note[0] for note in parts), norm
