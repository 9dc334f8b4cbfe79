"""Rooms: how much of a device's memory plans may fill by prediction, at a risk of not fitting.

    at_risk(ClusterSpec.parse("dgx-h100:1"), 0.05).devices[0].room_bytes    a plan that is predicted to take as much as
                                                                            this needs more than there is 5 times in 100

    share = exp(-(center + scale · t))    room = memory · share    t: Student's quantile of 1 - risk

The spreads of measured over predicted peaks are ``cost_models.spreads``. From a risk of 50% on predictions fill the memory
to the last byte, whatever their center.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from cost_models.cluster import ClusterSpec
from cost_models.devices import CountedKind, Device
from cost_models.intervals import Spread
from cost_models.spreads import PEAK_BYTES

FILLS = 0.5
"""The risk from which on predictions fill the memory."""


DIGITS = 9
"""Digits of a chance that are kept: the rest is rounding of sums, and of quantiles that are found by bisection."""


def peak_spread(device: Device) -> Spread:
    """Return how far measured peaks on such a device were from predicted ones."""
    return PEAK_BYTES[device.counted_as]


def room_share(kind: CountedKind, risk: float) -> float:
    """Return the largest predicted share of a device's memory that exceeds all of it with a chance of at most ``risk``."""
    return 1.0 if risk >= FILLS else min(1.0, PEAK_BYTES[kind].most_predicted(1.0, risk))


def at_risk(cluster: ClusterSpec, risk: float) -> ClusterSpec:
    """Return the cluster whose devices have the room that plans have at this risk; their memory stays."""
    if all(device.room_share == room_share(device.counted_as, risk) for device in cluster.devices):
        return cluster
    roomy = cluster.model_copy()
    roomy.__dict__["devices"] = tuple(
        replace(device, room_share=room_share(device.counted_as, risk)) for device in cluster.devices
    )
    return roomy


def chance_of_not_fitting(peaks: Iterable[tuple[float, Device]]) -> float:
    """Return the chance that a device needs more than it has. ``peaks``: predicted bytes on each device.

    That of the device with the largest: predictions of a plan's peaks err alike.
    """
    fullest: defaultdict[CountedKind, float] = defaultdict(float)
    for peak, device in peaks:
        fullest[device.counted_as] = max(fullest[device.counted_as], peak / device.memory_bytes)
    chances = [PEAK_BYTES[kind].chance_above(share, 1.0) for kind, share in fullest.items()]
    return round(max(chances, default=0.0), DIGITS)
