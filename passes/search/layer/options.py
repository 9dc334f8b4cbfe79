"""The options of a layer-wise search: micro-batch counts × schedules × ways to hand out devices, each as a problem."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from cost_models.arrays import FloatArray
from cost_models.cluster import ClusterSpec
from cost_models.devices import Device
from cost_models.units import counted
from passes.search.beside_tensors import least_of_pipelines
from passes.search.layer.problem import Assignment, DevicePool, Held, Recompute, Working
from passes.search.layer.spaces import Space
from passes.search.layer.tuning import TUNING
from passes.search.model import LayerModel
from runtime.schedules import SCHEDULES

T = TypeVar("T")

AUTO_SCHEDULES: tuple[tuple[str, int], ...] = (
    ("1f1b", 1),
    ("zb-h1", 1),
    ("interleaved", 2),
    ("interleaved", 4),
    ("zb-v", 2),
    ("gpipe", 1),
)
"""(name, chunks per device) that "auto" compares."""


@dataclass(frozen=True)
class ScheduleOption:
    """One micro-batch count under one schedule."""

    microbatches: int
    schedule: str
    chunks: int

    def __str__(self) -> str:
        return f"{self.schedule}, {counted(self.microbatches, 'micro-batch')}"

    def size(self, batch_size: int) -> int:
        """Samples of the largest micro-batch."""
        return -(-batch_size // self.microbatches)

    def fill(self, devices: int) -> float:
        """Share of filling and draining that the schedule does not hide, for F = B = W: ``test_theory`` has them exactly.

        The step of p equal stages is ``(m + fill·(p - 1))·t``, 1 for GPipe and 1F1B. A micro-batch that is alone passes all
        stages one after the other; under zero-bubble orders only one of its weight halves is waited for. Each further one
        hides as much of the rest, until 1/v is left of interleaved 1F1B, a third or half of that of zero-bubble orders.
        """
        alone, each, least, further = {
            "interleaved": (1.0, 1 - 1 / self.chunks, 1 / self.chunks, self.microbatches - 1),
            "zb-h1": (2 / 3, 1 / 3, 1 / 3, self.microbatches - 1),
            "zb-h2": (2 / 3, 1 / 3, 1 / 3, self.microbatches // 2),
            "zb-v": (2 / 3, 1 / 3, 1 / 6, self.microbatches - 1),
        }.get(self.schedule, (1.0, 0.0, 1.0, 0))
        return max(least, alone - each * further / (devices - 1)) if devices > 1 else least


def microbatch_counts(batch_size: int, wanted: int | str) -> list[int]:
    """Divisors of the batch size, and powers of two where it has few; or the one count that was asked for."""
    if isinstance(wanted, int):
        return [wanted]
    counts = {d for d in range(1, math.isqrt(batch_size) + 1) if batch_size % d == 0}
    counts |= {batch_size // d for d in counts}
    if len(counts) < 4:
        counts |= {1 << i for i in range(batch_size.bit_length()) if 1 << i <= batch_size}
    return sorted(counts)[-TUNING.most_counts :]


def options(counts: Sequence[int], schedule: str, devices: int) -> list[ScheduleOption]:
    """Every micro-batch count under every schedule that may be used."""
    if schedule == "auto":
        names = [(name, v) for name, v in AUTO_SCHEDULES if v == 1 or devices > 1]
    elif schedule == "interleaved":
        names = [("interleaved", 2), ("interleaved", 4)]
    else:
        names = [(schedule, SCHEDULES[schedule].chunks or 1)]
    return [ScheduleOption(m, name, v) for m in counts for name, v in names]


@dataclass(frozen=True, eq=False)
class DevicePlan:
    """A way to hand out devices: kinds with their links, and the ranks behind each kind."""

    kinds: tuple[DevicePool, ...]
    latency_seconds: FloatArray
    seconds_per_byte: FloatArray
    assignment: Assignment
    sequence: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]
    """Ranks of each kind, in file order."""
    text: str

    def room_of(self, rank: int) -> float:
        """Return the capacity of the kind that is a rank's."""
        return next(
            k.capacity_bytes for k, ranks in zip(self.kinds, self.ranks, strict=True) if rank in ranks
        )

    def ranks_of(self, kinds: Sequence[int], chunks: int) -> tuple[int, ...]:
        """Rank of each stage. With one chunk per device every rank is used once; otherwise kinds name single
        devices."""
        if chunks > 1:
            return tuple(self.ranks[kind][0] for kind in kinds)
        taken: dict[int, int] = {}
        result = []
        for kind in kinds:
            result.append(self.ranks[kind][taken.get(kind, 0)])
            taken[kind] = taken.get(kind, 0) + 1
        return tuple(result)


