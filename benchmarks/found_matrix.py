"""Every way to arrange four devices that the hybrid search compares, verified in float64 on real processes.

    python -m benchmarks.verify_matrix --strategy found [--models gpt2,unet] [--only 'tensor 2'] [--json FILE]

The search is made to choose: an arrangement of groups, and a way to run all stages (a price of memory, and how many blocks
are computed again). A line per case, as in ``hybrid_matrix``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.hybrid_matrix import BATCH_SIZE, MICROBATCHES, WORLD, Cases
from cost_models.cluster import ClusterSpec
from partitioner import Plan, partition
from passes.graph.graph import OpGraph
from passes.search.hybrid import search
from passes.search.hybrid.options import GroupOption, options
from passes.search.hybrid.pools import divisions
from passes.search.hybrid.recipes.joints import pieces_of
from passes.search.hybrid.recipes.mixes import Fastest, Mixes

CLUSTER = ClusterSpec.local(WORLD)
WAYS = ("cheap memory", "dear memory", "half computed again", "computed again")


def arrangements(graph: OpGraph) -> list[GroupOption]:
    """List the options for micro-batches of ``MICROBATCHES``."""
    pieces = len(pieces_of(graph))
    return list(options(divisions(CLUSTER), BATCH_SIZE, [MICROBATCHES], pieces, lambda *_: 1.0))


def make_plan(graph: OpGraph, option: GroupOption, way: str) -> Plan:
    """Plan the model as ``option`` has it."""
    with _only(option), _in_way(way):
        return partition(graph, CLUSTER, strategy="hybrid", batch_size=BATCH_SIZE)


def cases_of(graph: OpGraph) -> Cases:
    """List the cases of a model."""
    return [
        (f"{option}: {way}", partial(make_plan, graph, option, way))
        for option in arrangements(graph)
        for way in WAYS
    ]


@contextmanager
def _only(option: GroupOption) -> Iterator[None]:
    def one(*_: Any) -> Iterator[GroupOption]:
        yield option

    with mock.patch.object(search, "options", one):
        yield


@contextmanager
def _in_way(name: str) -> Iterator[None]:
    def fastest(self: Mixes, _: float) -> Fastest:
        kept = [way for way, (_, again) in enumerate(self.ways) if not again]
        anew = [way for way, (_, again) in enumerate(self.ways) if again] or kept
        rest = {"dear memory": kept[-1], "computed again": anew[0]}.get(name, kept[0])
        first = anew[0] if name == "half computed again" else rest
        count = np.ceil(self.blocks / 2).astype(np.int64)
        every = np.full(len(count), rest), np.full(len(count), first)
        return Fastest(self.seconds[:, rest], *every, count)

    with mock.patch.object(Mixes, "fastest", fastest):
        yield
