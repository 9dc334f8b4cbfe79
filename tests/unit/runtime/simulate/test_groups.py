"""Groups of ranks simulated by their leaders, beside the loop over every rank's own program."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from benchmarks import quotient_scale
from cost_models.cluster import ClusterSpec
from runtime.program.members import GroupPrograms
from runtime.program.order import build_group_programs
from runtime.program.program import Collective, ReduceGradients, Segment, SegmentCost, SegmentGraph, TiedGroup
from runtime.schedules import SCHEDULES
from runtime.simulate.fair_share import Links
from runtime.simulate.flatten import Overheads
from runtime.simulate.simulate import simulate
from runtime.simulate.simulation import Simulation
from tests.support.simulate_ranks import simulate_ranks
from tests.support.uniform_links import UniformLinks
from tests.support.work import calls
from tests.unit.runtime.program.test_between_groups import GROUPS, pipeline
from tests.unit.runtime.schedules.helpers import no_time

MICROBATCHES = 5
SCALE = [1.0, 1.0, 1.0, 1.0, 0.5]


def programs_of(
    graph: SegmentGraph,
    schedule: str = "1f1b",
    microbatches: int = MICROBATCHES,
    tied: tuple[TiedGroup, ...] = (),
) -> GroupPrograms:
    orders = SCHEDULES[schedule].order(graph, microbatches)
    return build_group_programs(graph, orders, microbatches, transfer_seconds=no_time, tied=tied)


def both(groups: GroupPrograms, links: Links, **costs: object) -> tuple[Simulation, Simulation]:
    """Simulate the groups, and every rank's own program."""
    costs = {"microbatch_scale": SCALE, "state_bytes": list(range(groups.graph.world_size)), **costs}
    by_rank = simulate_ranks(groups.all(), groups.graph, links=links, **costs)  # type: ignore[arg-type]
    return simulate(groups, links=links, **costs), by_rank  # type: ignore[arg-type]


def same(by_group: Simulation, by_rank: Simulation) -> None:
    """Both say the same of everything."""
    assert by_group.step_seconds == pytest.approx(by_rank.step_seconds, rel=1e-12)
    assert [[s.text for s in spans] for spans in by_group.timeline] == [
        [s.text for s in spans] for spans in by_rank.timeline
    ]
    for ours, theirs in zip(by_group.timeline, by_rank.timeline, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert (a.start_seconds, a.end_seconds) == pytest.approx(
                (b.start_seconds, b.end_seconds), rel=1e-12
            )
    assert by_group.peak_bytes == by_rank.peak_bytes
    same_bytes(by_group, by_rank)
    for one, other in zip(by_group.transfers, by_rank.transfers, strict=True):
        assert one.message == other.message
        assert one.end_seconds == pytest.approx(other.end_seconds, rel=1e-12)


def same_bytes(by_group: Simulation, by_rank: Simulation) -> None:
    """Both move the same bytes between the same ranks, in as many messages."""
    assert by_group.message_count == by_rank.message_count
    assert by_group.message_bytes == pytest.approx(by_rank.message_bytes)
    assert by_group.pair_bytes == pytest.approx(by_rank.pair_bytes)
    assert by_group.link_bytes == pytest.approx(by_rank.link_bytes)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2), (4, 4), (3, 3, 3)])
def test_groups_that_are_alike_are_simulated_as_their_ranks_are(
    sizes: tuple[int, ...], schedule: str
) -> None:
    same(*both(programs_of(pipeline(sizes), schedule), UniformLinks(10.0)))


@pytest.mark.parametrize("sizes", GROUPS)
def test_groups_of_unlike_sizes_are_never_faster_than_their_ranks(sizes: tuple[int, ...]) -> None:
    """A bundle of few bytes on slow links: its slowest piece holds up the next bundle, which ranks send piece by piece."""
    by_group, by_rank = both(programs_of(pipeline(sizes)), UniformLinks(10.0))
    same_bytes(by_group, by_rank)
    assert by_rank.step_seconds <= by_group.step_seconds * (1 + 1e-12)
    assert by_group.step_seconds <= 1.25 * by_rank.step_seconds


def test_collectives_sums_overheads_and_contention() -> None:
    """Two stages of two replicas of two shards: each shard's replicas sum, and one parameter of all eight ranks."""
    graph = pipeline((4, 4))
    inside = tuple(
        Collective(kind, ((0, 1), (2, 3)), 7.0, backward=kind == "reduce_scatter")
        for kind in ("all_gather", "reduce_scatter")
    )
    first = replace(graph.segments[0], collectives=inside)
    graph = replace(graph, segments=(first, graph.segments[1]))
    tied = tuple(
        TiedGroup((name,), ranks)
        for name, ranks in [("a", (0, 2)), ("a", (1, 3)), ("b", (4, 6)), ("b", (5, 7))]
    )
    tied = (*tied, TiedGroup(("everywhere",), tuple(range(8))))
    bytes_of = {"a": 6.0, "b": 10.0, "everywhere": 20.0}

    def size_bytes(reduction: ReduceGradients) -> float:
        return bytes_of[reduction.parameters[0]]

    same(
        *both(
            programs_of(graph, tied=tied),
            UniformLinks(10.0, 0.25),
            contention=1.5,
            overheads=Overheads(0.01, 0.02, 0.03),
            optimizer_seconds=[1.0] * 8,
            reduce_seconds=lambda reduction: size_bytes(reduction) / 4,
            reduce_bytes=size_bytes,
        )
    )


