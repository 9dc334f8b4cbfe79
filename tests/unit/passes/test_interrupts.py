"""Ctrl-C while a plan is made: at once where nothing is lost by it, else later; twice, it ends the process."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from typing import Any
from unittest import mock

import pytest

from passes import compile as compiling
from passes.compile import Compiled
from passes.interrupts import (
    best_so_far_kept,
    heed_interrupt,
    interrupt_waits,
    keep_from_here,
    may_be_lost,
    quiet_in_finalizers,
)
from passes.search.certificate import Certificate
from passes.search.hybrid import survey
from passes.search.hybrid.search import GroupSearch
from passes.search.judge import Judge
from passes.search.layer.provider import LayerProvider
from passes.search.layer.search import LayerSearch
from tests.unit.passes.search.hybrid.test_directions import cluster, planned


def press() -> None:
    """Press Ctrl-C."""
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def pythons_own() -> Iterator[None]:
    """Start with Python's own handler, which a runner of tests may have replaced."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Pressed:
    """Presses Ctrl-C when it goes."""

    def __del__(self) -> None:
        press()


def test_in_a_finalizer_it_is_heeded_afterwards_and_nothing_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with quiet_in_finalizers(), best_so_far_kept():
        Pressed()
        with pytest.raises(KeyboardInterrupt):
            heed_interrupt()
    assert capsys.readouterr().err == ""


def test_before_anything_is_found_it_ends_the_work_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), best_so_far_kept():
        press()


def test_afterwards_it_waits_for_work_that_may_be_lost() -> None:
    done = []
    with best_so_far_kept() as interrupts:
        keep_from_here()
        press()
        done.append("simulated")
        with may_be_lost(False):
            done.append("needed")
        with pytest.raises(KeyboardInterrupt), may_be_lost():
            done.append("solved")
        heed_interrupt()
        done.append("written")
    assert done == ["simulated", "needed", "written"]
    assert interrupts.asked


def test_within_work_that_may_be_lost_it_ends_that() -> None:
    with best_so_far_kept():
        keep_from_here()
        with pytest.raises(KeyboardInterrupt), may_be_lost():
            press()


def test_it_waits_for_work_that_is_not_to_be_cut() -> None:
    done = []

    def export() -> None:
        with interrupt_waits():
            press()
            with may_be_lost():
                done.append("exported")

    with best_so_far_kept(), pytest.raises(KeyboardInterrupt):
        export()
    assert done == ["exported"]


def test_an_interrupt_that_was_swallowed_is_heeded_later() -> None:
    with best_so_far_kept():
        with suppress(BaseException):  # as a library might
            press()
        with pytest.raises(KeyboardInterrupt):
            heed_interrupt()


def test_the_second_ends_the_process_even_where_the_first_is_caught() -> None:
    with best_so_far_kept():
        keep_from_here()
        press()
        with pytest.raises(SystemExit) as ended, suppress(KeyboardInterrupt):
            press()
    assert ended.value.code == 130


def test_the_handler_is_there_only_within_and_only_where_there_is_no_other() -> None:
    with best_so_far_kept():
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with best_so_far_kept():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def pressed_in(owner: Any, name: str, call: int) -> Any:
    """Press Ctrl-C when the function is called for the ``call``-th time."""
    calls, original = itertools.count(), getattr(owner, name)

    def pressed(*given: Any, **named: Any) -> Any:
        if next(calls) == call:
            press()
        return original(*given, **named)

    return mock.patch.object(owner, name, pressed)


@pytest.mark.parametrize(
    ("where", "status"),
    [
        (lambda: pressed_in(survey, "fastest", 1), "interrupted"),
        (lambda: pressed_in(GroupSearch, "decode", 0), "optimal"),
        (lambda: pressed_in(Judge, "simulate", 0), "optimal"),
        (lambda: pressed_in(Judge, "simulate", 1), "interrupted"),
        (lambda: pressed_in(compiling, "bounded", 0), "optimal"),
        (lambda: pressed_in(compiling, "proved", 0), "optimal"),
    ],
    ids=["solving the second", "decoding", "the first simulation", "the second", "bounding", "proving"],
)
def test_a_plan_comes_of_what_was_found(where: Callable[[], Any], status: str) -> None:
    with where(), best_so_far_kept() as interrupts:
        found: Compiled = planned(cluster())
    assert interrupts.asked
    assert found.outcome.best.fits
    assert found.proof.instructions > 0
    assert found.outcome.certificate.solver_status in (status, "interrupted")
    if status == "interrupted":
        assert found.outcome.certificate.solver_status == "interrupted"


def families(certificate: Certificate) -> set[str]:
    """Name the families whose options a certificate bounds."""
    assert certificate.terms is not None
    known = ("single devices", "mesh")
    options = [term.option for term in certificate.terms.options]
    return {next((name for name in known if option.startswith(name)), "groups") for option in options}


SLOW_LINKS = cluster(between=1e5)


@cache
def uninterrupted() -> Compiled:
    return planned(SLOW_LINKS)


@pytest.mark.parametrize(
    ("where", "named"),
    [
        (lambda: pressed_in(LayerProvider, "proposals", 0), False),
        (lambda: pressed_in(LayerSearch, "solve", 0), False),
        (lambda: pressed_in(LayerProvider, "candidate", 0), True),
    ],
    ids=["beginning", "solving", "simulating"],
)
def test_in_the_second_family_the_plan_is_the_first_s_and_claims_no_more_than_was_searched(
    where: Callable[[], Any], named: bool
) -> None:
    whole = uninterrupted().outcome
    assert {"single devices", "mesh"} <= families(whole.certificate)
    with where(), best_so_far_kept() as interrupts:
        found: Compiled = planned(SLOW_LINKS)
    assert interrupts.asked
    certificate = found.outcome.certificate
    assert found.outcome.best.fits
    assert found.proof.instructions > 0
    assert certificate.solver_status == "interrupted"
    assert families(certificate) == {"groups", *(("single devices",) if named else ())}
    assert len(certificate.space.split("; or ")) == 1 + named
    assert whole.best.step_seconds <= found.outcome.best.step_seconds


@pytest.mark.parametrize("name", ["costs_of", "verify_graph"])
def test_before_the_search_there_is_no_plan(name: str) -> None:
    with pressed_in(compiling, name, 0), pytest.raises(KeyboardInterrupt), best_so_far_kept():
        planned(cluster())
