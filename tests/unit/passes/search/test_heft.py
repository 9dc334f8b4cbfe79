"""HEFT by hand."""

from __future__ import annotations

import pytest

from passes.search.heft import earliest_finish

DIAMOND = [[], [0], [0], [1, 2]]
"""a -> b, c -> d"""


def sent_in(seconds: float):
    return lambda producer, end, source, target: end + (seconds if source != target else 0.0)


@pytest.mark.parametrize(
    ("message_seconds", "homes"), [(0.5, (0, 0, 1, 1)), (2.0, (0, 0, 0, 0))], ids=["parallel", "together"]
)
def test_branches_go_apart_where_sending_is_quick(message_seconds: float, homes: tuple[int, ...]) -> None:
    every = [range(2)] * 4
    found = earliest_finish(range(4), DIAMOND, [[1.0] * 4] * 2, sent_in(message_seconds), range(4), every)
    assert found == homes


def test_a_unit_stays_where_its_first_task_went() -> None:
    found = earliest_finish(
        range(4), DIAMOND, [[1.0, 1.0, 9.0, 1.0], [9.0] * 4], sent_in(0.0), [0, 1, 0, 2], [range(2)] * 3
    )
    assert found == (0, 0, 0), "c alone would end sooner on device 1"


def test_devices_that_are_forbidden_or_full_are_passed_over() -> None:
    every = [[1], range(2), range(2), range(2)]
    found = earliest_finish(
        range(4), DIAMOND, [[1.0] * 4] * 2, sent_in(0.5), range(4), every, sizes=[2, 2, 2, 2], room=[9, 4]
    )
    assert found == (1, 1, 0, 0)
