"""Equal nodes in a row, and the ways to arrange their devices in equal groups.

    16 devices on 2 nodes        tensor 4, replicas 2        2 groups of 8: ranks 0-7, 8-15

Shards are innermost, within a node; replicas around them; groups in the cluster's order. A group is whole nodes, or lies
within one, or its size divides all devices; what is left over runs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Container, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from cost_models.cluster import ClusterSpec

Mark = tuple[Hashable, int]
"""A word that tells a device apart from others, and its node."""


@dataclass(frozen=True)
class Pool:
    """Nodes in a row that groups are made of: equal ones, or parts of unlike ones."""

    starts: tuple[int, ...]
    """The rank of the first device of each node."""
    each: int
    """Devices of a node."""
    alike: Hashable
    """Equal for pools of equal nodes anywhere in the cluster, however many of their devices are in the pool."""
    marks: tuple[Mark, ...] = ()
    """One per device, where they are unlike, or wired in pairs; empty where all are alike."""

    @property
    def nodes(self) -> int:
        """The number of its nodes."""
        return len(self.starts)

    @property
    def devices(self) -> int:
        """All its devices."""
        return self.nodes * self.each

    def ranks(self, first: int, count: int) -> tuple[int, ...]:
        """Return the ranks of ``count`` devices from the ``first`` on, both counted in the pool."""
        each = self.each
        return tuple(self.starts[at // each] + at % each for at in range(first, first + count))

    def marks_of(self, first: int, count: int) -> tuple[Mark, ...]:
        """Return what tells such devices apart, nodes counted from that of the first; nothing where all are alike."""
        own = self.marks[first : first + count]
        return tuple((kind, node - own[0][1]) for kind, node in own)


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

    @property
    def key(self) -> Hashable:
        """Equal for equal runs of one cluster, quicker than all that tells devices apart."""
        pool = self.pool
        return pool.starts, pool.each, pool.alike, self.replicas, self.tensor, self.groups

    def first(self, group: int) -> int:
        """Return the place of a group's first device in the pool."""
        each, size = self.pool.each, self.size
        if self.pool.devices % size and size < each:
            node, inside = divmod(group, each // size)
            return node * each + inside * size
        return group * size

    def ranks(self, group: int) -> tuple[int, ...]:
        """Return the ranks of one of its groups."""
        return self.pool.ranks(self.first(group), self.size)

    def kind(self, group: int) -> Hashable:
        """Equal for groups of equal devices, arranged and wired alike, anywhere in the cluster."""
        first, each = self.first(group), self.pool.each
        begins = first % each
        place: Hashable = 0 if begins + self.size <= each else (each, begins)
        if self.pool.marks:
            place = self.pool.marks_of(first, self.size)
        return self.pool.alike, self.replicas, self.tensor, place

    def shards_kind(self, group: int, replica: int = 0) -> Hashable:
        """Equal for replicas of equal devices that are wired alike, anywhere in the cluster."""
        first = self.first(group) + replica * self.tensor
        return self.pool.alike, self.tensor, self.pool.marks_of(first, self.tensor)

    def __str__(self) -> str:
        parts = [f"{self.groups} group" + "s" * (self.groups > 1)]
        parts += [f"{self.replicas} replicas"] if self.replicas > 1 else []
        parts += [f"tensor {self.tensor}"] if self.tensor > 1 else []
        return ", ".join(parts)


def fixed_runs(
    cluster: ClusterSpec, groups: Sequence[Sequence[int]], shapes: Sequence[tuple[int, int]]
) -> tuple[Run, ...]:
    """Return runs of the ``groups`` of ranks, in their order. ``shapes``: (replicas, tensor) of each group."""
    marks = [
        ((alike, at if pairs else 0), node)
        for node, (_, alike, each, pairs) in enumerate(_nodes(cluster, range(cluster.world_size)))
        for at in range(each)
    ]
    made, at = [], 0
    for (replicas, tensor), row in groupby(shapes):
        count = len(list(row))
        ranks = tuple(rank for group in groups[at : at + count] for rank in group)
        pool = Pool(ranks, 1, "fixed", tuple(marks[rank] for rank in ranks))
        made.append(Run(pool, replicas, tensor, count))
        at += count
    return tuple(made)


def divisions(cluster: ClusterSpec, used: Sequence[int] | None = None) -> list[tuple[Pool, ...]]:
    """List the ways to see a cluster: as pools of equal nodes in a row and, if these are several, as one of unlike parts.

    Groups from the first have equal devices; from the second they may mix them, and the slowest paces its group.
    ``used``: its ranks that are seen, from the first of each node on; None: all.
    """
    pools: list[Pool] = []
    marks: list[Mark] = []
    nodes = _nodes(cluster, set(range(cluster.world_size) if used is None else used))
    for (alike, each, pairs), row in groupby(nodes, key=lambda node: node[1:]):
        starts = tuple(start for start, *_ in row)
        own: list[Mark] = [
            ((alike, i if pairs else 0), len(pools) + n) for n in range(len(starts)) for i in range(each)
        ]
        pools.append(Pool(starts, each, alike, tuple(own) if pairs else ()))
        marks += own
    if len(pools) == 1:
        return [tuple(pools)]
    each = math.gcd(*(pool.each for pool in pools))
    starts = tuple(start + i for pool in pools for start in pool.starts for i in range(0, pool.each, each))
    return [tuple(pools), (Pool(starts, each, "mixed", tuple(marks)),)]


def _nodes(cluster: ClusterSpec, used: Container[int]) -> Iterator[tuple[int, int, int, bool]]:
    """Yield of each node: its first rank, a number that equal ones share, its devices that are used, whether pairs of them
    have links of their own. Nodes that are not used are left out."""
    number_of: dict[str, int] = {}
    ranks_per_node = iter(cluster.ranks_per_node)
    for entry in cluster.nodes:
        full = entry.resolved()
        device = full.device.resolved().model_dump_json(exclude={"name", "preset"}) if full.device else ""
        links = full.links.model_dump_json() if full.links else ""
        alike = number_of.setdefault(f"{full.count} {device} {links}", len(number_of))
        for _ in entry.names():
            ranks = next(ranks_per_node)
            if ranks[0] in used:
                yield (
                    ranks[0],
                    alike,
                    sum(rank in used for rank in ranks),
                    bool(full.links and full.links.pairs),
                )


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
