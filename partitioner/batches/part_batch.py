"""Batches in parts: a rank that reads some samples of every micro-batch loads those only.

    plan: 8 samples in 2 micro-batches, mesh 2 ("data") × 2 ("tensor")

    batch [s0 s1 s2 s3 | s4 s5 s6 s7]       ranks 0 1, part 0 of 2    [s0 s1 | s4 s5]
                                            ranks 2 3, part 1 of 2    [s2 s3 | s6 s7]

This is so if all inputs arrive split by samples, along the same axes of a stage's mesh, and in as many parts at every
stage that reads any: what is drawn at random in part 0 is then the same for its tokens on one stage and its labels on
another. If one arrives whole, has no batch dimension (a count of the whole batch, perhaps) or an open length (that a
batch is padded to), every rank loads the whole batch.

A rank that reads no input loads none: a middle stage of a pipeline computes with what its neighbours send. Loading,
decoding and tokenizing the batch there would be work for nothing, times the number of such ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from cost_models.errors import UsageError
from cost_models.layout import Mesh, Shard
from partitioner.batches.step import BatchCuts
from partitioner.record.data import PlanData
from passes.graph.graph import OpGraph
from passes.graph.least_samples import least_samples
from passes.graph.token_counts import adds_up, counted, user_leaves
from passes.trace.loss.reduction import with_normalizers
from runtime.execute.execute import Executor
from runtime.mesh.sharding import coordinates
from runtime.ranks.collective import Collectives
from runtime.ranks.meeting import Meeting
from runtime.segment.code import BatchSpec


class AbsentBatch:
    """A stand-in for a batch of ``samples`` samples, without contents. ``train_step`` and ``eval_step`` take it."""

    def __init__(self, samples: int, graph: OpGraph, *, in_parts: bool = False) -> None:
        self.samples, self.in_parts = samples, in_parts
        """``in_parts``: the ranks that read it loaded parts of it."""
        self._graph = graph

    @property
    def leaves(self) -> Mapping[str, Tensor]:
        """Leaves of the right shapes and types, each of one element's memory: for counting, not for reading."""
        return self.leaves_of(user_leaves(self._graph.batch, self._graph.token_counts))

    def leaves_of(self, spec: BatchSpec) -> Mapping[str, Tensor]:
        """Return ``leaves`` under the names, and with the batch dimensions, of ``spec``."""
        sizes = dict.fromkeys((*spec.symbols, spec.batch_symbol), self.samples)
        return {
            name: torch.zeros((), dtype=leaf.dtype).expand(leaf.concrete(sizes))
            for name, leaf in spec.leaves.items()
        }

    def to(self, *_: Any, **__: Any) -> AbsentBatch:
        """Return itself: there is nothing to move."""
        return self

    def __repr__(self) -> str:
        return f"AbsentBatch(samples={self.samples})"

    def __getitem__(self, key: object) -> NoReturn:
        raise UsageError(f"this rank did not load the batch, so it has no {key!r}", _WHY_ABSENT, _LOAD_IT)

    def __iter__(self) -> NoReturn:
        raise UsageError("this rank did not load the batch", _WHY_ABSENT, _LOAD_IT)

    def __getattr__(self, name: str) -> NoReturn:
        text = f"this rank did not load the batch, so it has no {name!r}: {_WHY_ABSENT[0]}; {_LOAD_IT[0]}"
        raise AttributeError(text)


_WHY_ABSENT = ["its part of the model reads no input"]
_LOAD_IT = ["engine.dataloader(..., everywhere=True) loads every batch on every rank"]


def refuse_absent(needed: Collection[str]) -> None:
    """Raise UsageError where a rank reads leaves of a batch that it did not load."""
    if needed:
        raise UsageError(
            "this batch was not loaded, and it is read here",
            [f"this rank reads {', '.join(sorted(needed))}"],
            _LOAD_IT,
        )


