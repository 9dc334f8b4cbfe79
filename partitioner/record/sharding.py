"""The sharing of a stage's work by its devices, as a plan holds it: a mesh, layouts, and what they send each other."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated

from pydantic import AfterValidator, Field

from cost_models.layout import Mesh
from partitioner.record.file import Amount, Natural, Record
from passes.shard.sent import GradientSum, StageCollective, UpdateGather
from passes.shard.words import (
    FeaturePlacement,
    choice_text,
    crossing_text,
    placements_text,
    read_choice,
    read_crossing,
    read_placements,
)
from runtime.mesh.ranks_along import JOINT

MOST_AXES = 3


def _readable(read: Callable[[str], object]) -> Callable[[str], str]:
    def check(text: str) -> str:
        read(text)
        return text

    return check


LayoutText = Annotated[str, AfterValidator(_readable(read_placements))]
CrossingText = Annotated[str, AfterValidator(_readable(read_crossing))]
ChoiceText = Annotated[str, AfterValidator(_readable(read_choice))]


class LayoutRow(Record):
    """A row for people: parameters of equal blocks, kept and read alike, or products of activations. "" is nothing."""

    name: str = Field(description="a parameter, or the module of a product; * stands for the blocks' numbers")
    count: Natural = Field(description="how many")
    size_bytes: Natural = Field(description="of all of them, on a device")
    stored: LayoutText
    state: LayoutText = Field(description="of gradients and optimizer state, where that differs from stored")
    taken: LayoutText = Field(description="how the op that reads it needs it")
    op: str
    takes: tuple[LayoutText, ...] = Field(description="the op's operands that are no parameters")
    makes: LayoutText


class StageSharding(Record):
    """A stage's shards, as its devices run it. Layouts: R whole, S0 split along dimension 0, P part of a sum."""

    axes: dict[str, Annotated[int, Field(ge=1)]] = Field(
        description="of the mesh, outermost first: name and size; the stage's devices fill it row by row"
    )
    choices: dict[str, tuple[ChoiceText, ...]] = Field(
        description="per op and mesh axis: needs of its operands -> its outputs"
    )
    stored: dict[str, LayoutText] = Field(description="parameters and buffers; whole if not listed")
    state: dict[str, LayoutText] = Field(
        description="gradients and optimizer state, where that differs from stored (ZeRO-1 and 2)"
    )
    batch: dict[str, LayoutText] = Field(description="how inputs arrive; whole if not listed")
    values: dict[str, CrossingText] = Field(
        default_factory=dict,
        description="how values of other stages arrive and own ones leave, whole if not listed; ~ of one that arrives: "
        "each device sends its part of the gradient's sum back",
    )
    samples_multiple: int = Field(ge=1, description="a micro-batch has a multiple of so many samples")
    collectives: tuple[StageCollective, ...]
    sums: tuple[GradientSum, ...]
    gathers: tuple[UpdateGather, ...] = ()
    layouts: tuple[LayoutRow, ...] = Field(
        default=(), description="a summary; choices and stored are what counts"
    )
    discovered_ops: Natural = Field(description="ops whose choices were found by trying")
    replicated_ops: tuple[str, ...] = Field(description="ops that only every device as a whole can run")
    replicated_seconds: Amount = Field(description="what these take of a step")
    replicated_matmul_share: float = Field(
        ge=0,
        le=1,
        description="of the FLOPs of products, convolutions and attention: not split along some axis",
    )

    def mesh(self, devices: tuple[int, ...]) -> Mesh:
        """Arrange ``devices`` in the axes."""
        return Mesh(devices, tuple(self.axes.values()), tuple(self.axes))

    def placement(self, devices: tuple[int, ...], microbatches: int) -> FeaturePlacement:
        """Return the placement that the search chose, on ``devices``."""
        crossing = {name: read_crossing(text) for name, text in self.values.items()}
        return FeaturePlacement(
            self.mesh(devices),
            {op: tuple(map(read_choice, texts)) for op, texts in self.choices.items()},
            {name: read_placements(text) for name, text in self.stored.items()},
            {name: read_placements(text) for name, text in self.batch.items()},
            microbatches,
            {name: read_placements(text) for name, text in self.state.items()},
            {name: layout for name, (layout, _) in crossing.items()},
            {name: returned for name, (layout, returned) in crossing.items() if returned != layout},
        )


def texts_of(placement: FeaturePlacement) -> Mapping[str, Mapping[str, object]]:
    """Return the fields of ``StageSharding`` that a placement says."""
    return {
        "axes": dict(zip(placement.mesh.axes, placement.mesh.shape, strict=True)),
        "choices": {op: tuple(map(choice_text, ways)) for op, ways in placement.choices.items()},
        "stored": {name: placements_text(p) for name, p in placement.stored.items()},
        "state": {name: placements_text(p) for name, p in placement.sharded_state.items()},
        "batch": {name: placements_text(p) for name, p in placement.batch.items()},
        "values": {n: crossing_text(p, placement.returned.get(n, p)) for n, p in placement.values.items()},
    }


def contradictions(
    where: str, sharding: StageSharding, devices: tuple[int, ...], ops: set[str]
) -> Iterator[str]:
    """Yield what cannot be in one plan, as "key path: what is wrong"."""
    count = len(sharding.axes)
    if not 1 <= count <= MOST_AXES:
        yield f"{where}.axes: {count} axes, expected 1 to {MOST_AXES}"
    elif math.prod(sharding.axes.values()) != len(devices):
        yield f"{where}.axes: {'×'.join(map(str, sharding.axes.values()))} is not {len(devices)} devices"
    for name in sharding.axes:
        if not re.fullmatch(r"[a-z][a-z0-9_]{0,30}", name):
            yield f"{where}.axes: {name!r} is no name of an axis, such as inner"
    for op, ways in sharding.choices.items():
        if op not in ops:
            yield f"{where}.choices.{op}: the stage does not run this op"
        elif len(ways) != count:
            yield f"{where}.choices.{op}: {len(ways)} choices for {count} axes"
    for field in ("stored", "state", "batch", "values"):
        for name, text in getattr(sharding, field).items():
            if len(text.split()) != count:
                yield f"{where}.{field}.{name}: {text!r} does not name {count} placements, one per axis"
            elif "P" in text.split():
                yield (
                    f"{where}.{field}.{name}: {text!r}: what is kept, given or sent is whole or split, no part of a sum"
                )
    for index, item in enumerate(sharding.collectives):
        if not _are_axes(sharding, item.axis.split(JOINT)):
            yield f"{where}.collectives[{index}].axis: {item.axis!r} is no axis of the mesh"
    for index, summed in enumerate(sharding.sums):
        if not _are_axes(sharding, summed.axes):
            yield f"{where}.sums[{index}].axes: {list(summed.axes)} are no axes of the mesh"
        if len(summed.size_bytes) != len(summed.parameters):
            yield f"{where}.sums[{index}].size_bytes: not one per parameter"
    for index, gather in enumerate(sharding.gathers):
        if gather.axis not in sharding.axes:
            yield f"{where}.gathers[{index}].axis: {gather.axis!r} is no axis of the mesh"


def _are_axes(sharding: StageSharding, names: Sequence[str]) -> bool:
    return bool(names) and len(set(names)) == len(names) and sharding.axes.keys() >= set(names)
