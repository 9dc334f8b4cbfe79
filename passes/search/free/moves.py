"""A placement that is changed one unit at a time, with its loads kept up to date: O(nets of the unit · K) per move."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from passes.search.free.problem import MEMORY_TOLERANCE, FreeProblem, evaluate
from passes.search.free.tuning import DEFAULT


class Moves:
    """A placement under change: ``home``, ``load`` and ``memory``. Plain lists, since single numbers are read and written.

    ``overflow_price``: the cost of exceeding a device's memory by all of it, in multiples of all work.
    """

    def __init__(
        self, problem: FreeProblem, home: Sequence[int], overflow_price: float = DEFAULT.overflow_price
    ) -> None:
        self.problem = problem
        self.seconds = problem.seconds.tolist()
        self.latency = problem.latency.tolist()
        self.per_byte = problem.seconds_per_byte.tolist()
        self.messages = problem.messages.tolist()
        self.net_bytes = problem.net_bytes.tolist()
        self.received = problem.received_bytes.tolist()
        self.unit_bytes = problem.unit_bytes.tolist()
        self.producer = [net.producer for net in problem.nets]
        self.room = (problem.capacity_bytes * (1 + MEMORY_TOLERANCE)).tolist()
        total = float(problem.seconds.max(axis=0).sum()) or 1.0
        self.byte_price = [
            overflow_price * total / max(capacity, 1.0) for capacity in problem.capacity_bytes.tolist()
        ]
        self.start(home)

    def start(self, home: Sequence[int]) -> None:
        """Begin at the placement ``home``."""
        problem = self.problem
        self.home = list(home)
        loads = evaluate(problem, home)
        self.load: list[float] = loads.seconds.tolist()
        self.memory: list[float] = loads.memory_bytes.tolist()
        self.readers_on = [[0] * problem.devices for _ in problem.nets]
        for row, net in zip(self.readers_on, problem.nets, strict=True):
            for reader in net.readers:
                row[self.home[reader]] += 1

    def move(self, unit: int, target: int) -> None:
        """Move ``unit`` to device ``target``."""
        source = self.home[unit]
        if source == target:
            return
        for tie in self.problem.ties_of[unit]:
            self._tie(tie, -1.0)
        load, memory = self.load, self.memory
        load[source] -= self.seconds[source][unit]
        load[target] += self.seconds[target][unit]
        memory[source] -= self.unit_bytes[unit]
        memory[target] += self.unit_bytes[unit]
        for net in self.problem.produced[unit]:
            for device, count in enumerate(self.readers_on[net]):
                if count:
                    if device != source:
                        self._message(net, source, device, -1.0)
                    if device != target:
                        self._message(net, target, device, 1.0)
        for net in self.problem.read[unit]:
            row, home = self.readers_on[net], self.home[self.producer[net]]
            row[source] -= 1
            if row[source] == 0 and home != source:
                self._message(net, home, source, -1.0)
            if row[target] == 0 and home != target:
                self._message(net, home, target, 1.0)
            row[target] += 1
        self.home[unit] = target
        for tie in self.problem.ties_of[unit]:
            self._tie(tie, 1.0)

    def _message(self, net: int, source: int, target: int, sign: float) -> None:
        pair = sign * (
            self.messages[net] * self.latency[source][target]
            + self.net_bytes[net] * self.per_byte[source][target]
        )
        self.load[source] += pair
        self.load[target] += pair
        self.memory[target] += sign * self.received[net]

    def _tie(self, tie: int, sign: float) -> None:
        problem = self.problem
        held = sorted({self.home[u] for u in problem.ties[tie]})
        summed = problem.sum_seconds(tie, held)
        for device in held:
            self.load[device] += sign * (summed + float(problem.tie_seconds[device, tie]))
            self.memory[device] += sign * float(problem.tie_bytes[tie])

    def felt(self) -> list[float]:
        """Return the loads, with a price for every byte beyond a device's memory added."""
        return [
            load + price * (used - room) if used > room else load
            for load, used, room, price in zip(
                self.load, self.memory, self.room, self.byte_price, strict=True
            )
        ]

    def energy(self, power: float) -> float:
        """Return a p-norm of the felt loads: close to their maximum, and lower where the other devices have less to do."""
        felt = self.felt()
        top = max(felt)
        if top <= 0.0:
            return 0.0
        return float(top * sum((max(f, 0.0) / top) ** power for f in felt) ** (1.0 / power))

    def objective(self) -> float:
        """Return the largest felt load."""
        return max(self.felt())

    def refresh(self) -> None:
        """Compute everything again, since sums of many small changes drift."""
        self.start(self.home)


def borders(problem: FreeProblem, home: Sequence[int]) -> list[int]:
    """Return the units that have a neighbour on another device."""
    where = np.asarray(home)
    return [u for u, near in enumerate(problem.neighbours) if any(where[v] != where[u] for v in near)]
