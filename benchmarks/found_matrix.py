"""Every way to arrange four devices that the hybrid search compares, verified in float64 on real processes.

    python -m benchmarks.verify_matrix --strategy found [--models gpt2,unet] [--only 'tensor 2'] [--json FILE]

The search is made to choose: an arrangement of groups, and a way to run all stages (a price of memory, and how many blocks
are computed again). A line per case, as in ``hybrid_matrix``.

    4 equal devices     every arrangement in every way
    2 + 2, 1 + 3        unlike workers (``unlike_clusters``): arrangements of all four whose groups are unlike, or mixed, in
                        one way each; the ranks of the first group are in brackets
    found               nothing is made: the search decides, with memory enough, and with devices that have less of it
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.hybrid_matrix import BATCH_SIZE, MICROBATCHES, WORLD, Cases
from benchmarks.unlike_clusters import THREE_KINDS, UNLIKE, with_less_memory
from cost_models.cluster import ClusterSpec
from cost_models.errors import InternalError
from partitioner import Plan, partition
from passes.graph.graph import OpGraph
from passes.search import place
from passes.search.hybrid import search
from passes.search.hybrid.options import GroupOption, options
from passes.search.hybrid.pools import divisions
from passes.search.hybrid.recipes.joints import pieces_of
from passes.search.hybrid.recipes.mixes import Fastest, Mixes

CLUSTER = ClusterSpec.local(WORLD)
WAYS = ("cheap memory", "dear memory", "half computed again", "computed again")
SHORT, SHORT_BATCH_SIZE = 0.75, 10 * BATCH_SIZE
"""Memory of devices that are short of it, of what the found plan takes: by hand, some tiny models fit in no less. No device
has less than a MiB, so there are more samples."""


def arrangements(graph: OpGraph, cluster: ClusterSpec = CLUSTER) -> list[GroupOption]:
    """List the options for micro-batches of ``MICROBATCHES``."""
    pieces = len(pieces_of(graph))
    return list(options(divisions(cluster), BATCH_SIZE, [MICROBATCHES], pieces, lambda *_: 1.0))


def unlike_arrangements(graph: OpGraph, cluster: ClusterSpec) -> list[GroupOption]:
    """List those of all devices whose groups are unlike, or have unlike devices; of several orders that read alike, one."""
    found: dict[str, GroupOption] = {}
    speeds = [device.model for device in cluster.devices]
    for option in arrangements(graph, cluster):
        mixed = any(len({speeds[rank] for rank in group}) > 1 for group in option.ranks)
        if sum(map(len, option.ranks)) == cluster.world_size and (mixed or len(option.runs) > 1):
            found.setdefault(str(option), option)
    return list(found.values())


def make_plan(graph: OpGraph, option: GroupOption, way: str, cluster: ClusterSpec = CLUSTER) -> Plan:
    """Plan the model as ``option`` has it. Raises InternalError if the plan is another."""
    with _only(option), _in_way(way):
        plan = find_plan(graph, cluster)
    groups = {stage.devices for stage in plan.stages}
    if groups != set(option.ranks):
        raise InternalError(f"{option} was planned on the groups {sorted(groups)}")
    return plan


def find_plan(graph: OpGraph, cluster: ClusterSpec, **options: Any) -> Plan:
    """Plan the model as the search finds best."""
    return partition(graph, cluster, **{"strategy": "hybrid", "batch_size": BATCH_SIZE, **options})


def find_short_plan(graph: OpGraph, cluster: ClusterSpec) -> Plan:
    """Plan the model where every device has less memory than the best plan takes of it."""
    many = {"batch_size": SHORT_BATCH_SIZE, "microbatches": MICROBATCHES}
    most = find_plan(graph, cluster, **many)
    return find_plan(graph, with_less_memory(cluster, most, SHORT), **many)


def cases_of(graph: OpGraph) -> Cases:
    """List the cases of a model."""
    return [
        *((f"{option}: {way}", partial(make_plan, graph, option, way)) for option in arrangements(graph) for way in WAYS),
        *(
            (f"{name} {option.ranks[0]} first, {option}: {way}", partial(make_plan, graph, option, way, cluster))
            for name, cluster in UNLIKE.items()
            for option, way in zip(unlike_arrangements(graph, cluster), itertools.cycle(WAYS), strict=False)
        ),
        *(
            (f"{name} found{words}", partial(find, graph, cluster))
            for name, cluster in {"4": CLUSTER, **UNLIKE, **THREE_KINDS}.items()
            for words, find in (("", find_plan), (", short of memory", find_short_plan))
        ),
    ]  # fmt: skip


@contextmanager
def _only(option: GroupOption) -> Iterator[None]:
    """Let the search know one option, on the whole cluster, and neither other families nor recipes of a name."""

    def one(*_: Any) -> Iterator[GroupOption]:
        yield option

    def one_family(judge: Any, request: Any, groups: Any, discovery: Any) -> list[Any]:
        return [groups]

    with (
        mock.patch.object(search, "options", one),
        mock.patch.multiple(place, _providers=one_family, parts=_none, known_recipes=_none),
    ):
        yield


def _none(*_: Any) -> tuple[()]:
    return ()


@contextmanager
def _in_way(name: str) -> Iterator[None]:
    def fastest(self: Mixes, room_bytes: float, most_seconds: float = np.inf) -> Fastest:
        kept = [way for way, (_, again) in enumerate(self.ways) if not again]
        anew = [way for way, (_, again) in enumerate(self.ways) if again] or kept
        rest = {"dear memory": kept[-1], "computed again": anew[0]}.get(name, kept[0])
        first = anew[0] if name == "half computed again" else rest
        count = np.ceil(self.blocks / 2).astype(np.int64)
        every = np.full(len(count), rest), np.full(len(count), first)
        return Fastest(self.seconds[:, rest], *every, count)

    with mock.patch.object(Mixes, "fastest", fastest):
        yield
