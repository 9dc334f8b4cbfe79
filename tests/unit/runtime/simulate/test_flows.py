"""Sums of gradients, and collectives inside of computes, on links that messages take too."""

from __future__ import annotations

import pytest

from cost_models.links import Link, Path, fair_rates
from runtime.program.program import (
    Collective,
    Forward,
    ReduceGradients,
    Segment,
    SegmentCost,
    SegmentGraph,
    TiedGroup,
    Value,
)
from runtime.simulate.simulation import Simulation
from tests.support.rank_programs import build_programs
from tests.support.simulate_ranks import simulate_ranks
from tests.unit.runtime.schedules.helpers import no_time


class Wires:
    """Ranks 0 to 3 on a shared wire of 10 bytes per second, the others on one of their own."""

    def __init__(self) -> None:
        self.links = {name: Link(name, 10.0, 0.0) for name in ("shared", "apart")}

    def path(self, a: int, b: int) -> Path:
        return Path.over([self.links["shared" if max(a, b) < 4 else "apart"]])


def run(*computing: Segment, tied: tuple[TiedGroup, ...] = (), message_bytes: int = 0) -> Simulation:
    """A message from rank 0 to 1 after a second, beside segments that compute from the start, and sums of 4 s."""
    message = Value("x", 0, (1,), message_bytes, needs_grad=False)
    first = Segment(0, (0,), SegmentCost(1.0, 0.0, 0.0), has_backward=False)
    second = Segment(1, (1,), SegmentCost(0.0, 0.0, 0.0), has_backward=False)
    graph = SegmentGraph((first, second, *computing), (message,), 6)
    led = {segment.rank: segment.index for segment in graph.segments}
    orders = tuple((Forward(led[rank], 0),) if rank in led else () for rank in range(6))
    programs = build_programs(graph, orders, 1, transfer_seconds=no_time, tied=tied)
    return simulate_ranks(programs, graph, links=Wires(), reduce_seconds=lambda _: 4.0)


def talking(ranks: tuple[int, int], seconds: float) -> Segment:
    """A forward of 10 s, of which collectives take ``seconds``."""
    inside = Collective("all_reduce", (ranks,), 1.0, backward=False, seconds=seconds, axis="tensor")
    return Segment(2, ranks, SegmentCost(10.0, 0.0, 0.0), has_backward=False, collectives=(inside,))


def test_a_sum_shares_its_links_with_a_message() -> None:
    """A quarter of the sum is done when the message comes; then both have half of the wire."""
    simulation = run(tied=(TiedGroup(("w",), (2, 3)),), message_bytes=40)
    (summing,) = simulation.timeline[2]
    assert (summing.start_seconds, summing.end_seconds) == (0.0, 7.0)
    (message,) = simulation.transfers
    assert (message.start_seconds, message.end_seconds) == (1.0, 8.0)


def test_a_sum_elsewhere_takes_its_seconds() -> None:
    simulation = run(tied=(TiedGroup(("w",), (4, 5)),), message_bytes=40)
    assert isinstance(simulation.timeline[4][0].instruction, ReduceGradients)
    assert simulation.timeline[4][0].end_seconds == 4.0
    assert simulation.transfers[0].end_seconds == 5.0


@pytest.mark.parametrize(("seconds", "message_bytes"), [(3.0, 90), (10.0, 90), (0.0, 90)])
def test_a_compute_and_a_message_slow_each_other_by_what_it_communicates(
    seconds: float, message_bytes: int
) -> None:
    """From 1 s on, both run at 1 / (1 + φ) of their speed, and both have 9 s left."""
    share = seconds / 10.0
    simulation = run(talking((2, 3), seconds), message_bytes=message_bytes)
    end = 1.0 + 9.0 * (1.0 + share)
    assert simulation.timeline[2][0].end_seconds == pytest.approx(end, rel=1e-12)
    assert simulation.timeline[3][0] == simulation.timeline[2][0]
    assert simulation.transfers[0].end_seconds == pytest.approx(end, rel=1e-12)


def test_a_compute_goes_on_at_its_speed_when_the_message_is_over() -> None:
    """22 bytes take 4.4 s at half the wire; of the compute, which only communicates, 1 + 4.4 / 2 s are done then."""
    simulation = run(talking((2, 3), 10.0), message_bytes=22)
    assert simulation.transfers[0].end_seconds == pytest.approx(5.4, rel=1e-12)
    assert simulation.timeline[2][0].end_seconds == pytest.approx(5.4 + 10.0 - 3.2, rel=1e-12)


def test_a_compute_whose_collectives_go_elsewhere_disturbs_nobody() -> None:
    simulation = run(talking((4, 5), 10.0), message_bytes=90)
    assert simulation.timeline[4][0].end_seconds == 10.0
    assert simulation.transfers[0].end_seconds == 10.0


def test_a_transfer_counts_as_many_as_its_weight() -> None:
    wires = Wires()
    path = wires.path(0, 1)
    assert fair_rates([path, path], wires.links, [3.0, 1.0]) == (7.5, 2.5)
    assert fair_rates([path, path], wires.links) == (5.0, 5.0)
