"""Placements as numbers, so that layouts over several axes are products of arrays.

On one axis a produced value is R = 0, P = 1, S(d) = 2 + d; a trained parameter that is whole is 14 where every reader's
gradient of it is whole too, 15 where it stays each rank's part of a sum until the step's end. A need is R = 0, R~ = 1 (its
gradient is a part of a sum), P = 2, S(d) = 3 + d. Over several axes a code has four bits per axis, axis 0 in the highest.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from cost_models.layout import Partial, Placement, Replicate, Shard
from passes.shard.words import Need, Placements

BITS = 4
WHOLE = 14
DEFERRED = 15


def source_code(placement: Placement) -> int:
    if isinstance(placement, Shard):
        return 2 + placement.dim
    return 1 if isinstance(placement, Partial) else 0


def need_code(need: Need) -> int:
    if isinstance(need.placement, Shard):
        return 3 + need.placement.dim
    if isinstance(need.placement, Partial):
        return 2
    return 1 if need.partial_gradient else 0


def combine(codes: Sequence[int]) -> int:
    total = 0
    for code in codes:
        total = total << BITS | code
    return total


def digits(code: int, axes: int) -> tuple[int, ...]:
    return tuple(code >> BITS * (axes - 1 - axis) & DEFERRED for axis in range(axes))


@cache
def source_placements(code: int, axes: int) -> Placements:
    """Placements that the code of a produced value says; a deferred parameter is whole."""
    return tuple(_source(digit) for digit in digits(code, axes))


@cache
def needs_of(code: int, axes: int) -> tuple[Need, ...]:
    return tuple(_need(digit) for digit in digits(code, axes))


@cache
def left_in_parts(need: int, axes: int) -> int:
    """Return the axes along which a reader leaves parts of a gradient, as bits."""
    return sum(1 << axis for axis, own in enumerate(needs_of(need, axes)) if own.partial_gradient)


@cache
def summed_later(source: int, axes: int) -> int:
    """Return the axes along which a parameter's gradient is summed at the step's end, as bits."""
    return sum(1 << axis for axis, digit in enumerate(digits(source, axes)) if digit == DEFERRED)


def _source(digit: int) -> Placement:
    if digit in (0, WHOLE, DEFERRED):
        return Replicate()
    return Partial() if digit == 1 else Shard(digit - 2)


def _need(digit: int) -> Need:
    if digit < 2:
        return Need(Replicate(), digit == 1)
    return Need(Partial() if digit == 2 else Shard(digit - 3))
