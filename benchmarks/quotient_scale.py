"""Programs of groups, their proof and simulation, where those of ranks are too many: seconds and memory of each step.

    python -m benchmarks.quotient_scale                            16 stages of 1,024 ranks, 64 micro-batches, 1F1B
    python -m benchmarks.quotient_scale --stages 8 --width 64 --all-ranks

Each stage is a mesh of replicas by eight: samples split over the replicas, one more dimension over the eight, gradients
summed over the replicas. ``--all-ranks`` makes the programs of all ranks too, and proves those with ``check``.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from typing import TypeVar

from cost_models.cluster import ClusterSpec
from cost_models.layout import Layout, Mesh, Shard
from runtime.check.check import check
from runtime.check.quotient import check_groups, some_of_each
from runtime.mesh.cross_mesh import pieces
from runtime.program.order import build_group_programs
from runtime.program.program import (
    PieceBytes,
    Segment,
    SegmentCost,
    SegmentGraph,
    TiedGroup,
    Value,
)
from runtime.schedules import SCHEDULES
from runtime.simulate.simulate import simulate
from tests.support.simulate_ranks import simulate_ranks

INNER = 8
"""Ranks of a node, over which a layer is split."""

PARAMETERS = 20
"""Parameters of a stage, about two blocks of a transformer."""

Result = TypeVar("Result")


def pipeline(stages: int, width: int) -> tuple[SegmentGraph, tuple[TiedGroup, ...]]:
    """Return a chain of ``stages`` on ``width`` ranks each, all cut alike, and the sums of their gradients."""
    groups = [tuple(range(stage * width, (stage + 1) * width)) for stage in range(stages)]
    cost = SegmentCost(1.0, 1.0, 1.0)
    there, back = _sent(*groups[:2]), _sent(*groups[1::-1])
    values = [
        Value(
            f"h{number}", number, (number + 1,), there[0].size_bytes, True,
            *(tuple(PieceBytes(a + number * width, b + number * width, n) for a, b, n in way) for way in (there, back)),
        )
        for number in range(stages - 1)
    ]  # fmt: skip
    segments = tuple(Segment(index, ranks, cost) for index, ranks in enumerate(groups))
    tied = tuple(
        TiedGroup(tuple(f"stage{stage}.{n}" for n in range(PARAMETERS)), ranks[inner::INNER])
        for stage, ranks in enumerate(groups)
        for inner in range(INNER)
    )
    return SegmentGraph(segments, tuple(values), stages * width), tied


def _sent(home: tuple[int, ...], away: tuple[int, ...]) -> tuple[PieceBytes, ...]:
    split = [
        Layout(Mesh(ranks, (len(ranks) // INNER, INNER), ("replicas", "inner")), (Shard(0), Shard(1)))
        for ranks in (home, away)
    ]
    return tuple(
        PieceBytes(p.source, p.target, 2 * p.elements) for p in pieces((len(home) // INNER, 8192), *split)
    )


def _seconds(source: int, target: int, size_bytes: int) -> float:
    """Return latency and bytes at the rate of one of a node's network cards (``dgx-h100``): 50 GB/s."""
    return 1e-5 + size_bytes / 50e9


def timed(text: str, run: Callable[[], Result]) -> Result:
    """Run, and print how long it took and the most memory that the process has held so far."""
    start = time.process_time()
    found = run()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    print(f"{text:44}{time.process_time() - start:9.2f} CPU s{peak:9.0f} MiB at most", flush=True)
    return found


def main() -> None:
    """Measure the pipeline of the command line."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--stages", type=int, default=16)
    options.add_argument("--width", type=int, default=1024)
    options.add_argument("--microbatches", type=int, default=64)
    options.add_argument("--schedule", default="1f1b")
    options.add_argument("--all-ranks", action="store_true")
    given = options.parse_args()
    timed("imports", lambda: None)
    graph, tied = timed("segments, pieces", lambda: pipeline(given.stages, given.width))
    orders = timed("orders of computes", lambda: SCHEDULES[given.schedule].order(graph, given.microbatches))
    groups = timed(
        "programs of groups",
        lambda: build_group_programs(
            graph, orders, given.microbatches, transfer_seconds=_seconds, tied=tied, one_queue=True
        ),
    )

    def prove(ranks: range | list[int]) -> object:
        return check_groups(
            groups.programs, graph, given.microbatches, member=groups.member, members=ranks, tied=tied,
            one_queue=True,
        )  # fmt: skip

    some = some_of_each(graph)
    print(timed(f"proof by groups, {len(some)} members", lambda: prove(some)))
    cluster = timed("cluster", lambda: ClusterSpec.preset("dgx-h100", nodes=graph.world_size // INNER))
    timed("simulation by groups", lambda: simulate(groups, links=cluster))
    timed(f"proof by groups, {graph.world_size} members", lambda: prove(range(graph.world_size)))
    if given.all_ranks:
        programs = timed("programs of all ranks", groups.all)
        timed(
            "proof by all ranks",
            lambda: check(programs, graph, given.microbatches, tied=tied, one_queue=True),
        )
        timed("simulation of all ranks", lambda: simulate_ranks(programs, graph, links=cluster))


if __name__ == "__main__":
    main()
