"""Each schedule as the clock table that a reader checks by eye: rows are ranks, columns units of time.

A table that changes is an order that changed: read it against the schedule's paper before replacing it here.
"""

from __future__ import annotations

from textwrap import dedent

import pytest

from cost_models.errors import DeadlockError
from runtime.program.program import Backward, ComputeOrder, Forward
from runtime.schedules import SCHEDULES, inference_order, list_order
from tests.unit.runtime.schedules.clock_table import table
from tests.unit.runtime.schedules.tools import HALF, UNIT, chain, graph_of

TABLES = {
    ("gpipe", 4, 1, 4): """
        time     0  1  2  3  4  5  6  7  8  9 10 11 12 13
        rank 0  F0 F1 F2 F3  .  .  .  .  .  . B0 B1 B2 B3
        rank 1   . F0 F1 F2 F3  .  .  .  . B0 B1 B2 B3  .
        rank 2   .  . F0 F1 F2 F3  .  . B0 B1 B2 B3  .  .
        rank 3   .  .  . F0 F1 F2 F3 B0 B1 B2 B3  .  .  .
    """,
    ("1f1b", 4, 1, 8): """
        time     0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16 17 18 19 20 21
        rank 0  F0 F1 F2 F3  .  .  . B0 F4 B1 F5 B2 F6 B3 F7 B4  . B5  . B6  . B7
        rank 1   . F0 F1 F2  .  . B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5  . B6  . B7  .
        rank 2   .  . F0 F1  . B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6  . B7  .  .
        rank 3   .  .  . F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7  .  .  .
    """,
    ("interleaved", 2, 2, 4): """
        time      0   1   2   3   4   5   6   7   8   9  10  11  12  13  14  15  16  17
        rank 0  0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1   . 2B2   . 2B3 0B2 0B3
        rank 1    . 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3   .
    """,
    ("interleaved", 2, 2, 5): """
        time      0   1   2   3   4   5   6   7   8   9  10  11  12  13  14  15  16  17  18  19  20  21
        rank 0  0F0 0F1 0F2 2F0 2F1 2F2 2B0 0F3 2B1 0F4 2B2 2F3 0B0 2F4 0B1   . 0B2   . 2B3 2B4 0B3 0B4
        rank 1    . 1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1F3 1B0 1F4 1B1 3F3 1B2 3F4 3B3 3B4 1B3 1B4   .
    """,
    ("zb-h1", 4, 1, 8): """
        time     0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26
        rank 0  F0 F1 F2 F3  .  .  . I0 W0 F4 I1 W1 F5 I2 W2 F6 I3 W3 F7 I4 W4 I5 W5 I6 W6 I7 W7
        rank 1   . F0 F1 F2  .  . I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 F6 I4 W3 F7 I5 W4 I6 W5 I7 W6 W7
        rank 2   .  . F0 F1  . I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 F6 I5 W3 F7 I6 W4 I7 W5 W6 W7
        rank 3   .  .  . F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 F6 I6 W3 F7 I7 W4 W5 W6 W7
    """,
    ("zb-h2", 3, 1, 6): """
        time     0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16 17 18 19
        rank 0  F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5  .  .
        rank 1   . F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5  .
        rank 2   .  . F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5
    """,
    ("zb-v", 2, 2, 4): """
        time      0   1   2   3   4   5   6   7   8   9  10  11  12  13  14  15  16  17  18  19  20  21  22  23  24
        rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3   .
        rank 1    . 1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3
    """,
    ("list", 2, 2, 4): """
        time      0   1   2   3   4   5   6   7   8   9  10  11  12  13  14  15  16  17  18
        rank 0  0F0 0F1 2F0 2F1 0F2 2B0 0F3 0B0 2B1 2F2 0B1   . 2B2 2F3 0B2   . 2B3   . 0B3
        rank 1    . 1F0 1F1 3F0 3B0 3F1 1B0 3B1 1F2 1B1 3F2 3B2 1F3 1B2 3F3 3B3   . 1B3   .
    """,
}


def picture(text: str) -> str:
    return dedent(text).strip("\n").rstrip()


@pytest.mark.parametrize("case", TABLES, ids=lambda case: "-".join(map(str, case)))
def test_schedule(case: tuple[str, int, int, int]) -> None:
    """(schedule, ranks, chunks per rank, micro-batches), every instruction one unit."""
    name, ranks, chunks, microbatches = case
    cost = UNIT if SCHEDULES[name].splits_backward else HALF
    order = SCHEDULES[name].order(chain(name, ranks, chunks, cost), microbatches)
    assert table(order) == picture(TABLES[case])


