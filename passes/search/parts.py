"""Parts of a cluster: a plan may leave devices out, so none is slower than the best on a part.

    nodes 4 4 4 3        fewer nodes of a kind      4 · 4 4 · 4 4 4 · 3 · 4 3 · 4 4 3
                         fewer devices of each      1 · 2 · 3 of one node, 1 1 1 · 2 2 2 · 3 3 3 of all of a kind, 2 2 of
                                                    all but one
                         a device less              4 4 3 3 · 4 4 4 2, where nodes are unlike
                         as few nodes as hold them  4 1 · 4 2 · … · 4 4 4 1 · 4 4 4 2, where nodes of a kind differ in size

A part is planned as a cluster of its own; what is found there is a placement on the whole one, and simulated on it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeAlias

from cost_models.cluster import ClusterSpec
from cost_models.errors import PartitionerError
from cost_models.units import counted
from passes.lower.candidate import Candidate
from passes.search.provider import Judged, Proposal, Proved, Provider, SolvedT, Valued

MOST_PARTS = 24
"""Ways to leave nodes out up to which all are tried: three kinds of two nodes have 26. Beyond: a node, or all nodes
but those of one kind and some of these. Devices of a kind, of which any number is tried. By hand: a search of each part
takes a second or more."""

Devices: TypeAlias = Mapping[int, int]
"""Node -> how many of its devices are used, from its first on."""


def parts(cluster: ClusterSpec, floor_seconds: Callable[[Sequence[int]], float]) -> list[tuple[int, ...]]:
    """List the ranks of each part of a cluster, but for the whole: of one kind of node first, of the least floor first.

    So what is fast is found before time is up, and others are told by their floors that they are not: few fast devices go
    before many slow ones. ``floor_seconds``: lower bound on a step on some ranks. Workers of this machine have none: they
    share its cores, and each is as fast as it is while all of them are at work.
    """
    if all(entry.host == "localhost" for entry in cluster.nodes):
        return []
    each = cluster.ranks_per_node
    kinds: dict[object, list[int]] = {}
    for node, alike in enumerate(_kinds(cluster)):
        kinds.setdefault((len(each[node]), alike), []).append(node)
    used = [
        *_fewer_nodes(list(kinds.values()), each),
        *_fewer_devices(kinds),
        *_a_device_less(kinds),
        *_filled(kinds),
    ]
    found = {
        tuple(rank for node, ranks in enumerate(each) for rank in ranks[: counts.get(node, 0)])
        for counts in used
    }
    kind_of = {rank: alike for alike, nodes in kinds.items() for node in nodes for rank in each[node]}
    return sorted(
        (ranks for ranks in found if 0 < len(ranks) < cluster.world_size),
        key=lambda own: (len({kind_of[rank] for rank in own}), floor_seconds(own), own),
    )


def _kinds(cluster: ClusterSpec) -> Iterator[object]:
    """Yield of each node what tells its kind, its number of devices aside."""
    for entry in cluster.nodes:
        full = entry.resolved()
        device = full.device.resolved().model_dump_json(exclude={"name", "preset"}) if full.device else ""
        links = full.links.model_dump_json() if full.links else ""
        for _ in entry.names():
            yield device, links


def _fewer_nodes(kinds: Sequence[Sequence[int]], each: Sequence[Sequence[int]]) -> Iterator[Devices]:
    """Yield whole nodes, the first ones of each kind."""
    full = [len(nodes) for nodes in kinds]
    if math.prod(count + 1 for count in full) <= MOST_PARTS:
        chosen = list(itertools.product(*(range(count + 1) for count in full)))
    else:
        alone = [
            [count * (i == k) for i in range(len(full))]
            for k, most in enumerate(full)
            for count in _few(most)
        ]
        without = [[count - (i == k) for i, count in enumerate(full)] for k in range(len(full))]
        chosen = [tuple(counts) for counts in (*alone, *without)]
    for counts in chosen:
        yield {
            node: len(each[node])
            for nodes, count in zip(kinds, counts, strict=True)
            for node in nodes[:count]
        }


def _few(most: int) -> list[int]:
    """List all numbers up to eight, then halves of the most."""
    return [
        count for count in range(1, most + 1) if count <= 8 or count in (most // 4, most // 2, most - 1, most)
    ]


def _fewer_devices(kinds: Mapping[Any, Sequence[int]]) -> Iterator[Devices]:
    """Yield fewer devices of one node, of all nodes of a kind and of all but one. Of nodes that differ in their number, one
    is the largest."""
    largest: dict[object, int] = {}
    for size, alike in kinds:
        largest[alike] = max(size, largest.get(alike, 0))
    for (size, alike), nodes in kinds.items():
        some = {len(nodes), max(1, len(nodes) - 1)} | ({1} if size == largest[alike] else set())
        for count, number in itertools.product(_few(size - 1), some):
            yield dict.fromkeys(nodes[:number], count)


def _a_device_less(kinds: Mapping[Any, Sequence[int]]) -> Iterator[Devices]:
    """Yield everything but one device, of the last node of each kind, where nodes are unlike: of equal ones, a plan that
    suits one device less does not suit the others."""
    if len(kinds) == 1:
        return
    full = {node: size for (size, _), nodes in kinds.items() for node in nodes}
    for (size, _), nodes in kinds.items():
        yield {**full, nodes[-1]: size - 1}


def _filled(kinds: Mapping[Any, Sequence[int]]) -> Iterator[Devices]:
    """Yield any number of devices on as few nodes as hold them, where nodes of a kind differ in their number of devices."""
    nodes_of: dict[object, list[tuple[int, int]]] = {}
    for (size, alike), nodes in kinds.items():
        nodes_of.setdefault(alike, []).extend((size, node) for node in nodes)
    for found in nodes_of.values():
        found.sort(key=lambda own: (-own[0], own[1]))
        if found[0][0] == found[-1][0]:
            continue
        total = sum(size for size, _ in found)
        for count in range(1, total) if total <= MOST_PARTS else _few(total):
            used, left = dict[int, int](), count
            for size, node in found:
                used[node] = min(size, left)
                left -= used[node]
            yield used


@dataclass(frozen=True, eq=False)
class Part:
    """A part of the cluster that a search may look at after the whole."""

    ranks: tuple[int, ...]
    floor_seconds: float
    """Lower bound on a step on its devices."""
    providers: Callable[[], Sequence[Provider[Any]]]
    """Makes the families of pipelines on it."""


@dataclass(frozen=True)
class _OnRanks:
    """An option of a part's search, told from the same of another part."""

    ranks: tuple[int, ...]
    own: object

    def __str__(self) -> str:
        return f"{self.own}, on {counted(len(self.ranks), 'device')}"


