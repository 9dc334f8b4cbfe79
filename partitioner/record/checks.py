"""The rules that hold between a plan's fields: a file that breaks one was edited or damaged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from cost_models.memory import OPTIMIZERS
from cost_models.units import counted
from partitioner.record import certificate, outline
from partitioner.record.sharding import contradictions
from passes.search.words import STRATEGY_WORDS
from runtime.schedules import SCHEDULES

if TYPE_CHECKING:
    from partitioner.record.records import PlanFields

MOST_COMPUTES = 1 << 24
"""The most stages times micro-batches: a plan whose programs are longer cannot be rebuilt in memory."""


def inconsistencies(plan: PlanFields) -> Iterator[str]:
    """Yield every contradiction, as "key path: what is wrong"."""
    world = plan.cluster.world_size
    if not plan.stages:
        yield "stages: there is none"
    if plan.microbatches > plan.batch_size:
        yield f"microbatches: {plan.microbatches} pieces of a batch of {plan.batch_size}"
    if len(plan.stages) * plan.microbatches > MOST_COMPUTES:
        yield f"microbatches: {plan.microbatches:,}, times {counted(len(plan.stages), 'stage')}, is too many"
    if plan.schedule not in SCHEDULES:
        yield f"schedule: {plan.schedule!r} is not one of {', '.join(SCHEDULES)}"
    if plan.optimizer_memory not in OPTIMIZERS:
        yield f"optimizer_memory: {plan.optimizer_memory!r} is not one of {', '.join(OPTIMIZERS)}"
    yield from _of_the_strategy(plan)
    yield from _splits(plan)
    yield from _stages(plan, world)
    yield from _views(plan)
    yield from _values(plan, world)
    yield from _per_rank(plan, world)
    yield from certificate.contradictions(plan)
    if plan.outline is not None:
        yield from outline.contradictions(plan.outline, [op for stage in plan.stages for op in stage.ops])


def _of_the_strategy(plan: PlanFields) -> Iterator[str]:
    """Name what plans of the strategy cannot have."""
    words = STRATEGY_WORDS.get(plan.strategy)
    if words is None:
        return
    if words.stages == "one mesh":
        if len(plan.stages) != 1 or plan.stages[0].sharding is None:
            yield f"stages: a {words.adverb} plan has one, with a sharding"
    elif words.stages != "groups" and any(stage.sharding is not None for stage in plan.stages):
        yield f"stages: a plan of strategy {plan.strategy!r} has none with a sharding"
    if plan.splits and "splits" not in words.options:
        yield f"splits: a plan of strategy {plan.strategy!r} has none"


def _views(plan: PlanFields) -> Iterator[str]:
    names = [record.name for record in plan.views]
    for index, record in enumerate(plan.views):
        if names.index(record.name) != index:
            yield f"views[{index}].name: {record.name} is there twice"
        if record.owner in names:
            yield f"views[{index}].owner: {record.owner} is a view itself"


def _splits(plan: PlanFields) -> Iterator[str]:
    seen: dict[str, int] = {}
    for index, record in enumerate(plan.splits):
        if not record.sizes:
            yield f"splits[{index}].sizes: there is none"
        if record.op in seen:
            yield f"splits[{index}].op: {record.op!r} is split by splits[{seen[record.op]}] as well"
        seen.setdefault(record.op, index)


def _stages(plan: PlanFields, world: int) -> Iterator[str]:
    seen: dict[str, int] = {}
    group_of: dict[int, int] = {}
    for index, stage in enumerate(plan.stages):
        others = {group_of.setdefault(rank, index) for rank in stage.devices}
        overlapped = next((i for i in sorted(others) if plan.stages[i].devices != stage.devices), None)
        if overlapped is not None:
            yield (
                f"stages[{index}].devices: {list(stage.devices)}, and {list(plan.stages[overlapped].devices)} of "
                f"stages[{overlapped}], overlap: groups are the same or have no rank in common"
            )
        if not stage.devices:
            yield f"stages[{index}].devices: there is none"
        elif stage.sharding is None and len(stage.devices) != 1:
            yield f"stages[{index}].devices: a stage without sharding has one device, not {len(stage.devices)}"
        elif len(set(stage.devices)) < len(stage.devices):
            yield f"stages[{index}].devices: {list(stage.devices)} names a rank twice"
        elif stage.sharding is not None:
            yield from _samples(plan, f"stages[{index}].sharding", stage.sharding.samples_multiple)
            yield from contradictions(
                f"stages[{index}].sharding", stage.sharding, stage.devices, {*stage.ops, *plan.recomputed}
            )
        missing = [rank for rank in stage.devices if rank >= world]
        if missing:
            yield f"stages[{index}].devices: rank {missing[0]} is not in the cluster of {world}"
        for op in stage.ops:
            if op in seen:
                yield f"stages[{index}].ops: {op!r} stands in stage {seen[op]} as well"
            seen[op] = index


def _samples(plan: PlanFields, where: str, multiple: int) -> Iterator[str]:
    """Check that the batch can be cut as the stage's devices take it."""
    if plan.batch_size % (plan.microbatches * multiple):
        yield (
            f"{where}.samples_multiple: {plan.batch_size} samples in {plan.microbatches} micro-batches are no "
            f"multiples of {multiple} each"
        )


