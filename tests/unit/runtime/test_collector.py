"""Pausing the garbage collector: it comes back, whatever happens inside."""

from __future__ import annotations

import gc

import pytest

from runtime.collector import collector_paused


def test_it_is_paused_inside_and_runs_again_outside() -> None:
    assert gc.isenabled()
    with collector_paused():
        assert not gc.isenabled()
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled(), "the inner pause must not end the outer one"
    assert gc.isenabled()


def test_an_error_inside_ends_the_pause() -> None:
    with pytest.raises(ValueError, match="inside"), collector_paused():
        raise ValueError("inside")
    assert gc.isenabled()


def test_a_caller_who_switched_it_off_keeps_it_off() -> None:
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_as_a_decorator_it_pauses_every_call() -> None:
    @collector_paused()
    def paused() -> bool:
        return not gc.isenabled()

    assert paused()
    assert gc.isenabled()
    assert paused()
    assert gc.isenabled()
