"""States of values: how each depends on the samples of a batch, where the batch is cut into micro-batches.

    Same       the same for every micro-batch: parameters, and what is made of them
    Samples    one part per sample along a dimension; ``joined``: several times all samples, one after the other
    Added      a sum (or mean) over the samples, of which micro-batches have their parts
    Coupled    none of these any more

What is sorted by something of the samples, and what puts it back (``passes.shard.sorted_rows``):

    Ordered    rows of samples in another order, one after the other
    Order      the numbers of those rows
    Inverse    the places to which the rows go back
    Counts     how many rows have each key
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Same:
    """The state of a value that does not depend on the samples. ``counts``: it is 0, 1, 2 … along its samples."""

    counts: bool = False


@dataclass(frozen=True)
class Samples:
    """The state of a value with one part per sample along ``dim``."""

    dim: int
    joined: bool = False


@dataclass(frozen=True)
class Added:
    """The state of a sum over samples."""


@dataclass(frozen=True)
class Coupled:
    """The state of a value after a coupling."""


@dataclass(frozen=True)
class Ordered:
    """The state of rows along dimension 0 in the order of sort ``by``, of ``key``. ``keys``: the key is what they hold."""

    by: str
    key: str
    keys: bool = False


@dataclass(frozen=True)
class SortOrder:
    """The state of the rows' numbers, in the order of sort ``by`` of ``key``, each divided by ``rows`` (of a token)."""

    by: str
    key: str
    rows: int = 1


@dataclass(frozen=True)
class Inverse:
    """The state of the inverse of ``SortOrder``."""

    by: str


@dataclass(frozen=True)
class Counts(Added):
    """The state of the number of rows that have each value of ``key``. ``ends``: added up from the first one on."""

    key: str
    ends: bool = False


State: TypeAlias = Same | Samples | Added | Coupled | Ordered | SortOrder | Inverse
