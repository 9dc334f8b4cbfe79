"""Links, the paths made of them, and how transfers at the same time share them.

A path's bandwidth is its narrowest link and its latency the sum over its links, so moving n bytes alone takes

    seconds = Σ latency + n / min bandwidth            (the α–β model: Hockney, Parallel Computing 20, 1994)

A link is one direction of a wire where the wire is full-duplex, and both directions where it is half-duplex: two
transfers compete exactly when they name the same link.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class RingRates:
    """The bytes per second that collectives inside a machine reach, where they are not the bandwidth of its links."""

    rates: tuple[tuple[int, float], ...]
    """(devices that take part, bytes per second), by rising devices."""
    shared: bool
    """True where all devices of a machine that talk count, as they share its host; False where each ring counts alone."""

    @property
    def fewest(self) -> int:
        """The least number of devices in a ring that the rates are for; fewer have what their links give them."""
        return self.rates[0][0]

    def reached(self, devices: int) -> float:
        """Return what a ring reaches where so many talk: linear between the known numbers, constant beyond the last."""
        known, rates = zip(*self.rates, strict=True)
        return float(np.interp(devices, known, rates))


@dataclass(frozen=True, slots=True)
class Link:
    """Something transfers compete for: a port, one direction of a wire, an uplink."""

    id: str
    bandwidth_bytes_per_second: float
    latency_seconds: float
    in_network_bytes_per_second: float = 0.0
    """Bytes per second at which the switch behind a port sums what all its devices hold; 0 where it does not."""
    rings: RingRates | None = None
    """The rates that collectives over such links of a machine reach; None where the bandwidths say them."""


@dataclass(frozen=True, slots=True)
class Path:
    """The links from one rank to another, in order. From a rank to itself there are none."""

    links: tuple[str, ...]
    bandwidth_bytes_per_second: float
    """The bandwidth of the narrowest link: what one transfer gets that shares with nobody."""
    latency_seconds: float

    @classmethod
    def over(cls, links: Iterable[Link]) -> Path:
        """Make the path over ``links``, in order."""
        hops = tuple(links)
        return cls(
            links=tuple(link.id for link in hops),
            bandwidth_bytes_per_second=min(
                (link.bandwidth_bytes_per_second for link in hops), default=math.inf
            ),
            latency_seconds=math.fsum(link.latency_seconds for link in hops),
        )

    def transfer_seconds(self, size_bytes: float) -> float:
        """Return latency + bytes / bandwidth, for a transfer with the path to itself."""
        return self.latency_seconds + size_bytes / self.bandwidth_bytes_per_second


SAME_DEVICE = Path((), math.inf, 0.0)


def fair_rates(
    paths: Sequence[Path], links: Mapping[str, Link], weights: Sequence[float] = ()
) -> tuple[float, ...]:
    """Return the bytes per second that each of several simultaneous transfers gets: weighted max–min fairness.

    Progressive filling (Bertsekas & Gallager, Data Networks, 6.5.2): all rates rise together until a link is full;
    the transfers over it stop there; the others go on. A transfer of weight w counts as w of weight 1 (the default) and
    gets as much as these together. O(links · transfers). A path without links gets infinity.
    """
    weight = list(weights) or [1.0] * len(paths)
    users: dict[str, set[int]] = {}
    for index, path in enumerate(paths):
        for link in path.links:
            users.setdefault(link, set()).add(index)
    left = {link: links[link].bandwidth_bytes_per_second for link in users}
    rates = [math.inf] * len(paths)
    waiting = {index for index, path in enumerate(paths) if path.links}
    while waiting:
        open_links = [link for link, indices in users.items() if indices]
        share = {link: left[link] / sum(weight[index] for index in users[link]) for link in open_links}
        rate = min(share.values())
        # Every link that fills at this rate, so that equal transfers settle in one round.
        for link in [link for link in open_links if share[link] <= rate * (1 + 1e-12)]:
            for index in tuple(users[link]):
                rates[index] = rate * weight[index]
                waiting.discard(index)
                for used in set(paths[index].links):
                    users[used].discard(index)
                    left[used] = max(0.0, left[used] - rates[index])
    return tuple(rates)


def least_fair_rate(paths: Sequence[Path], links: Mapping[str, Link]) -> float:
    """Return the least of ``fair_rates``, transfers of one weight: that of the link that is full first. O(links)."""
    users = Counter(link for path in paths for link in dict.fromkeys(path.links))
    return min(
        (links[link].bandwidth_bytes_per_second / count for link, count in users.items()), default=math.inf
    )
