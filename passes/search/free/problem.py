"""The free placement as numbers: units, what they send each other, devices, links. No graph, no torch.

Words
    unit      ops that share a device; numbered along the program's order
    net       the values of one unit that one set of other units reads; each is sent once to every device that reads it
    tie       state that several units read (tied weights): every device that has one of them holds a copy, and their
              gradients are summed once per step

Surrogate of the step, in seconds; all per step, so micro-batches are already counted:

    load(d) = Σ seconds[d, u] over its units + Σ pair(e, d, d') over its nets and what it reads
            + its part of the sums of ties
    pair(e, a, b) = messages[e] · latency[a, b] + bytes[e] · seconds_per_byte[a, b]
              charged to both ends a and b, activations and gradients together
    S       = max over devices of load(d)                                  the busiest device, communication included

Bytes of a device: its units' state and saved activations, a copy of every tie that it reads, and what it receives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from cost_models.arrays import FloatArray

BoolArray: TypeAlias = NDArray[np.bool_]

MEMORY_TOLERANCE = 1e-9
"""Relative slack in memory comparisons, so that sums in another order do not change the answer."""


@dataclass(frozen=True)
class Net:
    """Values that one unit sends to others. ``readers``: ascending, without the producer, at least one."""

    producer: int
    readers: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class FreeProblem:
    """Placement problem of one number of micro-batches. n units, E nets, T ties, K devices."""

    seconds: FloatArray
    """[K, n] forward + backward of all micro-batches, and the optimizer's step."""
    unit_bytes: FloatArray
    """[n] state, and what is saved for backward of the micro-batches held at once."""
    nets: tuple[Net, ...]
    messages: FloatArray
    """[E] number in a step to each device that reads, activations and gradients."""
    net_bytes: FloatArray
    """[E] bytes of these messages."""
    received_bytes: FloatArray
    """[E] bytes that each device that reads the net holds at once."""
    ties: tuple[tuple[int, ...], ...]
    """Units of each tie, two or more."""
    tie_bytes: FloatArray
    """[T] bytes held by each device with one of the tie's units."""
    tie_seconds: FloatArray
    """[K, T] seconds of the optimizer's step on each device that holds the tie."""
    sum_bytes: FloatArray
    """[T] bytes of the gradient that is summed; 0 where none is."""
    latency: FloatArray
    """[K, K] seconds; 0 on the diagonal. Symmetric."""
    seconds_per_byte: FloatArray
    """[K, K] 0 on the diagonal. Symmetric."""
    capacity_bytes: FloatArray
    """[K] memory of each device."""
    allowed: BoolArray
    """[K, n] True where pins let the unit be."""

    @property
    def units(self) -> int:
        return int(self.seconds.shape[1])

    @property
    def devices(self) -> int:
        return int(self.seconds.shape[0])

    @cached_property
    def produced(self) -> tuple[tuple[int, ...], ...]:
        """Return the nets that each unit produces."""
        return _by_unit(self.units, [(net.producer,) for net in self.nets])

    @cached_property
    def read(self) -> tuple[tuple[int, ...], ...]:
        """Return the nets that each unit reads."""
        return _by_unit(self.units, [net.readers for net in self.nets])

    @cached_property
    def ties_of(self) -> tuple[tuple[int, ...], ...]:
        """Return the ties that each unit belongs to."""
        return _by_unit(self.units, self.ties)

    @cached_property
    def neighbours(self) -> tuple[tuple[int, ...], ...]:
        """Return the units that each unit sends to or reads from."""
        found: list[set[int]] = [set() for _ in range(self.units)]
        for net in self.nets:
            for reader in net.readers:
                found[net.producer].add(reader)
                found[reader].add(net.producer)
        return tuple(tuple(sorted(units)) for units in found)

    def pair_seconds(self, net: int, a: int, b: int) -> float:
        """Return the seconds of a net's messages between devices ``a`` and ``b`` in a step."""
        return float(
            self.messages[net] * self.latency[a, b] + self.net_bytes[net] * self.seconds_per_byte[a, b]
        )

    def sum_seconds(self, tie: int, devices: Sequence[int]) -> float:
        """Return the seconds of summing a tie's gradient over ``devices``: a ring all-reduce in ascending order.

        2(k-1)·(α + n/k·β) with α and β of the slowest hop, n bytes, k devices.
        """
        k = len(devices)
        if k < 2 or self.sum_bytes[tie] == 0:
            return 0.0
        ring = sorted(devices)
        hops = list(zip(ring, [*ring[1:], ring[0]], strict=True))
        latency = max(self.latency[a, b] for a, b in hops)
        slowest = max(self.seconds_per_byte[a, b] for a, b in hops)
        return float(2 * (k - 1) * (latency + self.sum_bytes[tie] / k * slowest))


def _by_unit(units: int, groups: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    found: list[list[int]] = [[] for _ in range(units)]
    for index, members in enumerate(groups):
        for u in members:
            found[u].append(index)
    return tuple(map(tuple, found))


@dataclass(frozen=True, eq=False)
class Loads:
    """Costs of a placement per device, shape [K] each."""

    seconds: FloatArray
    message_seconds: FloatArray
    """Part of ``seconds`` that is messages."""
    memory_bytes: FloatArray

    @property
    def objective_seconds(self) -> float:
        return float(self.seconds.max())


def evaluate(problem: FreeProblem, home: Sequence[int]) -> Loads:
    """Return the loads of a placement, ``home[u]`` the device of unit u, by their definition.

    This is the reference that all solvers are tested against.
    """
    where = np.asarray(home, dtype=np.int64)
    k, units = problem.devices, np.arange(problem.units)
    seconds = np.bincount(where, weights=problem.seconds[where, units], minlength=k).astype(np.float64)
    memory = np.bincount(where, weights=problem.unit_bytes, minlength=k).astype(np.float64)
    message = np.zeros(k)
    for e, net in enumerate(problem.nets):
        source = home[net.producer]
        for target in {home[r] for r in net.readers} - {source}:
            pair = problem.pair_seconds(e, source, target)
            message[source] += pair
            message[target] += pair
            memory[target] += problem.received_bytes[e]
    for tie, members in enumerate(problem.ties):
        held = sorted({home[u] for u in members})
        for d in held:
            seconds[d] += problem.sum_seconds(tie, held) + problem.tie_seconds[d, tie]
            memory[d] += problem.tie_bytes[tie]
    return Loads(seconds + message, message, memory)


def overflow_bytes(problem: FreeProblem, memory_bytes: FloatArray) -> float:
    """Return the bytes by which the devices' memory is exceeded, summed; 0 where it fits."""
    room = problem.capacity_bytes * (1 + MEMORY_TOLERANCE)
    return float(np.maximum(memory_bytes - room, 0.0).sum())


def legal(problem: FreeProblem, home: Sequence[int]) -> bool:
    """Tell whether pins hold and everything fits."""
    where = np.asarray(home, dtype=np.int64)
    if not problem.allowed[where, np.arange(problem.units)].all():
        return False
    return overflow_bytes(problem, evaluate(problem, home).memory_bytes) == 0.0
