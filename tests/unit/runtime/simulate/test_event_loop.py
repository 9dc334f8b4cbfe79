"""The event loop beside one that times a compute again whenever its speed changes."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.simulate.event_loop import EventLoop
from tests.support.matrix import drawn
from tests.support.random_dags import Case, cases
from tests.support.rank_programs import build_programs
from tests.support.simulate_ranks import simulate_ranks
from tests.support.uniform_links import UniformLinks


class TimedAtEachChange(EventLoop):
    """Times a compute again whenever its speed changes, and keeps no event."""

    def _retime(self, rank: int, now: float) -> None:
        if self._running[rank] >= 0 and self._slowdown[rank] != self._slowdown_now(rank):
            self._time_compute(rank, self._left(rank, now), now)


@drawn(100)
@given(cases(), st.sampled_from([1.0, 10.0, 100.0]))
def test_computes_end_when_they_would_if_each_change_of_speed_timed_them_again(
    case: Case, bandwidth: float
) -> None:
    programs = build_programs(
        case.graph, case.orders, case.microbatches, transfer_seconds=case.transfer_seconds
    )
    ends = []
    for loop in (EventLoop, TimedAtEachChange):
        with patch("runtime.simulate.simulate.EventLoop", loop):
            simulation = simulate_ranks(programs, case.graph, links=UniformLinks(bandwidth), contention=1.6)
        ends.append([span.end_seconds for spans in simulation.timeline for span in spans])
    assert ends[0] == pytest.approx(ends[1], rel=1e-9, abs=1e-12)
