"""Every way to arrange four devices that the hybrid search compares, verified in float64 on real processes.

    python -m benchmarks.verify_matrix --strategy found [--models gpt2,unet] [--only 'tensor 2'] [--json FILE]

The search is made to choose: an arrangement of groups, and a column of its tables (a price of memory, blocks computed again
or not). A line per case, as in ``hybrid_matrix``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.hybrid_matrix import BATCH_SIZE, MICROBATCHES, WORLD, Cases
from cost_models.arrays import FloatArray, IntArray
from cost_models.cluster import ClusterSpec
from partitioner import Plan, partition
from passes.graph.graph import OpGraph
from passes.search.hybrid import search
from passes.search.hybrid.composed import Composed
from passes.search.hybrid.joints import pieces_of
from passes.search.hybrid.options import GroupOption, options
from passes.search.hybrid.ranges import ONCE, SECONDS

CLUSTER = ClusterSpec.local(WORLD)
COLUMNS = ("cheap memory", "dear memory", "computed again")


def arrangements(graph: OpGraph) -> list[GroupOption]:
    """List the options for micro-batches of ``MICROBATCHES``."""
    return list(options(CLUSTER, BATCH_SIZE, [MICROBATCHES], len(pieces_of(graph))))


def make_plan(graph: OpGraph, option: GroupOption, column: str) -> Plan:
    """Plan the model as ``option`` has it."""
    with _only(option), _in_column(column):
        return partition(graph, CLUSTER, strategy="hybrid", batch_size=BATCH_SIZE)


def cases_of(graph: OpGraph) -> Cases:
    """List the cases of a model."""
    return [
        (f"{option}: {column}", partial(make_plan, graph, option, column))
        for option in arrangements(graph)
        for column in COLUMNS
    ]


@contextmanager
def _only(option: GroupOption) -> Iterator[None]:
    def one(*_: Any) -> Iterator[GroupOption]:
        yield option

    with mock.patch.object(search, "options", one):
        yield


@contextmanager
def _in_column(name: str) -> Iterator[None]:
    def fastest(
        self: Composed, microbatches: int, held: int, room_bytes: float
    ) -> tuple[FloatArray, IntArray]:
        prices = len(self.prices)
        column = {"cheap memory": 0, "dear memory": prices - 1, "computed again": prices}[name]
        column = min(column, self.amounts.shape[2] - 1)
        seconds = (self.amounts[SECONDS, :, column] + self.amounts[ONCE, :, column]) / microbatches
        return seconds, np.full(len(seconds), column)

    with mock.patch.object(Composed, "fastest", fastest):
        yield
