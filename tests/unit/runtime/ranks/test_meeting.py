"""Ranks (threads here) that compare notes through one store."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from cost_models.errors import RankFailureError, UsageError
from runtime.ranks.meeting import Meeting


def together(count: int, act: Callable[[Meeting], Any], *, absent: int = -1) -> list[Any]:
    """What ``act`` returns, or raises, on each rank."""
    store = dist.HashStore()

    def run(rank: int) -> Any:
        try:
            return None if rank == absent else act(Meeting(store, rank, count, 1, timeout_seconds=5.0))
        except Exception as error:  # noqa: BLE001 - it is what the test looks at
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def test_rank_0_judges_and_everybody_gets_the_verdict() -> None:
    assert together(4, lambda m: m.decide("sum", m.rank * 10, sum)) == [60] * 4
    assert together(1, lambda m: m.decide("alone", 7, list)) == [[7]]


def test_what_rank_0_makes_is_told_to_all() -> None:
    made: list[int] = []

    def make() -> dict[str, int]:
        made.append(1)
        return {"plan": 3}

    assert together(3, lambda m: m.tell("plan", make)) == [{"plan": 3}] * 3
    assert made == [1]


def test_a_rank_that_fails_is_named_by_all_others_and_raises_its_own_error() -> None:
    def act(meeting: Meeting) -> str:
        with meeting.all_or_none("build"):
            if meeting.rank == 2:
                raise UsageError("no weights", ["the disk is empty"])
        return "built"

    first, second, third = together(3, act)
    assert isinstance(third, UsageError)
    for other in (first, second):
        assert isinstance(other, RankFailureError)
        assert "rank 2 cannot take part" in other.what
        assert "because: the disk is empty" in "\n".join(other.because)


def test_nothing_fails_where_nobody_fails() -> None:
    def act(meeting: Meeting) -> str:
        with meeting.all_or_none("build"):
            time.sleep(0.01 * meeting.rank)
        return "built"

    assert together(3, act) == ["built"] * 3


def test_a_rank_that_does_not_come_is_named() -> None:
    started = time.monotonic()
    first, absent, last = together(3, lambda m: m.decide("sum", 1, sum, timeout_seconds=0.3), absent=1)
    assert absent is None
    assert isinstance(first, RankFailureError)
    assert "rank 0 waited 0.3 s in vain for rank 1" in first.what
    assert isinstance(last, RankFailureError)
    assert "for rank 0" in last.what
    assert time.monotonic() - started < 4.0


def test_a_process_on_its_own_is_told_how_to_start_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UsageError, match="the environment lacks RANK"):
        Meeting.join()
