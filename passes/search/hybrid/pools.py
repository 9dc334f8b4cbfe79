"""Equal nodes in a row, and the ways to arrange their devices in equal groups.

    16 devices on 2 nodes        tensor 4, replicas 2        2 groups of 8: ranks 0-7, 8-15

Shards are innermost, within a node; replicas around them; groups in the cluster's order. A group is whole nodes, or lies
within one, or its size divides all devices; what is left over runs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from cost_models.cluster import ClusterSpec

Mark = tuple[Hashable, int]
"""A word that tells a device apart from others, and its node."""


@dataclass(frozen=True)
class Pool:
    """Nodes in a row that groups are made of: equal ones, or parts of unlike ones."""

    first: int
    """The rank of its first device."""
    nodes: int
    each: int
    """Devices of a node."""
    alike: Hashable
    """Equal for pools of equal nodes anywhere in the cluster."""
    marks: tuple[Mark, ...] = ()
    """One per device, where they are unlike, or wired in pairs; empty where all are alike."""

    @property
    def devices(self) -> int:
        """All its devices."""
        return self.nodes * self.each

    def marks_of(self, ranks: Sequence[int]) -> tuple[Mark, ...]:
        """Return what tells devices apart, nodes counted from that of the first."""
        own = [self.marks[rank - self.first] for rank in ranks]
        return tuple((kind, node - own[0][1]) for kind, node in own)

    def windows(self, size: int) -> list[tuple[int, ...]]:
        """List the unlike runs of ``size`` devices within a node: the first of each kind."""
        if not self.marks:
            return [tuple(range(self.first, self.first + size))]
        found: dict[object, tuple[int, ...]] = {}
        for start in range(self.devices):
            if start % self.each + size <= self.each:
                ranks = tuple(range(self.first + start, self.first + start + size))
                found.setdefault(self.marks_of(ranks), ranks)
        return list(found.values())


@dataclass(frozen=True)
class Run:
    """Equal groups of a pool's devices, one behind the other."""

    pool: Pool
    replicas: int
    tensor: int
    groups: int

    @property
    def size(self) -> int:
        """Devices of a group."""
        return self.replicas * self.tensor

    def ranks(self, group: int) -> tuple[int, ...]:
        """Return the ranks of one of its groups."""
        each, size, first = self.pool.each, self.size, self.pool.first
        if self.pool.devices % size and size < each:
            node, inside = divmod(group, each // size)
            first += node * each + inside * size
        else:
            first += group * size
        return tuple(range(first, first + size))

    def kind(self, group: int) -> Hashable:
        """Equal for groups of equal devices, arranged and wired alike, anywhere in the cluster."""
        ranks = self.ranks(group)
        begins = (ranks[0] - self.pool.first) % self.pool.each
        place: Hashable = 0 if begins + self.size <= self.pool.each else begins
        if self.pool.marks:
            place = self.pool.marks_of(ranks)
        return self.pool.alike, self.replicas, self.tensor, place

    def shards_kind(self, group: int) -> Hashable:
        """Equal for groups whose first replicas are of equal devices and wired alike."""
        marks = self.pool.marks_of(self.ranks(group)[: self.tensor]) if self.pool.marks else ()
        return self.pool.alike, self.tensor, marks

    def __str__(self) -> str:
        parts = [f"{self.groups} group" + "s" * (self.groups > 1)]
        parts += [f"{self.replicas} replicas"] if self.replicas > 1 else []
        parts += [f"tensor {self.tensor}"] if self.tensor > 1 else []
        return ", ".join(parts)


def divisions(cluster: ClusterSpec) -> list[tuple[Pool, ...]]:
    """List the ways to see a cluster: as pools of equal nodes in a row and, if these are several, as one of unlike parts.

    Groups from the first have equal devices; from the second they may mix them, and the slowest paces its group.
    """
    nodes = list(_nodes(cluster))
    pools: list[Pool] = []
    marks: list[Mark] = []
    for (alike, each, pairs), row in groupby(nodes):
        count, first = len(list(row)), len(marks)
        own: list[Mark] = [
            ((alike, i if pairs else 0), len(pools) + n) for n in range(count) for i in range(each)
        ]
        pools.append(Pool(first, count, each, alike, tuple(own) if pairs else ()))
        marks += own
    if len(pools) == 1:
        return [tuple(pools)]
    each = math.gcd(*(pool.each for pool in pools))
    return [tuple(pools), (Pool(0, len(marks) // each, each, "mixed", tuple(marks)),)]


def _nodes(cluster: ClusterSpec) -> Iterator[tuple[int, int, bool]]:
    """Yield of each node: equal for equal ones, its devices, whether pairs of them have links of their own."""
    number_of: dict[str, int] = {}
    for entry in cluster.nodes:
        full = entry.resolved()
        device = full.device.resolved().model_dump_json(exclude={"name", "preset"}) if full.device else ""
        links = full.links.model_dump_json() if full.links else ""
        alike = number_of.setdefault(f"{full.count} {device} {links}", len(number_of))
        for _ in entry.names():
            yield alike, full.count or 1, bool(full.links and full.links.pairs)


def runs(pool: Pool, samples: int) -> Iterator[Run]:
    """Yield the ways to arrange a pool's devices for micro-batches of ``samples``: each replica takes equally many."""
    for tensor in range(1, pool.each + 1):
        shared = pool.each % tensor == 0
        if not shared and tensor & (tensor - 1):
            continue
        for replicas in range(1, min(samples, pool.devices // tensor) + 1):
            if samples % replicas:
                continue
            size = replicas * tensor
            if shared and pool.devices % size == 0:
                groups = pool.devices // size
            elif size <= pool.each:
                groups = pool.nodes * (pool.each // size)
            elif size % pool.each == 0 and shared:
                groups = pool.nodes // (size // pool.each)
            else:
                continue
            if groups:
                yield Run(pool, replicas, tensor, groups)