@dataclass(frozen=True, eq=False)
class DeviceTable:
    """The devices of a cluster by speed: equal ones share a row of seconds."""

    representatives: tuple[Device, ...]
    row_of: tuple[int, ...]
    """Per rank."""

    def device(self, rank: int) -> Device:
        """A device as fast as that of ``rank``."""
        return self.representatives[self.row_of[rank]]


def device_table(cluster: ClusterSpec) -> DeviceTable:
    """Group devices that compute alike, by all that their ops' seconds depend on."""
    rows: dict[Device, int] = {}
    row_of = tuple(rows.setdefault(device.speed_alone, len(rows)) for device in cluster.devices)
    return DeviceTable(tuple(rows), row_of)


def device_plan(
    cluster: ClusterSpec, table: DeviceTable, chunks: int, folded: bool, max_stages: int
) -> DevicePlan:
    """Make the ways in which a pipeline with ``chunks`` stages per device may use the cluster.

    Several chunks go round all devices in file order (as a V if ``folded``). One chunk: identical devices in
    file order; unlike ones in any order, as long as that is few enough states.
    """
    world = len(cluster.devices)
    beside = least_of_pipelines(cluster) if max_stages > 1 else 0
    if chunks > 1:
        used = max(1, min(world, max_stages // chunks))
        rounds = [range(used)[:: -1 if folded and c % 2 else 1] for c in range(chunks)]
        text = f"{chunks} stages on each of {used} devices in file order"
        return _single(cluster, table, beside, "sequence", tuple(itertools.chain.from_iterable(rounds)), text)
    groups: dict[tuple[int, int], list[int]] = {}
    for rank, device in enumerate(cluster.devices):
        room = device.room_bytes - device.context_bytes - beside
        groups.setdefault((table.row_of[rank], room), []).append(rank)
    if len(groups) > 1:
        states = len(groups) * math.prod(len(ranks) + 1 for ranks in groups.values())
        if states <= TUNING.most_device_states:
            return _multiset(cluster, list(groups.items()))
        if world <= TUNING.most_subsequence_devices:
            return _single(
                cluster, table, beside, "ordered", (), f"any subsequence of {world} devices in file order"
            )
    text = f"a run of {world} {'unlike' if len(groups) > 1 else 'identical'} devices in file order"
    return _single(cluster, table, beside, "sequence", tuple(range(world)), text)


def _single(
    cluster: ClusterSpec,
    table: DeviceTable,
    beside: int,
    assignment: Assignment,
    sequence: tuple[int, ...],
    text: str,
) -> DevicePlan:
    """Each device a kind of its own. ``beside``: bytes of its communicators."""
    devices = cluster.devices
    world = len(devices)
    kinds = tuple(
        DevicePool(
            f"rank {rank}",
            table.row_of[rank],
            float(device.room_bytes - device.context_bytes - beside),
        )
        for rank, device in enumerate(devices)
    )
    if assignment == "ordered":
        pairs = set(itertools.combinations(range(world), 2))
    else:
        pairs = set(itertools.pairwise(sequence))
    latency, rate = np.zeros((world, world)), np.zeros((world, world))
    for a, b in pairs:
        latency[a, b], rate[a, b] = _link(cluster, a, b)
    return DevicePlan(
        kinds, latency, rate, assignment, sequence, tuple((rank,) for rank in range(world)), text
    )


def _multiset(cluster: ClusterSpec, groups: Sequence[tuple[tuple[int, int], list[int]]]) -> DevicePlan:
    """Unlike devices in any order: a kind per speed and memory, links by the worst that neighbours of the
    kinds have."""
    kinds = tuple(
        DevicePool(cluster.devices[ranks[0]].model, row, float(memory), len(ranks))
        for (row, memory), ranks in groups
    )
    count = len(groups)
    latency, rate = np.zeros((count, count)), np.zeros((count, count))
    for a, (_, first) in enumerate(groups):
        for b, (_, second) in enumerate(groups):
            pairs = (
                list(itertools.pairwise(first)) if a == b else list(itertools.product(first[-1:], second[:1]))
            )
            for x, y in pairs:
                seconds, per_byte = _link(cluster, x, y)
                latency[a, b], rate[a, b] = max(latency[a, b], seconds), max(rate[a, b], per_byte)
    text = "any order of " + ", ".join(f"{kind.count} x {kind.name}" for kind in kinds)
    return DevicePlan(kinds, latency, rate, "unordered", (), tuple(tuple(ranks) for _, ranks in groups), text)


def _link(cluster: ClusterSpec, a: int, b: int) -> tuple[float, float]:
    """Latency of a message each way, and seconds per byte."""
    path = cluster.path(a, b)
    return 2 * path.latency_seconds, 1.0 / path.bandwidth_bytes_per_second


def in_flight(option: ScheduleOption, devices: int, stages: int) -> tuple[int, ...]:
    """Micro-batches held at once by each stage, counted from the end.

    GPipe and 1F1B in closed form (as the published orders, which are tested against it); others as their own
    orders have it. A schedule for any placement is budgeted like 1F1B.
    """
    m, schedule = option.microbatches, SCHEDULES[option.schedule]
    if option.schedule == "gpipe":
        return (m,) * stages
    if option.schedule in ("1f1b", "list"):
        return tuple(min(m, k) for k in range(1, stages + 1))
    return _by_stage(option, devices, stages, schedule.in_flight)


def fullest_moments(option: ScheduleOption, devices: int, stages: int) -> tuple[tuple[Held, ...], ...]:
    """The moments at which each stage, counted from the end, may hold the most; empty if no weight half is ever left over.

    Exact for ``devices`` ranks. A zero-bubble pipeline of fewer stages leaves fewer weight halves over, so for it
    this is an upper estimate. Where a rank has several chunks, each is taken at its own fullest.
    """
    schedule = SCHEDULES[option.schedule]
    if not schedule.splits_backward:
        return ()
    return _by_stage(option, devices, stages, schedule.corners)


def _by_stage(
    option: ScheduleOption, devices: int, stages: int, of_place: Callable[[int, int, int, int], Sequence[T]]
) -> tuple[T, ...]:
    """Per stage, counted from the end, what ``of_place`` says of its chunk. ``of_place``: see the methods of schedules."""
    seen: dict[int, int] = {}
    found = []
    for place in SCHEDULES[option.schedule].positions(stages, devices):
        chunk = seen[place] = seen.get(place, -1) + 1
        found.append(of_place(place, devices, option.chunks, option.microbatches)[chunk])
    return tuple(reversed(found))


@dataclass(frozen=True, eq=False)
class UnitCosts:
    """Costs of one micro-batch size over the units of a space."""

    seconds: FloatArray
    storage_bytes: FloatArray
    deferred_bytes: FloatArray
    state_bytes: FloatArray
    forward_bytes: FloatArray
    gradient_bytes: FloatArray
    recompute: Recompute | None
    """The numbers that change where blocks are computed again; None for a model without blocks."""
    working: Working
    beside_deferred: Working
    """Working bytes where blocks are computed again under a schedule that defers weight halves."""


def unit_costs(model: LayerModel, space: Space, table: DeviceTable, size: int) -> UnitCosts:
    """Costs of micro-batches of ``size`` samples."""

    def seconds(of_ops: Callable[[int, Device], FloatArray]) -> FloatArray:
        return np.stack([space.seconds(of_ops(size, device)) for device in table.representatives])

    forward, gradient = space.crossing_bytes(model.output_bytes(size))
    beside, freed = model.working_bytes(size)
    outside = np.where(model.blocks.of < 0, freed, 0.0)
    deferring = model.blocks.beside_deferred_bytes(size, model.output_bytes(size))
    recompute = None
    if model.blocks:
        recompute = Recompute(
            seconds(model.again_seconds),
            space.recomputed_bytes(model.blocks.sizes(size)),
            space.working(beside + model.blocks.transient_bytes(size), outside),
        )
    return UnitCosts(
        seconds(model.seconds),
        space.storage_bytes(model.storage_sizes(size)),
        space.deferred_bytes(model.deferred_sizes(size)),
        space.state_bytes(model.state_sizes),
        forward,
        gradient,
        recompute,
        space.working(beside, freed),
        space.working(beside + deferring, outside),
    )