def _values(plan: PlanFields, world: int) -> Iterator[str]:
    count = len(plan.stages)
    for index, value in enumerate(plan.values):
        if not all(value.producer < consumer < count for consumer in value.consumers):
            yield f"values[{index}]: goes from stage {value.producer} to {list(value.consumers)} of {count}"
        ends = [plan.stages[s] for s in (value.producer, *value.consumers) if s < count]
        if value.element_bytes == 0 and any(stage.sharding is not None for stage in ends):
            yield f"values[{index}].element_bytes: is 0, and devices share a stage that makes or reads {value.name}"
        for number in sorted({value.producer, *value.consumers}):
            sharding = plan.stages[number].sharding if number < count else None
            if sharding is None or "~" not in sharding.values.get(value.name, ""):
                continue
            if not value.needs_grad or plan.stages[number].devices == ends[0].devices:
                yield (
                    f"stages[{number}].sharding.values.{value.name}: {sharding.values[value.name]!r}: "
                    "no other stage is sent a gradient of it"
                )
    for index, transfer in enumerate(plan.transfers):
        if max(transfer.source, transfer.target) >= world or transfer.source == transfer.target:
            yield (
                f"transfers[{index}]: goes from rank {transfer.source} to {transfer.target} "
                f"in a cluster of {world}"
            )
    for index, tied in enumerate(plan.tied):
        if len(set(tied.ranks)) < 2 or max(tied.ranks) >= world:
            yield f"tied[{index}].ranks: {list(tied.ranks)} are not two or more ranks of {world}"


def _per_rank(plan: PlanFields, world: int) -> Iterator[str]:
    ranks = {str(rank) for rank in range(world)}
    tables: dict[str, Iterable[str]] = {
        "state_bytes": plan.state_bytes,
        "optimizer_seconds": plan.optimizer_seconds,
        **({"update_bytes": plan.update_bytes} if plan.update_bytes else {}),
        "prediction.peak_memory_bytes": plan.prediction.peak_memory_bytes,
        **({"risk.room_bytes": plan.risk.room_bytes} if plan.risk is not None else {}),
        **{f"state_parts.{part}": table for part, table in plan.state_parts.items()},
        **{f"prediction.beside_tensors.{n}": t for n, t in plan.prediction.beside_tensors.items()},
    }
    for name, table in tables.items():
        for key in sorted(ranks.symmetric_difference(table), key=lambda key: (len(key), key)):
            yield f"{name}.{key}: is missing" if key in ranks else f"{name}.{key}: no rank of {world}"
    yield from _state_parts(plan)


def _state_parts(plan: PlanFields) -> Iterator[str]:
    """Check that the parts of each rank's state add up to it."""
    for rank, whole in plan.state_bytes.items() if plan.state_parts else ():
        total = sum(table.get(rank, 0) for table in plan.state_parts.values())
        if total != whole:
            yield f"state_parts: {total:,} bytes of rank {rank} in all, and state_bytes has {whole:,}"
