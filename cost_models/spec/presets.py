"""Hardware by name, in the vocabulary of a cluster file: the tables beside this file, read once.

devices.toml     what a device holds and computes, what of its peak is reached, and which link joins several
links.toml       bandwidth and latency as they are reached, and what rings of several devices reach
machines.toml    machines and cloud instances: their devices, links, networks and prices
sources.toml     where the numbers come from: behind each stand the keys of its sources, as in "79.25GiB [mem]"

A number is verified if all of its sources are. A device without measured efficiencies has those of the device that it is
said to be like; what was measured of it is mostly its best product, of which it is given ``OF_BEST``.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cost_models.units import parse_flops

PresetKeys = Mapping[str, Any]
Origins = Mapping[str, tuple[str, ...]]
"""The keys of a number's sources, by its key path: {"flops.bfloat16": ("MLS",)}."""

NEWEST = "2025"
"""The stack that is assumed where none is named: torch 2.4 and newer, with FlashAttention-2."""

OF_BEST = 0.9
"""The part of a card's best matrix product that products of a model's shapes reach: on an A100 0.80 of the peak [COOK]
where the best is 0.87 [ML], on an H100 0.70 where it is 0.80 [ML]."""
LIKE = "like"
"""The source of an efficiency that is another device's: never verified."""

_SOURCED = re.compile(r"(.+) \[([^\[\]]+)\]")
_ABOUT = ("about", "link", "best", "like", "efficiency")
"""Keys of a device in the table that a cluster file does not have, or not so."""


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name(f"{name}.toml").read_text("utf-8"))


def _parted(value: Any, at: str, origins: dict[str, tuple[str, ...]]) -> Any:
    """Return ``value`` without its sources, which go to ``origins``."""
    if isinstance(value, dict):
        return {key: _parted(part, f"{at}.{key}".lstrip("."), origins) for key, part in value.items()}
    if isinstance(value, list):
        return [_parted(part, f"{at}[{index}]", origins) for index, part in enumerate(value)]
    match = _SOURCED.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return value
    origins[at] = tuple(key.strip() for key in match[2].split(","))
    return match[1]


def _table(rows: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], dict[str, Origins]]:
    """Return the rows without sources, and their sources."""
    origins: dict[str, dict[str, tuple[str, ...]]] = {name: {} for name in rows}
    return {name: _parted(row, "", origins[name]) for name, row in rows.items()}, dict(origins)


_SOURCES = _read("sources")
SOURCES: Mapping[str, str] = MappingProxyType({**_SOURCES["verified"], **_SOURCES["unverified"]})
"""The text of each key of a source."""

_DEVICE_FILE = _read("devices")
_KINDS = _DEVICE_FILE["kind"]
_DEVICES, _DEVICE_ORIGINS = _table(
    {name: {**_KINDS[row["kind"]], **row} for name, row in _DEVICE_FILE["device"].items()}
)
DEVICES: Mapping[str, PresetKeys] = {
    name: {key: value for key, value in row.items() if key not in _ABOUT} for name, row in _DEVICES.items()
}
"""The keys of ``device`` in a cluster file."""
DEVICE_LINKS: Mapping[str, str] = {name: row["link"] for name, row in _DEVICES.items()}
"""The link that joins several of a device in one machine when only the device is named (``H100-80GB:4``)."""

_LINKS, LINK_ORIGINS = _table(_read("links"))
LINKS: Mapping[str, PresetKeys] = {
    name: {key: value for key, value in row.items() if key != "wires"} for name, row in _LINKS.items()
}
"""The keys of a link."""
LINK_WIRES: Mapping[str, int] = {name: int(row["wires"]) for name, row in _LINKS.items() if "wires" in row}
"""The number of NVLinks of a card, all of which together reach the bandwidth of the link."""

_MACHINES, MACHINE_ORIGINS = _table(_read("machines"))
MACHINES: Mapping[str, PresetKeys] = {
    name: {
        key: float(value) if key == "usd_per_hour" else value
        for key, value in row.items()
        if key not in ("network", "about")
    }
    for name, row in _MACHINES.items()
}
"""The keys of a node."""
MACHINE_NETWORKS: Mapping[str, PresetKeys] = {name: row["network"] for name, row in _MACHINES.items()}
"""The network between several of a machine."""
ABOUT: Mapping[str, str] = {
    name: row["about"] for rows in (_DEVICES, _MACHINES) for name, row in rows.items() if "about" in row
}
"""Words on a preset that its name does not say."""


@cache
def _efficiency(name: str) -> tuple[Mapping[str, float], Origins]:
    """Return the efficiencies of a device with the newest stack, and their sources."""
    row, origins = _DEVICES[name], _DEVICE_ORIGINS[name]
    others = _efficiency(row["like"])[0] if "like" in row else {}
    found = dict(others)
    sources: dict[str, tuple[str, ...]] = dict.fromkeys(others, (LIKE,))
    if "best" in row:
        rate = "bfloat16" if "bfloat16" in row["flops"] else "float16"
        found["matmul"] = round(OF_BEST * parse_flops(row["best"]) / parse_flops(row["flops"][rate]), 3)
        sources["matmul"] = origins["best"]
    for key, value in row.get("efficiency", {}).items():
        found[key], sources[key] = float(value), origins[f"efficiency.{key}"]
    return found, sources


_OTHER_STACKS: dict[str, Any] = _parted(_DEVICE_FILE["stack"], "", {})
STACKS: Mapping[str, Mapping[str, Mapping[str, float]]] = MappingProxyType(
    {
        NEWEST: {name: found for name in _DEVICES if (found := _efficiency(name)[0])},
        **{
            stack: {name: {key: float(part) for key, part in row.items()} for name, row in rows.items()}
            for stack, rows in _OTHER_STACKS.items()
        },
    }
)
"""Efficiencies (``cost_models.devices.EFFICIENCY_NAMES``) by stack and device: the part of a device's peak that the
software of a time reaches. Attention counts the products that a causal mask leaves."""

DEVICE_ORIGINS: Mapping[str, Origins] = {
    name: {
        **{key: found for key, found in origins.items() if key.partition(".")[0] not in _ABOUT},
        **{f"efficiency.{key}": found for key, found in _efficiency(name)[1].items()},
    }
    for name, origins in _DEVICE_ORIGINS.items()
}
"""The sources of each number of a device."""


def efficiency_of(preset: str, stack: str | None) -> Mapping[str, float]:
    """Return the efficiencies of a preset with a stack; what the stack does not know is as with the newest."""
    newest = STACKS[NEWEST].get(preset, {})
    return {**newest, **STACKS[stack or NEWEST].get(preset, {})}


def is_verified(sources: tuple[str, ...]) -> bool:
    """Tell whether a number of these sources was read in a maker's sheet, a measurement or a report of the card."""
    return all(key in _SOURCES["verified"] for key in sources)


def is_called(preset: str, card: str) -> bool:
    """Tell whether a driver's name can mean the preset: "NVIDIA H100 80GB HBM3" is an "H100-80GB", an L40S no "L4".

    Sizes are not compared: not every card says its own.
    """
    family, *words = preset.split("-")
    letters = "[ -]?".join(map(re.escape, family))
    return re.search(
        rf"(?<![a-z0-9]){letters}(?![a-z0-9]| ?ti\b| super)", card, re.IGNORECASE
    ) is not None and all(word.lower() in card.lower() for word in words if not word.endswith("GB"))