@dataclass(frozen=True)
class DataPlace:
    """The part of every batch that a rank takes: number ``rank`` of ``world``; all of it where ``world`` is 1.

    ``cuts``: the way in which a batch is cut into micro-batches. ``axes``: the axes of the mesh along which samples are
    split.
    """

    rank: int = 0
    world: int = 1
    cuts: BatchCuts = field(default_factory=BatchCuts)
    axes: tuple[int, ...] = ()
    speaks: bool = True
    """True if this rank is the first of those with the same part."""

    def sizes(self, samples: int) -> tuple[int, ...]:
        """Return the samples of each micro-batch of a batch that is loaded in parts; () for one that cannot be."""
        if self.world == 1:
            return ()
        shared, rest = self.cuts.shared_and_rest(samples)
        return () if rest else shared

    def spans(self, samples: int) -> list[tuple[int, int]]:
        """List the samples of a batch that this rank loads, as (first, end)."""
        found, start = [], 0
        for size in self.sizes(samples):
            part = size // self.world
            found.append((start + self.rank * part, start + (self.rank + 1) * part))
            start += size
        return found or [(0, samples)]


def data_place(plan: PlanData, graph: OpGraph, executor: Executor) -> DataPlace:
    """Find this rank's part, of the samples that it reads, as far as it alone can tell. ``graph``: the training graph."""
    spec = executor.batch_spec
    cuts = BatchCuts(plan.batch_size, plan.microbatches, *least_samples(graph), spec.multiple)
    axes = _axes_of_samples(graph, spec, executor.leaf_names)
    if spec.mesh is None or not axes:
        return DataPlace(cuts=cuts)
    place, index, world = coordinates(spec.mesh, executor.program.rank), 0, 1
    for axis in axes:
        index = index * spec.mesh.shape[axis] + place[axis]
        world *= spec.mesh.shape[axis]
    speaks = all(at == 0 for axis, at in enumerate(place) if axis not in axes)
    return DataPlace(index, world, cuts, axes, speaks)


def agreed_place(place: DataPlace, reads: bool, meeting: Meeting) -> DataPlace:
    """Return ``place`` where all ranks that read inputs take as many parts; elsewhere all of the batch. Collective.

    A rank that reads none takes none, and knows how many there are.
    """

    def judge(said: list[Any]) -> int:
        worlds = {world for reading, world in said if reading}
        return worlds.pop() if len(worlds) == 1 else 1

    world = meeting.decide("parts of batches", [reads, place.world], judge)
    if world == place.world:
        return place
    return replace(place, rank=0, world=world, axes=(), speaks=False)


def _axes_of_samples(graph: OpGraph, spec: BatchSpec, read: frozenset[str]) -> tuple[int, ...]:
    """Find the axes along which every leaf read is split by samples; none if something else (tokens) is split too."""
    counts, user = graph.token_counts, user_leaves(graph.batch, graph.token_counts)
    if spec.mesh is None or any(dim is None for dim in user.batch_dims.values()):
        return ()
    if any(symbol != spec.batch_symbol for symbol in spec.symbols):
        return ()
    if counts is not None and counts.made & read and not adds_up(counts, graph.batch):
        return ()
    found = {_split(spec, spec.mesh, name) for name in read if name in user.batch_dims}
    return found.pop() if len(found) == 1 else ()


def _split(spec: BatchSpec, mesh: Mesh, name: str) -> tuple[int, ...]:
    return tuple(
        axis
        for axis, placement in enumerate(spec.placements.get(name, ()))
        if isinstance(placement, Shard) and placement.dim == spec.batch_dims[name] and mesh.shape[axis] > 1
    )


