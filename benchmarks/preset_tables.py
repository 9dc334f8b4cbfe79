"""The tables of docs/presets.md: devices, links and machines by name, their numbers with the keys of their sources.

Numbers that are not verified stand in italics.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from cost_models.spec.presets import (
    ABOUT,
    DEVICE_LINKS,
    DEVICE_ORIGINS,
    DEVICES,
    LINK_ORIGINS,
    LINKS,
    MACHINE_NETWORKS,
    MACHINE_ORIGINS,
    MACHINES,
    NEWEST,
    SOURCES,
    Origins,
    efficiency_of,
    is_verified,
)

TYPES = ("bfloat16", "float16", "float32")
"""The types whose rate stands for a device: the first that it has."""


def preset_tables() -> str:
    """Write all tables as Markdown."""
    parts = (
        ("Devices", ("name", "kind", "memory", "bandwidth", "peak", "products reach", "link"), _devices()),
        ("Machines and cloud instances", ("name", "is", "links", "network", "USD per hour"), _machines()),
        ("Links", ("name", "bandwidth", "latency", "else"), _links()),
        ("Sources", ("key", "is", "verified"), _sources()),
    )
    return "".join(f"\n## {title}\n\n{_table(columns, rows)}" for title, columns, rows in parts)


def _table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    names = list(columns)
    lines = [names, ["---"] * len(names), *map(list, rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _number(value: Any, origins: Origins, at: str) -> str:
    """Write a number with the keys of its sources, in italics if they do not verify it."""
    keys = origins.get(at)
    if keys is None:
        return str(value)
    shown = str(value) if is_verified(keys) else f"*{value}*"
    return f"{shown} [{', '.join(keys)}]"


def _named(name: str) -> str:
    return f"`{name}`" + (f": {ABOUT[name]}" if name in ABOUT else "")


def _devices() -> Iterator[list[str]]:
    for name, row in DEVICES.items():
        origins = DEVICE_ORIGINS[name]
        dtype = next(dtype for dtype in TYPES if dtype in row["flops"])
        reached = efficiency_of(name, NEWEST).get("matmul")
        yield [
            _named(name),
            row["kind"],
            _number(row["memory"], origins, "memory"),
            _number(row["memory_bandwidth"], origins, "memory_bandwidth"),
            f"{_number(row['flops'][dtype], origins, f'flops.{dtype}')} {dtype}",
            "*rule of thumb*" if reached is None else _number(f"{reached:.2f}", origins, "efficiency.matmul"),
            f"`{DEVICE_LINKS[name]}`",
        ]


def _links() -> Iterator[list[str]]:
    for name, row in LINKS.items():
        origins = LINK_ORIGINS[name]
        more = [
            f"rings of {n} {_number(rate, origins, f'rings.{n}')}" for n, rate in row.get("rings", {}).items()
        ]
        more += ["a wire for every two devices"] if row.get("mesh") else []
        more += ["half duplex"] if row.get("duplex") == "half" else []
        if "in_network" in row:
            more.append(f"the switch sums {_number(row['in_network'], origins, 'in_network')}")
        numbers = [_number(row[key], origins, key) for key in ("bandwidth", "latency")]
        yield [f"`{name}`", *numbers, "; ".join(more)]


def _machines() -> Iterator[list[str]]:
    for name, row in MACHINES.items():
        origins, links = MACHINE_ORIGINS[name], row.get("links", "")
        default = links if isinstance(links, str) else links["default"]
        default = default if isinstance(default, str) else default["preset"]
        price = _number(row["usd_per_hour"], origins, "usd_per_hour") if "usd_per_hour" in row else ""
        pairs = "" if isinstance(links, str) else ", wires between pairs"
        yield [
            _named(name),
            f"{row['count']} x `{row['device']}`",
            f"`{default}`{pairs}" if default else "",
            _network(MACHINE_NETWORKS[name], origins),
            price,
        ]


def _network(row: Mapping[str, Any], origins: Origins) -> str:
    key = "preset" if "preset" in row else "bandwidth"
    cards = f"{row['cards']} cards" if "cards" in row else f"a card per {row.get('per', 'device')}"
    return f"{_number(row[key], origins, f'network.{key}')}, {cards}"


def _sources() -> Iterator[list[str]]:
    for key, text in SOURCES.items():
        yield [key, text.replace("|", "\\|"), "yes" if is_verified((key,)) else "no"]
