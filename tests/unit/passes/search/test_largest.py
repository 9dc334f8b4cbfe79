"""The largest number that fits, against looking at all of them."""

from __future__ import annotations

import pytest

from passes.search.largest import bisected, largest


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
