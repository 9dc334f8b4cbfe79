"""The ``device`` of a node: a preset, with the numbers of a hardware file over its own; or these numbers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cost_models.errors import ClusterError
from cost_models.from_machines.device_names import device_of
from cost_models.from_machines.hardware_files import HardwareFile
from cost_models.from_machines.seen import Gpu, Missing, Sourced
from cost_models.spec.presets import DEVICES
from cost_models.units import bytes_text

_ALONE = ("memory_bandwidth", "flops")
"""Numbers beside its memory that a device without a preset needs."""


def described_device(
    gpus: Sequence[Gpu], chosen: str | None, hardware: HardwareFile | None, missing: list[Missing]
) -> tuple[str | None, Sourced | Mapping[str, Any]]:
    """Return the name of the preset, None if there is none, and ``device``."""
    if hardware is None:
        preset = device_of(gpus, chosen)
        return preset.value, preset
    card, keys = hardware.card, dict(hardware.device)
    try:
        preset = device_of(gpus or [card], chosen)
    except ClusterError:
        if gpus or chosen is not None or card.memory_bytes is None or not all(key in keys for key in _ALONE):
            raise
        missing.append(
            Missing(
                f"rates of {card.name} in other types than {', '.join(keys['flops'].value)}: plans in those are refused",
                "--device PRESET, one that computes alike",
            )
        )
        memory = Sourced(bytes_text(card.memory_bytes), card.source)
        return None, {"name": Sourced(card.name, card.source), "memory": memory, **keys}
    if not keys:
        return preset.value, preset
    if "flops" in keys:
        rates = {**DEVICES[preset.value]["flops"], **keys["flops"].value}
        keys["flops"] = Sourced(rates, f"{keys['flops'].source}; other types of the preset")
    return preset.value, {"preset": preset, **keys}
