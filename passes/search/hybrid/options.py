"""The options of a hybrid search: device groups × shards × replicas × micro-batches × schedules.

    groups · replicas · tensor = devices        samples · replicas · micro-batches = batch

Shards are innermost, within a node; replicas around them; groups in the cluster's order, outermost.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from cost_models.cluster import ClusterSpec
from cost_models.units import counted
from passes.search.layer.options import ScheduleOption, in_flight
from runtime.schedules import SCHEDULES

SCHEDULES_TRIED: tuple[tuple[str, int], ...] = (("1f1b", 1), ("interleaved", 2), ("interleaved", 4))
"""(name, stages per group). Schedules that part backward into halves need weight halves without collectives."""
SEARCHED = ("1f1b", "interleaved", "gpipe")
"""Schedules that the search knows, where one is asked for."""


@dataclass(frozen=True)
class GroupOption:
    """One way to arrange the devices and cut the batch."""

    groups: int
    replicas: int
    tensor: int
    samples: int
    """Samples of a micro-batch on each replica."""
    microbatches: int
    schedule: str
    chunks: int

    @property
    def stages(self) -> int:
        """The number of stages."""
        return self.groups * self.chunks

    @property
    def size(self) -> int:
        """Devices of a group."""
        return self.replicas * self.tensor

    @property
    def fill(self) -> float:
        """Share of filling and draining that the schedule does not hide."""
        return self._alone.fill

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """Micro-batches held at once by each stage, counted from the end."""
        return in_flight(self._alone, self.groups, self.stages)

    @cached_property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each group."""
        return tuple(tuple(range(g * self.size, (g + 1) * self.size)) for g in range(self.groups))

    @cached_property
    def places(self) -> tuple[int, ...]:
        """The group of each stage."""
        return tuple(SCHEDULES[self.schedule].positions(self.stages, self.groups))

    @property
    def _alone(self) -> ScheduleOption:
        return ScheduleOption(self.microbatches, self.schedule, self.chunks)

    def __str__(self) -> str:
        found = [counted(self.groups, "group")]
        found += [f"{self.replicas} replicas"] if self.replicas > 1 else []
        found += [f"tensor {self.tensor}"] if self.tensor > 1 else []
        found.append(f"{self.schedule} × {self.chunks}" if self.chunks > 1 else self.schedule)
        found.append(f"{self.microbatches} × {counted(self.samples * self.replicas, 'sample')}")
        return ", ".join(found)


def options(
    cluster: ClusterSpec, batch_size: int, counts: Sequence[int], most_stages: int, schedule: str = "auto"
) -> Iterator[GroupOption]:
    """Yield the options on all devices of ``cluster``. ``counts``: numbers of micro-batches that the model allows."""
    tried = [(name, v) for name, v in SCHEDULES_TRIED if schedule in ("auto", name)] or [(schedule, 1)]
    world = cluster.world_size
    node = math.gcd(*_node_sizes(cluster))
    for tensor in _divisors(node):
        for replicas in _divisors(world // tensor):
            groups = world // (tensor * replicas)
            for m in counts:
                if batch_size % (replicas * m):
                    continue
                samples = batch_size // (replicas * m)
                for name, chunks in tried if groups > 1 else [("1f1b", 1)]:
                    if groups * chunks > most_stages:
                        continue
                    if SCHEDULES[name].check(groups * chunks, groups, m) is not None:
                        continue
                    yield GroupOption(groups, replicas, tensor, samples, m, name, chunks)


def _node_sizes(cluster: ClusterSpec) -> list[int]:
    sizes: dict[int, int] = {}
    for device in cluster.devices:
        sizes[device.node] = sizes.get(device.node, 0) + 1
    return list(sizes.values())


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
