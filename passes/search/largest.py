"""The largest number that fits: of samples in a batch, of tokens in a sequence.

largest     1 2 4 8 …       doubled until nothing is found, or ``most`` is reached
bisected    4 ─► 6 ─► 5     between one that fits and one that does not
furthest    4 ─► 7 ─► 8     where a line leads through what numbers overflow by

``found(number)`` says what fits, or None. ``reach(what, number, low)``: the largest number from ``low`` on with which that
fits; those below are not asked for. It is below ``number`` if ``found`` says what only nearly fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

FoundT = TypeVar("FoundT")
BestT = TypeVar("BestT")
Reach: TypeAlias = Callable[[Any, int, int], int]
HALVED_EVERY = 4
"""Numbers after which ``furthest`` looks at the middle: what overflows need not be a line. By hand."""


def no_further(found: object, number: int, low: int) -> int:
    """Return ``number``: where what fits is not tried with others."""
    return number


def largest(
    found: Callable[[int], FoundT | None], most: int, reach: Reach = no_further
) -> tuple[int, FoundT | None]:
    """Return the largest number up to ``most`` with which something is found, and that; 0 and None if not even with 1."""
    low, ahead, doubled, reached = 0, 1, 1, False
    best: FoundT | None = None
    while low < most:
        high = min(low + ahead, most)
        before = low
        low, best = _further(found, low, best, high, reach)
        reached = reached if low == before else low != high
        if low >= high:
            ahead, doubled = doubled, 2 * doubled
            continue
        if best is not None:
            low, best = bisected(found, low, best, high, reach, reached=reached)
        if low < high:
            break
        ahead, doubled = 1, 1
    return low, best


def _further(
    found: Callable[[int], FoundT | None], low: int, best: BestT, number: int, reach: Reach
) -> tuple[int, FoundT | BestT]:
    """Ask for ``number``; return the largest number that is known to fit then, and with what."""
    other = found(number)
    last = low if other is None else reach(other, number, low)
    return (last, best) if other is None or last <= low else (last, other)


def bisected(
    found: Callable[[int], FoundT | None],
    low: int,
    best: FoundT,
    high: int,
    reach: Reach = no_further,
    *,
    reached: bool = False,
) -> tuple[int, FoundT]:
    """Return the largest number between ``low``, with which ``best`` was found, and ``high``, with which nothing is.

    Or one beyond ``high``, if what was found on the way reaches so far. ``reached``: ``low`` is as far as ``best`` reaches;
    then the next is asked for, not the middle: most often it is the end.
    """
    while high - low > 1:
        before, middle = low, low + 1 if reached else (low + high) // 2
        low, best = _further(found, low, best, middle, reach)
        reached = reached if low == before else low != middle
        if low < middle:
            high = middle
    return low, best


def furthest(overflow: Callable[[int], float], low: int, at_low: float, guess: int, most: int) -> int:
    """Return the largest number from ``low`` up to ``most`` that does not overflow, where that is much like a line.

    ``at_low``: what ``low`` overflows by, 0 or less; ``guess``: the number to begin with.
    """
    high, tried = most + 1, 0
    while high - low > 1:
        tried += 1
        if tried % HALVED_EVERY == 0:
            guess = (low + high) // 2 if high <= most else 2 * low
        number = min(max(guess, low + 1), high - 1)
        over = overflow(number)
        slope = (over - at_low) / (number - low)
        if slope <= 0:
            guess = 2 * number
        else:
            guess = (low + number) // 2 if math.isinf(slope) else math.floor(number - over / slope)
        if over <= 0:
            low, at_low = number, over
        else:
            high = number
    return low
