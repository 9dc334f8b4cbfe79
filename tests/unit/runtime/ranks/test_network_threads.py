"""Which threads are found, and what is done to them; on a thread of our own under Gloo's name."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator

import pytest

from runtime.ranks import network_threads as under_test


@pytest.fixture
def named_thread() -> Iterator[int]:
    ready, stop = threading.Event(), threading.Event()

    def run() -> None:
        pr_set_name = 15
        ctypes.CDLL(None).prctl(pr_set_name, under_test.GLOO_NETWORK_THREAD.encode(), 0, 0, 0)
        ready.set()
        stop.wait(20)

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(20)
    assert thread.native_id is not None
    yield thread.native_id
    stop.set()
    thread.join()


def test_only_the_network_thread_changes(named_thread: int) -> None:
    assert under_test.network_threads() == [named_thread]
    under_test.let_compute_go_first()
    assert os.sched_getscheduler(named_thread) == os.SCHED_BATCH
    assert os.sched_getscheduler(threading.get_native_id()) == os.SCHED_OTHER


def test_a_policy_that_somebody_chose_stays(named_thread: int) -> None:
    os.sched_setscheduler(named_thread, os.SCHED_IDLE, os.sched_param(0))
    under_test.let_compute_go_first()
    assert os.sched_getscheduler(named_thread) == os.SCHED_IDLE


def test_a_refusal_is_no_failure(named_thread: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    under_test.let_compute_go_first()
    assert os.sched_getscheduler(named_thread) == os.SCHED_OTHER
