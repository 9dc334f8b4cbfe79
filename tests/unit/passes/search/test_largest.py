"""The largest number that fits, against looking at all of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from passes.search.largest import bisected, furthest, largest


@pytest.mark.parametrize("most", [0, 1, 5, 64])
def test_equals_looking_at_all(most: int) -> None:
    for last in range(40):
        found = largest(lambda number, last=last: f"{number}" if number <= last else None, most)  # type: ignore[misc]
        best = min(last, most)
        assert found == (best, f"{best}" if best else None)


def test_between_two_ends_nothing_is_asked_twice() -> None:
    asked: list[int] = []

    def found(number: int) -> str | None:
        asked.append(number)
        return "fits" if number < 100 else None

    assert bisected(found, 64, "fits", 128) == (99, "fits")
    assert len(asked) == len(set(asked)) == 6


def test_what_is_within_reach_is_not_asked_for() -> None:
    """Two ways, of which the first fits up to 50 and the second up to 99."""
    asked: list[int] = []

    def found(number: int) -> int | None:
        asked.append(number)
        return next((last for last in (50, 99) if number <= last), None)

    assert largest(found, 1000, lambda last, number, low: last) == (99, 99)
    assert asked == [1, 51, 101, 100]


def test_what_nearly_fits_says_up_to_where_it_does() -> None:
    asked: list[int] = []

    def found(number: int) -> int:
        asked.append(number)
        return 80

    assert bisected(found, 64, 64, 128, lambda last, number, low: max(last, low)) == (80, 80)
    assert asked == [96, 81]


@pytest.mark.parametrize(
    ("overflow", "last"),
    [
        (lambda n: 3 * n - 100, 33),
        (lambda n: n * n - 100, 10),
        (lambda n: -1, 64),
        (lambda n: -1 if n < 23 else 1, 22),
        (lambda n: float("inf") if n > 8 else n - 20, 8),
        (lambda n: max(n - 200, -3) if n < 40 else n - 60, 60),
    ],
)
def test_the_furthest_along_a_line_or_not(overflow: Callable[[int], float], last: int) -> None:
    assert furthest(overflow, 2, overflow(2), 5, 64) == last
    assert furthest(overflow, 2, overflow(2), 64, 64) == last