class PartBatch:
    """This rank's part, ``batch``, of a batch of ``samples`` samples. ``train_step`` and ``eval_step`` take it."""

    def __init__(self, batch: Any, samples: int, place: DataPlace) -> None:
        self.batch, self.samples, self.place = batch, samples, place

    @property
    def sizes(self) -> tuple[int, ...]:
        """The samples of each micro-batch of the whole batch."""
        return self.place.sizes(self.samples)

    @property
    def own_samples(self) -> int:
        """The number of samples that this rank has."""
        return self.samples // self.place.world

    def to(self, *args: Any, **options: Any) -> PartBatch:
        """Move the tensors of ``batch``, where it knows how to, or is a mapping of tensors."""
        if isinstance(self.batch, Mapping):
            moved: Any = {
                name: value.to(*args, **options) if isinstance(value, Tensor) else value
                for name, value in self.batch.items()
            }
        else:
            moved = self.batch.to(*args, **options)
        return PartBatch(moved, self.samples, self.place)

    def __repr__(self) -> str:
        place = self.place
        return f"PartBatch(part {place.rank} of {place.world} of {self.samples} samples)"

    def __getitem__(self, key: object) -> NoReturn:
        raise UsageError(
            f"this rank loaded a part of the batch, which has no {key!r} as a whole", (), _USE_PART
        )

    def __iter__(self) -> NoReturn:
        raise UsageError("this rank loaded a part of the batch", (), _USE_PART)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"this rank loaded a part of the batch, which has no {name!r}: {_USE_PART[0]}; {_USE_PART[1]}"
        )


_USE_PART = [
    "its attribute batch is that part",
    "engine.dataloader(..., everywhere=True) loads every batch as a whole on every rank",
]


def leaves_in_part(
    part: PartBatch, leaves: Mapping[str, Tensor], spec: BatchSpec, sizes: Sequence[int], place: DataPlace
) -> Collection[str]:
    """Return the names of ``leaves``, the tensors of ``part``. ``sizes``: the samples of each micro-batch.

    ``spec``: the batch of the graph that reads them. Raises UsageError where they are not the samples that this rank,
    which is at ``place``, should have.
    """
    wrong = [] if part.place == place else ["it was loaded for another engine"]
    wrong += [
        f"{name} has {leaf.shape[dim]} samples in dimension {dim}"
        for name, leaf in leaves.items()
        if (dim := spec.batch_dims.get(name)) is not None and leaf.shape[dim] != part.own_samples
    ]
    wrong += [f"{name} has no batch dimension" for name in leaves if spec.batch_dims.get(name, 0) is None]
    if tuple(sizes) != part.sizes:
        wrong.append(f"it has micro-batches of {part.sizes} samples, expected {tuple(sizes)}")
    if wrong:
        raise UsageError(
            f"this rank's part of a batch of {part.samples} samples is not {part.own_samples} samples",
            wrong,
            _USE_PART[1:],
        )
    return leaves.keys()


def normalized(
    graph: OpGraph,
    leaves: Mapping[str, Tensor],
    sizes: Sequence[int],
    needed: Collection[str],
    batch: Any,
    collectives: Collectives,
) -> Mapping[str, Tensor]:
    """Complete ``leaves``, those of ``batch``, by what a token mean reads. Its divisor is summed over the parts of a batch.

    Collective where the batch was loaded in parts: then every rank takes part, also one that reads no divisor.
    """
    counts = graph.token_counts
    if counts is None or not loaded_in_parts(batch):
        return with_normalizers(graph, leaves, sizes, needed)
    own = torch.zeros(counts.numbers(graph.batch, len(sizes)) + 1, dtype=torch.float64)
    if isinstance(batch, PartBatch) and batch.place.speaks and counts.made & set(needed):
        found = counted(counts, graph.batch, leaves, [size // batch.place.world for size in sizes])
        own = torch.cat([found, found.new_full((1,), float(batch.place.rank == 0))])
    summed = collectives.all_reduce(own.to(collectives.device), "the valid tokens of the batch").wait()
    numbers = summed[:-1] / summed[-1]  # by the stages that counted: whole numbers
    return with_normalizers(graph, leaves, sizes, needed, numbers)


def loaded_in_parts(batch: Any) -> bool:
    """Tell whether ranks loaded parts of a batch, by what this one has of it."""
    return isinstance(batch, PartBatch) or (isinstance(batch, AbsentBatch) and batch.in_parts)