def test_backward_takes_twice_as_long() -> None:
    order = SCHEDULES["1f1b"].order(chain("1f1b", 2), 3)
    assert table(order, units={"F": 1, "B": 2}) == picture(
        """
        time     0  1  2  3  4  5  6  7  8  9 10 11
        rank 0  F0 F1  .  . B0  = F2 B1  =  . B2  =
        rank 1   . F0 B0  = F1 B1  = F2 B2  =  .  .
        """
    )


def test_greedy_in_halves_wastes_what_zb_h1_fills() -> None:
    order = list_order(chain("list", 4), 8, limits=[4, 3, 2, 1], mode="split")
    assert table(order) == picture(
        """
        time     0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29
        rank 0  F0 F1 F2 F3  .  .  . I0 W0 F4 I1 W1 F5 I2 W2 F6 I3 W3 F7 I4 W4  . I5 W5  . I6 W6  . I7 W7
        rank 1   . F0 F1 F2  .  . I0 W0 F3 I1 W1 F4 I2 W2 F5 I3 W3 F6 I4 W4 F7 I5 W5  . I6 W6  . I7 W7  .
        rank 2   .  . F0 F1  . I0 W0 F2 I1 W1 F3 I2 W2 F4 I3 W3 F5 I4 W4 F6 I5 W5 F7 I6 W6  . I7 W7  .  .
        rank 3   .  .  . F0 I0 W0 F1 I1 W1 F2 I2 W2 F3 I3 W3 F4 I4 W4 F5 I5 W5 F6 I6 W6 F7 I7 W7  .  .  .
        """
    )


def test_two_branches_that_join() -> None:
    """0 feeds 1 and 2, both feed 3: the branches run side by side, which a chain would not allow."""
    graph = graph_of([(0,), (1,), (2,), (3,)], [(0, 1), (0, 2), (1, 3), (2, 3)])
    assert table(inference_order(graph, 3), graph) == picture(
        """
        time     0  1  2  3  4
        rank 0  F0 F1 F2  .  .
        rank 1   . F0 F1 F2  .
        rank 2   . F0 F1 F2  .
        rank 3   .  . F0 F1 F2
        """
    )


def test_members_of_a_group_start_together() -> None:
    graph = graph_of([(0,), (0, 1), (1,)], [(0, 1), (1, 2)])
    assert table(inference_order(graph, 2), graph) == picture(
        """
        time      0   1   2   3   4
        rank 0  0F0 1F0 0F1 1F1   .
        rank 1    . 1F0 2F0 1F1 2F1
        """
    )


def test_an_order_that_cannot_run_has_no_table() -> None:
    order: ComputeOrder = (
        (Forward(0, 0), Backward(0, 0), Forward(0, 1), Backward(0, 1)),
        (Forward(1, 0), Forward(1, 1), Backward(1, 0), Backward(1, 1)),
    )
    with pytest.raises(DeadlockError, match="rank 0 waits before 0B0"):
        table(order)


def test_an_empty_order() -> None:
    assert table(((), ())) == "time\nrank 0\nrank 1"


def test_weight_halves_fill_the_gaps_of_a_device_that_is_revisited() -> None:
    """0 on rank 0 feeds 1 and 2 on ranks 1 and 2, both feed 3 on rank 0 again."""
    graph = graph_of([(0,), (1,), (2,), (0,)], [(0, 1), (0, 2), (1, 3), (2, 3)])
    assert table(SCHEDULES["list-split"].order(graph, 3), graph) == picture(
        """
        time      0   1   2   3   4   5   6   7   8   9  10  11  12  13  14  15  16  17
        rank 0  0F0 0F1 3F0 3I0 3W0 0I0 0W0 3F1 3I1 0F2 0I1 3W1 3F2 3I2 0W1 0I2 3W2 0W2
        rank 1    . 1F0   .   . 1I0 1W0 1F1   .   . 1I1 1W1 1F2   .   . 1I2 1W2   .   .
        rank 2    . 2F0   .   . 2I0 2W0 2F1   .   . 2I1 2W1 2F2   .   . 2I2 2W2   .   .
        """
    )
