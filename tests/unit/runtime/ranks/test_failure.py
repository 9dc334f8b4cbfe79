"""Who is to blame, from what the ranks have reported. One store, several monitors, no processes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch.distributed as dist

from cost_models.errors import RankFailureError
from runtime.ranks.failure import FailureMonitor

ENDED = RuntimeError("Connection closed by peer")


@pytest.fixture
def monitors() -> Iterator[list[FailureMonitor]]:
    store = dist.HashStore()
    made = [FailureMonitor(rank, store, 2.0, "test") for rank in range(4)]
    yield made
    for monitor in made:
        monitor.close()


def waits(monitor: FailureMonitor, peers: list[int], instruction: str) -> None:
    monitor._report({"peers": peers, "instruction": instruction})


def test_of_a_collective_the_rank_that_is_not_in_it_is_to_blame(monitors: list[FailureMonitor]) -> None:
    waits(monitors[1], [0, 2, 3], "the loss")
    waits(monitors[3], [0, 1, 2], "the loss")
    said = str(monitors[0].explain(7, [1, 2, 3], "the loss", ENDED))
    assert "rank 2 failed or hangs: rank 0 got no answer for `the loss`" in said
    assert "rank 0 waited on rank 2 for `the loss` in step 7" in said


def test_one_that_waits_elsewhere_leads_to_the_cause(monitors: list[FailureMonitor]) -> None:
    waits(monitors[1], [0, 2, 3], "the loss")
    waits(monitors[2], [3], "<h:0@3")
    monitors[3].report_own(ValueError("planted"))
    said = str(monitors[0].explain(1, [1, 2], "the loss", ENDED))
    assert "rank 3 failed or hangs" in said
    assert "rank 2 itself waited on rank 3" in said
    assert "rank 3 reported: ValueError: planted" in said


def test_one_that_failed_comes_before_those_that_are_silent(monitors: list[FailureMonitor]) -> None:
    monitors[3].report_own(ValueError("planted"))
    assert "rank 3 failed" in str(monitors[0].explain(1, [1, 2, 3], "the loss", ENDED))


def test_a_single_peer_is_given_a_moment_to_say_that_it_waits_itself(monitors: list[FailureMonitor]) -> None:
    """The third rank's end may break both waits at once."""
    late = threading.Timer(0.05, monitors[1]._report, [{"peers": [2], "instruction": "<x:0@2"}])
    late.start()
    monitors[2].report_own(ValueError("planted"))
    text = str(monitors[0].explain(1, [1], "<y:0@1", RuntimeError("closed")))
    late.join()
    assert "rank 2 failed or hangs" in text
    assert "planted" in text


def test_a_circle_ends(monitors: list[FailureMonitor]) -> None:
    waits(monitors[1], [2], "<a:0@2")
    waits(monitors[2], [0, 1], "+wte@0,1,2")
    said = str(monitors[0].explain(1, [1], "<b:0@1", ENDED))
    assert "rank 2 reported: waits on rank 0, 1 for `+wte@0,1,2`: a circle" in said


def test_what_was_raised_is_told_and_taken_back_when_the_next_call_begins(
    monitors: list[FailureMonitor],
) -> None:
    def blame() -> str:
        return str(monitors[0].explain(1, [1], "<h:0@1", ENDED))

    with pytest.raises(ZeroDivisionError), monitors[1].reported():
        raise ZeroDivisionError("planted")
    assert "rank 1 reported: ZeroDivisionError: planted" in blame()
    with monitors[1].reported():
        assert "planted" not in blame()
    other = RankFailureError("rank 3 failed or hangs")
    with pytest.raises(RankFailureError), monitors[1].reported():
        raise other
    assert "reported" not in blame()


def test_a_wait_is_ended_where_a_rank_took_no_part_in_the_same_call(monitors: list[FailureMonitor]) -> None:
    ended = threading.Event()
    waiter, other = monitors[0], monitors[3]
    waiter.describe = lambda _: ([1], "<h:0@1")
    waiter.hang_up = ended.set

    def raise_in_a_call(monitor: FailureMonitor, *, needed: bool) -> None:
        around = monitor.needed() if needed else nullcontext()
        with pytest.raises(ValueError, match="no labels"), monitor.reported(call=True), around:
            raise ValueError("no labels")

    raise_in_a_call(waiter, needed=True)
    raise_in_a_call(other, needed=True)  # all ranks refuse the first call
    raise_in_a_call(other, needed=False)  # the second one's communication is over
    with waiter.reported(call=True):
        waiter.waiting = 7
        assert not ended.wait(1.6)
        waiter.waiting = -1
    with waiter.reported(call=True):
        waiter.waiting = 8
        raise_in_a_call(other, needed=True)
        assert ended.wait(2.5)
        waiter.waiting = -1
    said = str(waiter.explain(3, [3], "<h:0@3", RuntimeError("Application timeout caused pair closure")))
    assert "rank 3 reported: ValueError: no labels" in said
    assert "pair closure" not in said
    assert "timeout_seconds" not in said
