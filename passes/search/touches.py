"""Touches of a tensor: the words in which a search's model says who holds a storage and who reads a value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

BoolArray: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True)
class Touch:
    """The ops, or units of ops, that make a stage hold a storage.

    Any of ``savers`` does; so does a reader whose producer is in another stage, and a producer that is read later, if it
    keeps what it sends.
    """

    savers: tuple[int, ...]
    producer: int = -1
    """The unit that makes it; -1 for what no unit makes (parameters, batch inputs)."""
    readers: tuple[int, ...] = ()
    """The units that read it, without the producer."""
    keeps_sent: bool = True
    """False where the producer's stage does not hold it for being sent."""


@dataclass(frozen=True)
class Crossing:
    """Values with one producer unit and one set of reading units."""

    producer: int
    readers: tuple[int, ...]