class OnPart(Generic[SolvedT]):
    """A provider of pipelines on a part of a cluster, as one on the whole."""

    def __init__(self, own: Provider[SolvedT], ranks: tuple[int, ...], numbers: Sequence[int]) -> None:
        """``own``: on the part; ``ranks``: of the part's devices in the whole; ``numbers``: the rank in the whole of each
        rank that ``own`` speaks of."""
        self.own, self.ranks, self._numbers = own, ranks, numbers
        self.words = f"{own.words}, {counted(len(ranks), 'device')} in all"
        self.objective, self.slack = own.objective, own.slack
        self.quickly_bounded, self.learns = own.quickly_bounded, own.learns

    @property
    def simulated_first(self) -> int:
        """See ``Provider``."""
        return self.own.simulated_first

    def proposals(self, known_seconds: float, room: float, deadline: float) -> Sequence[Proposal[SolvedT]]:
        """Return those of the part."""
        return list(map(self._told_apart, self.own.proposals(known_seconds, room, deadline)))

    def candidate(self, proposal: Proposal[SolvedT]) -> Candidate:
        """Place the part's candidate on its ranks in the whole."""
        return lifted(self.own.candidate(proposal), self._numbers)

    def leaner(
        self, judged: Judged[SolvedT], room: float, known_seconds: float
    ) -> tuple[Proposal[SolvedT], float] | None:
        """Return what the part's provider makes of an overflow."""
        peaks = [judged.simulated.peak_bytes[rank] for rank in self._numbers]
        beside = [judged.simulated.beside_bytes[rank] for rank in self._numbers]
        more = judged.simulated.allocator_bytes and [
            judged.simulated.allocator_bytes[rank] for rank in self._numbers
        ]
        own = replace(judged.simulated, peak_bytes=peaks, beside_bytes=beside, allocator_bytes=more)
        on_part = replace(judged, simulated=own)
        found = self.own.leaner(on_part, room, known_seconds)
        return None if found is None else (self._told_apart(found[0]), found[1])

    def proved(self) -> Proved:
        """Return what is proved about the part."""
        return self.own.proved()

    def valued(self, proposal: Proposal[SolvedT]) -> Valued:
        """Value a proposal on the part, which costs the same on the whole."""
        return self.own.valued(proposal)

    def refusal(self, tried: Sequence[Judged[SolvedT]], room: float) -> PartitionerError:
        """Say why nothing fits the part."""
        return self.own.refusal(tried, room)

    def _told_apart(self, proposal: Proposal[SolvedT]) -> Proposal[SolvedT]:
        ranks = tuple(self._numbers[rank] for rank in proposal.ranks)
        return replace(proposal, option=_OnRanks(self.ranks, proposal.option), ranks=ranks)


def lifted(candidate: Candidate, ranks: Sequence[int]) -> Candidate:
    """Return a candidate of a part as one of the whole. ``ranks``: of the part's devices, in the whole."""

    def whole(group: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(ranks[rank] for rank in group)

    shardings = {
        stage: replace(own, mesh=replace(own.mesh, ranks=whole(own.mesh.ranks)))
        for stage, own in candidate.shardings.items()
    }
    return replace(candidate, groups=tuple(map(whole, candidate.groups)), shardings=shardings)