def test_a_sum_lasts_as_long_as_the_slowest_beside_it() -> None:
    tied = (TiedGroup(("a",), (0, 2)), TiedGroup(("a",), (1, 3)))
    seconds = {(0, 2): 1.0, (1, 3): 5.0}
    by_group, _ = both(
        programs_of(pipeline((4, 1)), tied=tied),
        UniformLinks(1e9),
        reduce_seconds=lambda reduction: seconds[reduction.ranks],
    )
    for rank in range(4):
        (span,) = [span for span in by_group.timeline[rank] if isinstance(span.instruction, ReduceGradients)]
        assert rank in span.instruction.ranks  # type: ignore[union-attr]
        assert span.end_seconds - span.start_seconds == 5.0


@pytest.mark.parametrize("seed", range(12))
def test_random_pipelines_on_clusters_with_shared_links(seed: int) -> None:
    """Up to 32 ranks, groups of one size, on nodes whose ranks share a network card: as the ranks' own programs.

    Collectives inside of stages and sums of their gradients share links with messages.
    """
    dice = random.Random(seed)
    width, stages = dice.choice([(2, 4), (4, 4), (8, 4), (4, 8), (8, 2), (2, 8)])
    nodes = max(1, width * stages // 8)
    cluster = ClusterSpec.preset(dice.choice(["dgx-a100", "dgx-h100"]), nodes=nodes)
    graph = pipeline((width,) * stages)
    scale = dice.choice([1, 10_000, 1_000_000])
    bigger = [
        replace(
            value,
            size_bytes=value.size_bytes * scale,
            pieces=tuple(p._replace(size_bytes=p.size_bytes * scale) for p in value.pieces),
            gradient_pieces=tuple(p._replace(size_bytes=p.size_bytes * scale) for p in value.gradient_pieces),
        )
        for value in graph.values
    ]
    graph = replace(graph, values=tuple(bigger), world_size=cluster.world_size)
    costs = SegmentCost(*(dice.uniform(1e-6, 1e-3) for _ in range(3)), saved_bytes=10)
    talks = dice.uniform(0.0, 0.5) * costs.forward_seconds
    segments = []
    for segment in graph.segments:
        halves = segment.ranks[: width // 2], segment.ranks[width // 2 :]
        inside = Collective("all_reduce", halves, 5.0, False, talks, "tensor")
        segments.append(replace(segment, cost=costs, collectives=(inside,)))
    graph = replace(graph, segments=tuple(segments))
    tied = tuple(
        TiedGroup((f"w{segment.index}",), pair)
        for segment in graph.segments
        for pair in zip(segment.ranks[: width // 2], segment.ranks[width // 2 :], strict=True)
    )
    summing = dice.uniform(1e-6, 1e-2)
    by_group, by_rank = both(
        programs_of(graph, dice.choice(["gpipe", "1f1b"]), tied=tied),
        cluster,
        contention=dice.choice([1.0, 1.3]),
        reduce_seconds=lambda _: summing,
    )
    same_bytes(by_group, by_rank)
    assert by_group.step_seconds == pytest.approx(by_rank.step_seconds, rel=1e-9)


def test_thousands_of_ranks_take_the_work_of_their_groups() -> None:
    """16 stages on 8 and on 256 ranks each: only what lists bytes by rank grows with them."""

    def work(width: int) -> int:
        graph, tied = quotient_scale.pipeline(16, width)
        groups = programs_of(graph, microbatches=64, tied=tuple(tied))
        return calls(lambda: simulate(groups, links=UniformLinks(1e9)))

    assert work(256) <= 4 * work(8)


def test_what_sums_and_collectives_share_is_worked_out_once() -> None:
    """256 ranks in 32 groups of 8: rings, who leads whom and how crowded links are follow from the ranks alone."""
    groups = tuple(tuple(range(first, first + 8)) for first in range(0, 256, 8))

    def work(count: int) -> int:
        inside = tuple(
            Collective("all_reduce", groups, 1.0, n % 2 == 0, 1e-3, "tensor") for n in range(count)
        )
        stage = Segment(0, tuple(range(256)), SegmentCost(1.0, 1.0, 0.0), collectives=inside)
        tied = tuple(TiedGroup((f"w{n}",), ranks) for n in range(count) for ranks in groups)
        graph = SegmentGraph((stage,), (), 256)
        return calls(lambda: simulate(programs_of(graph, microbatches=2, tied=tied), links=UniformLinks(1e9)))

    assert work(16) <= 1.6 * work(2)  # 1.34; 2.42 with an object per group and a ring per sum
