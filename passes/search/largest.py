"""The largest number that fits: of samples in a batch, of tokens in a sequence. ``found(number)`` says what fits, or None.

largest     1 2 4 8 …       doubled until nothing is found, or ``most`` is reached
bisected    4 ─► 6 ─► 5     between one that fits and one that does not
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

FoundT = TypeVar("FoundT")


def largest(found: Callable[[int], FoundT | None], most: int) -> tuple[int, FoundT | None]:
    """Return the largest number up to ``most`` with which something is found, and that; 0 and None if not even with 1."""
    low, best, high = 0, None, 1
    while low < most:
        other = found(high)
        if other is None:
            return (low, None) if best is None else bisected(found, low, best, high)
        low, best, high = high, other, min(2 * high, most)
    return low, best


def bisected(found: Callable[[int], FoundT | None], low: int, best: FoundT, high: int) -> tuple[int, FoundT]:
    """Return the largest number between ``low``, with which ``best`` was found, and ``high``, with which nothing is."""
    while high - low > 1:
        middle = (low + high) // 2
        other = found(middle)
        low, best, high = (low, best, middle) if other is None else (middle, other, high)
    return low, best
