"""A placement problem as numbers: units, what they send each other, devices, links. No graph, no torch.

Words
    unit      what shares a device: ops of a model, nodes of a cost graph; numbered along the program's order
    net       the values of one unit that one set of other units reads; each is sent once to every device that reads it
    tie       state that several units read (tied weights): every device that has one of them holds a copy, and their
              gradients are summed once per step
    home      the device of every unit

The objective S, of one step; micro-batches are already counted:

    load(d) = Σ seconds[d, u] over its units + what it pays for its nets + its part of the sums of ties
    S       = max over devices of load(d)                                  the busiest device, communication included

Who pays for a net is the one thing in which models and cost graphs differ (``paid_once``):

    each message    both ends a and b pay pair(e, a, b) = messages[e] · latency[a, b] + bytes[e] · seconds_per_byte[a, b]
                    for every device b that reads the net, activations and gradients together
    once            every device d with a part of a net that is not wholly there pays bytes[e] · paid_once[d]

Bytes of a device: its units' state and saved activations, a copy of every tie that it reads, and what it receives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np

from cost_models.arrays import FloatArray
from passes.search.touches import BoolArray

Home: TypeAlias = tuple[int, ...]
"""A device for every unit."""


@dataclass(frozen=True)
class Net:
    """Values that one unit sends to others. ``readers``: ascending, without the producer, at least one."""

    producer: int
    readers: tuple[int, ...]

    @property
    def members(self) -> tuple[int, ...]:
        """The producer and its readers."""
        return (self.producer, *self.readers)


@dataclass(frozen=True, eq=False)
class PlacementProblem:
    """n units, E nets, T ties, K devices."""

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
    """[K, n] True where the unit may be."""
    paid_once: FloatArray | None = None
    """[K] seconds per byte that a device pays once for a net, whoever else has a part of it; latency, messages and
    received bytes are then 0. None: both ends pay for each message."""

    @property
    def units(self) -> int:
        return int(self.seconds.shape[1])

    @property
    def devices(self) -> int:
        return int(self.seconds.shape[0])

    @cached_property
    def nets_of(self) -> tuple[tuple[int, ...], ...]:
        """Return the nets that each unit produces or reads."""
        return _by_unit(self.units, [net.members for net in self.nets])

    @cached_property
    def ties_of(self) -> tuple[tuple[int, ...], ...]:
        """Return the ties that each unit belongs to."""
        return _by_unit(self.units, self.ties)

    @cached_property
    def neighbours(self) -> tuple[tuple[int, ...], ...]:
        """Return the units that each unit sends to or reads from."""
        near: list[set[int]] = [set() for _ in range(self.units)]
        for net in self.nets:
            for reader in net.readers:
                near[net.producer].add(reader)
                near[reader].add(net.producer)
        return tuple(tuple(sorted(units)) for units in near)

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

    def obeying(self, home: Sequence[int]) -> Home:
        """Return ``home`` with every unit that may not be where it is on the fastest device that it may be on."""
        where = np.asarray(home, dtype=np.int64)
        wrong = ~self.allowed[where, np.arange(self.units)]
        fastest = np.where(self.allowed, self.seconds, np.inf).argmin(axis=0)
        return tuple(np.where(wrong, fastest, where).tolist())

    def borders(self, home: Sequence[int]) -> list[int]:
        """Return the units that have a neighbour on another device."""
        return [u for u, near in enumerate(self.neighbours) if any(home[v] != home[u] for v in near)]


def _by_unit(units: int, groups: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    groups_of: list[list[int]] = [[] for _ in range(units)]
    for index, members in enumerate(groups):
        for u in members:
            groups_of[u].append(index)
    return tuple(map(tuple, groups_of))


@dataclass(frozen=True, eq=False)
class Loads:
    """Costs of a placement per device, shape [K] each."""

    seconds: FloatArray
    message_seconds: FloatArray
    """Part of ``seconds`` that is messages."""
    memory_bytes: FloatArray
    overflow_bytes: float
    """Bytes by which devices' memory is exceeded, summed; 0 where everything fits."""

    @property
    def objective_seconds(self) -> float:
        return float(self.seconds.max())

    @property
    def rank(self) -> tuple[float, float]:
        """The order of placements: what overflows less, then what is faster."""
        return self.overflow_bytes, self.objective_seconds


def evaluate(problem: PlacementProblem, home: Sequence[int]) -> Loads:
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
        targets = {home[r] for r in net.readers} - {source}
        if problem.paid_once is not None:
            for device in {source, *targets} if targets else ():
                message[device] += problem.net_bytes[e] * problem.paid_once[device]
            continue
        for target in targets:
            pair = problem.pair_seconds(e, source, target)
            message[source] += pair
            message[target] += pair
            memory[target] += problem.received_bytes[e]
    for tie, members in enumerate(problem.ties):
        held = sorted({home[u] for u in members})
        for d in held:
            seconds[d] += problem.sum_seconds(tie, held) + problem.tie_seconds[d, tie]
            memory[d] += problem.tie_bytes[tie]
    over = float(np.maximum(memory - problem.capacity_bytes, 0.0).sum())
    return Loads(seconds + message, message, memory, over)


def legal(problem: PlacementProblem, home: Sequence[int]) -> bool:
    """Tell whether every unit is where it may be and everything fits."""
    where = np.asarray(home, dtype=np.int64)
    allowed = problem.allowed[where, np.arange(problem.units)].all()
    return bool(allowed) and evaluate(problem, home).overflow_bytes == 0.0
