"""The origin of a cluster's rates, in words, and how the predictions that rest on them err.

H100-80GB                               presets, stack 2025
{preset: A100-80GB, stack: "2023"}      presets, stack 2023                 a named stack
{memory: …, flops: …}                   numbers of the cluster file
local:2                                 presets of CPU workers, guesses     no interval: no such step was compared
MI300X:8                                presets, stack 2025, unverified in part     none: no plan was run on such devices
local:2, calibrated                     calibration of 2026-01-31T… with 2 workers (…)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from cost_models.intervals import RATES, RateSource
from cost_models.spec.presets import DEVICE_ORIGINS, NEWEST, STACKS, is_verified
from cost_models.spec.sections import DeviceSpec, NodeSpec

DEFAULTS = "defaults"
"""The provenance of data-sheet numbers and rules of thumb, until a calibration replaces them."""

_RATES = {"flops", "memory_bandwidth", "efficiency"}
_OWN_RATES = {*_RATES, "launch_overhead", "kernel_overhead"}


@dataclass(frozen=True)
class RateOrigin:
    """The origin of the rates of some devices. ``rates``: None where predictions by such rates were never compared."""

    text: str
    rates: RateSource | None


def origin_of(nodes: Sequence[NodeSpec], provenance: str, ranks: Collection[int] | None = None) -> RateOrigin:
    """Return the origin of the rates of ``ranks`` (of all if None); the least sure one counts where they differ."""
    devices = list(_devices(nodes, ranks))
    found = [_rates(device) for device in devices]
    known = [rates for rates in found if rates is not None]
    rates = max(known, key=RATES.index) if len(known) == len(found) else None
    text = " and ".join(_parts(devices)) if provenance == DEFAULTS else f"{provenance}{_stack(devices)}"
    return RateOrigin(text, rates)


def _devices(nodes: Sequence[NodeSpec], ranks: Collection[int] | None) -> Iterator[DeviceSpec]:
    """Yield the device of each entry that has some of ``ranks``."""
    first = 0
    for entry in nodes:
        full = entry.resolved()
        after = first + (full.count or 1) * len(entry.names())
        if full.device is not None and (ranks is None or any(first <= rank < after for rank in ranks)):
            yield full.device
        first = after


def _rates(device: DeviceSpec) -> RateSource | None:
    if device.op_times is not None:
        return "calibrated"
    if _is_cpu(device) or device.resolved().kind not in (None, "cuda"):
        return None
    return "presets" if device.stack is None else "named stack"


def _parts(devices: Sequence[DeviceSpec]) -> Iterator[str]:
    """Yield the sources of rates that were not measured."""
    presets = [device for device in devices if device.preset is not None and not _is_cpu(device)]
    if presets:
        own = any(_OWN_RATES & _given(device) for device in presets)
        unverified = "" if all(map(_is_known, presets)) else ", unverified in part"
        yield f"presets{_stack(presets)}{unverified}{', with numbers of the cluster file' if own else ''}"
    if any(device.preset is not None and _is_cpu(device) for device in devices):
        yield "presets of CPU workers, guesses"
    if any(device.preset is None for device in devices):
        yield "numbers of the cluster file"


def _stack(devices: Sequence[DeviceSpec]) -> str:
    """Name the software whose speed is assumed; presets that no stack knows have rules of thumb."""
    known = {preset for stack in STACKS.values() for preset in stack}
    stacks = sorted({device.stack or NEWEST for device in devices if device.preset in known})
    return f", stack{'s' if len(stacks) > 1 else ''} {' and '.join(stacks)}" if stacks else ""


def _is_known(device: DeviceSpec) -> bool:
    """Tell whether all rates of a device's preset are verified."""
    origins = DEVICE_ORIGINS[device.preset or ""]
    return all(is_verified(keys) for at, keys in origins.items() if at.partition(".")[0] in _RATES)


def _is_cpu(device: DeviceSpec) -> bool:
    return device.resolved().kind == "cpu"


def _given(device: DeviceSpec) -> set[str]:
    return {key for key in device.model_fields_set if getattr(device, key) is not None}
