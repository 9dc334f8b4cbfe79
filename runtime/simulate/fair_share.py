"""Transfers over time on links that they share: who gets which rate, and so when each one ends.

Rates are max–min fair (``cost_models.links.fair_rates``) and change only when a transfer joins or leaves. Only
transfers that share a link with it, directly or through others, are looked at again; one that shares with nobody
ends exactly at start + bytes / bandwidth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from cost_models.links import Link, Path, fair_rates


class Links(Protocol):
    """A cluster as the simulator asks about it (``cost_models.cluster``, which needs torch)."""

    @property
    def links(self) -> Mapping[str, Link]:
        """Every link by its id."""
        ...

    def path(self, a: int, b: int) -> Path:
        """Return the links from rank ``a`` to rank ``b``."""
        ...


@dataclass(slots=True)
class _MovingFlow:
    path: Path
    bytes_left: float
    weight: float
    rate: float
    since_seconds: float


class FairShare:
    """The transfers that move bytes now. ``join`` and ``leave`` return the new end of each whose rate changed."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._flows: dict[int, _MovingFlow] = {}
        self._users: dict[str, dict[int, None]] = {}
        self._rates: dict[tuple[tuple[tuple[str, ...], float], ...], tuple[float, ...]] = {}

    def join(
        self, flow: int, path: Path, size_bytes: float, now: float, weight: float = 1.0
    ) -> list[tuple[int, float]]:
        """Let a transfer start to move bytes at time ``now``, in seconds. One of weight w counts as w of weight 1."""
        rate = path.bandwidth_bytes_per_second
        self._flows[flow] = _MovingFlow(path, size_bytes, weight, rate, now)
        shares = False
        for link in path.links:
            users = self._users.setdefault(link, {})
            shares = shares or bool(users)
            users[flow] = None
        ends = self._retime([flow], now) if shares else []
        if self._flows[flow].rate == rate:
            ends.append((flow, now + size_bytes / rate))
        return ends

    def moves(self, flow: int) -> bool:
        """Return whether a transfer is under way."""
        return flow in self._flows

    def rate(self, flow: int) -> float:
        """Return the bytes per second of a transfer that is under way."""
        return self._flows[flow].rate

    def leave(self, flow: int, now: float) -> list[tuple[int, float]]:
        """Let a transfer go that has moved its last byte."""
        neighbours: dict[int, None] = {}
        for link in self._flows.pop(flow).path.links:
            users = self._users[link]
            users.pop(flow, None)
            neighbours.update(users)
        return self._retime(list(neighbours), now) if neighbours else []

    def _retime(self, seeds: list[int], now: float) -> list[tuple[int, float]]:
        group = sorted(self._connected(seeds))
        flows = [self._flows[flow] for flow in group]
        ends = []
        for number, flow, rate in zip(group, flows, self._fair_rates(flows), strict=True):
            if rate == flow.rate:
                continue
            flow.bytes_left = max(0.0, flow.bytes_left - (now - flow.since_seconds) * flow.rate)
            flow.rate, flow.since_seconds = rate, now
            ends.append((number, now + flow.bytes_left / rate))
        return ends

    def _connected(self, seeds: list[int]) -> set[int]:
        found, todo = set(seeds), list(seeds)
        while todo:
            for link in self._flows[todo.pop()].path.links:
                for other in self._users[link]:
                    if other not in found:
                        found.add(other)
                        todo.append(other)
        return found

    def _fair_rates(self, flows: list[_MovingFlow]) -> tuple[float, ...]:
        # A pipeline brings the same few paths together over and over.
        key = tuple((flow.path.links, flow.weight) for flow in flows)
        rates = self._rates.get(key)
        if rates is None:
            rates = self._rates[key] = fair_rates(
                [flow.path for flow in flows], self._links.links, [flow.weight for flow in flows]
            )
        return rates
