"""Measured bandwidths of collectives as rates of links, in the meaning that links have here.

inside a machine    all-gather, reduce-scatter    rings: {n: busbw}, what rings of n devices reach
                    all-reduce                    the same; of a switch that sums, in_network: algbw, where that is faster
                    sendrecv, alltoall            bandwidth: busbw, what one device sends to another
between machines    all-gather, reduce-scatter    bandwidth of a card: busbw / cards, since rings of all cards pass busbw
                    all-reduce                    the same; algbw / cards on two nodes, where trees send the tensor once

Bus bandwidth is not wire speed: it is what a collective reached, with all that slows it down, and rates of links are
such too (``cost_models.spec.presets``). Sums in a switch make it larger than any wire (480 GB/s over NVLinks of 450). By
the last rule presets of EFA (four nodes) and TCPX (two) were taken from such tables ([EFA400], [TCPX] in docs/presets.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cost_models.from_machines.nccl_tests import MeasuredRate
from cost_models.from_machines.seen import Missing, Sourced
from cost_models.gpu_collectives import DEVICES_IN_NETWORK
from cost_models.spec.presets import LINKS
from cost_models.units import bandwidth_text, format_bandwidth, format_bytes, parse_bandwidth

_RINGS = ("all_gather", "reduce_scatter")
_PATHS = ("sendrecv", "alltoall")
LARGE_BYTES = 2**30
"""The message from which on rates no longer rise with the size: presets are of 1 GiB and more ([RING])."""


def with_inside_rates(
    links: dict[str, Any] | None, count: int, rates: Sequence[MeasuredRate], missing: list[Missing]
) -> dict[str, Any] | None:
    """Return ``links`` of a node of ``count`` devices with what was measured inside such a machine."""
    inside = [rate for rate in rates if len(rate.per_host) == 1 and rate.ranks <= count]
    if links is None or "default" not in links:
        return links
    keys = _by_key(links["default"])
    value = {key: part.value for key, part in keys.items()}
    told = next(iter(keys.values())).source
    preset = LINKS[value["preset"]] if "preset" in value else value
    measured: dict[str, Sourced] = {}
    rings: dict[int, tuple[str | float, str]] = {}
    for rate in inside:
        found = f"{rate.source}: {rate.collective} of {rate.ranks}, busbw {format_bandwidth(rate.bus_rate)}"
        if rate.collective == "all_reduce" and _summed(rate, preset):
            measured["in_network"] = Sourced(
                _text(rate.algorithm_rate), f"{found} by sums in the switch, algbw here"
            )
        elif rate.collective in ("all_reduce", *_RINGS):
            if rate.ranks not in rings or rate.collective in _RINGS:
                rings[rate.ranks] = _text(rate.bus_rate), found
        elif rate.collective in _PATHS and not (rate.collective == "alltoall" and preset.get("mesh")):
            measured["bandwidth"] = Sourced(_text(rate.bus_rate), found)
        else:
            missing.append(_unused(rate))
            continue
        _name_small(rate, missing)
    if rings or "bandwidth" in measured:
        known = {
            int(ranks): part for ranks, part in (value.get("rings") or preset.get("rings") or {}).items()
        }
        every = {**known, **{ranks: part for ranks, (part, _) in rings.items()}}
        if every:
            where = "; ".join(found for _, found in rings.values()) or "of the preset"
            measured["rings"] = Sourced(dict(sorted(every.items())), where)
    if not measured:
        return links
    if "in_network" not in measured and _rings_alone(inside, preset):
        source = f"{told}; no sums in its switch, by which an all-reduce would have been faster"
        keys = {key: Sourced(preset[key], source) for key in ("bandwidth", "latency")}
    return {**links, "default": {**keys, **measured}}


def _by_key(default: Sourced | Mapping[str, Sourced]) -> dict[str, Sourced]:
    """Return the keys of a link with the source of each."""
    if not isinstance(default, Sourced):
        return dict(default)
    value = default.value if isinstance(default.value, dict) else {"preset": default.value}
    return {key: Sourced(part, default.source) for key, part in value.items()}


def _rings_alone(rates: Sequence[MeasuredRate], preset: Any) -> bool:
    """Tell whether a switch that could sum did not, in an all-reduce of so many devices that it would."""
    many = [rate for rate in rates if rate.collective == "all_reduce" and rate.ranks >= DEVICES_IN_NETWORK]
    return bool(many) and "in_network" in preset


def _summed(rate: MeasuredRate, preset: Any) -> bool:
    """Tell whether a switch summed: where it can, and more was reached than its rings reach."""
    return (
        "in_network" in preset
        and rate.ranks >= DEVICES_IN_NETWORK
        and rate.bus_rate > parse_bandwidth(preset["bandwidth"])
    )


def card_rate(rates: Sequence[MeasuredRate], cards: int, missing: list[Missing]) -> Sourced | None:
    """Return what a network card reached, of ``cards`` in a node (0: one for each device); None if nothing was measured."""
    across = [rate for rate in rates if len(rate.per_host) > 1]
    usable = [
        rate for rate in across if len(set(rate.per_host)) == 1 and rate.collective in ("all_reduce", *_RINGS)
    ]
    missing += [_unused(rate) for rate in across if rate not in usable]
    best = next(
        iter(sorted(usable, key=lambda rate: (rate.collective == "all_reduce", -rate.size_bytes))), None
    )
    if best is None:
        return None
    _name_small(best, missing)
    nodes, devices = len(best.per_host), best.per_host[0]
    used = min(cards or devices, devices)
    by_trees = best.collective == "all_reduce" and nodes == 2
    total, kind = (best.algorithm_rate, "algbw") if by_trees else (best.bus_rate, "busbw")
    run = f"{best.collective} of {best.ranks} on {nodes} nodes"
    return Sourced(
        _text(total / used), f"{best.source}: {run}, {kind} {format_bandwidth(total)} by {used} cards"
    )


def _text(rate: float) -> str | float:
    """Write a rate as measured, with two decimals of GB/s."""
    return bandwidth_text(round(rate, -7))


def _unused(rate: MeasuredRate) -> Missing:
    return Missing(
        f"a use of {rate.collective}_perf on {len(rate.per_host)} hosts ({rate.source}): no rate of a link follows from it",
        "all_reduce_perf, all_gather_perf, reduce_scatter_perf and, on one host, sendrecv_perf say rates",
    )


def _name_small(rate: MeasuredRate, missing: list[Missing]) -> None:
    if rate.size_bytes < LARGE_BYTES:
        missing.append(
            Missing(
                f"the rate of large messages: that of {format_bytes(rate.size_bytes)} ({rate.source}) stands in its place",
                f"{rate.collective}_perf with -e 8G says it",
            )
        )
