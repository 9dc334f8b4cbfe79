"""Device groups and tables by device, written briefly: a plan for thousands of devices names a group, not its members.

    [3]  [5, 2]                                   few devices, or in no order
    {"first": 0, "count": 8, "stride": 1}         0, 1, … 7
    {"0-7": 512, "8": 64}                         512 for each of the devices 0 to 7, 64 for device 8

In memory they are tuples of ranks, and tables with an entry for each rank.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

from cost_models.units import show
from partitioner.record.file import Amount, Natural

MOST_DEVICES = 1 << 20
"""The most devices that a group or table is expanded to: a larger number is damage, and would fill the memory."""
GROUP_KEYS = ("first", "count", "stride")
V = TypeVar("V")


def _expanded_group(value: object) -> object:
    """Return the ranks of ``{"first", "count", "stride"}``; anything else as it is."""
    if not isinstance(value, Mapping):
        return tuple(value) if isinstance(value, list) else value
    numbers = [value.get(key) for key in GROUP_KEYS]
    if value.keys() != set(GROUP_KEYS) or not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError(f"expected a list of devices, or an object with {', '.join(GROUP_KEYS)}")
    first, count, stride = numbers
    assert isinstance(first, int)
    assert isinstance(count, int)
    assert isinstance(stride, int)
    if not 1 <= count <= MOST_DEVICES or stride < 1:
        raise ValueError(f"{count} devices, {stride} apart: expected 1 to {MOST_DEVICES:,}, 1 or more apart")
    return tuple(range(first, first + count * stride, stride))


def _compact_group(ranks: tuple[int, ...]) -> list[int] | dict[str, int]:
    """Write ranks that are equally far apart as their first, their number and their distance."""
    strides = {b - a for a, b in itertools.pairwise(ranks)}
    if len(strides) == 1 and min(strides) > 0:
        return dict(zip(GROUP_KEYS, (ranks[0], len(ranks), strides.pop()), strict=True))
    return list(ranks)


DeviceGroup = Annotated[
    tuple[Natural, ...],
    BeforeValidator(_expanded_group),
    PlainSerializer(_compact_group, when_used="json"),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "array", "items": {"type": "integer", "minimum": 0}},
                {
                    "type": "object",
                    "properties": {
                        "first": {"type": "integer", "minimum": 0},
                        "count": {"type": "integer", "minimum": 1},
                        "stride": {"type": "integer", "minimum": 1},
                    },
                    "required": list(GROUP_KEYS),
                    "additionalProperties": False,
                },
            ]
        }
    ),
]
"""Ranks of a group; in JSON a list, or an object of first, count and stride."""


def _expanded_table(value: object) -> object:
    """Return a table with an entry for each rank of keys such as "0-7"; anything else as it is."""
    if not isinstance(value, Mapping):
        return value
    table: dict[object, object] = {}
    for key, entry in value.items():
        for rank in _ranks_of(key):
            if rank in table:
                raise ValueError(f"{show(rank)} is there twice")
            table[rank] = entry
    return table


def _ranks_of(key: object) -> Iterator[object]:
    read = re.fullmatch(r"([0-9]{1,9})-([0-9]{1,9})", key) if isinstance(key, str) else None
    if read is None:
        yield key
        return
    first, last = int(read[1]), int(read[2])
    if not 0 < last - first < MOST_DEVICES:
        raise ValueError(f"{key!r} is no range of devices, such as 0-7")
    yield from map(str, range(first, last + 1))


def _compact_table(table: Mapping[str, V]) -> dict[str, V]:
    """Write neighbouring ranks with equal entries as one."""
    if not all(key.isdecimal() for key in table):
        return dict(table)
    compact: dict[str, V] = {}
    ranks = sorted(map(int, table))
    runs = itertools.groupby(enumerate(ranks), key=lambda item: (item[1] - item[0], table[str(item[1])]))
    for (_, entry), members in runs:
        run = [rank for _, rank in members]
        compact[str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}"] = entry
    return compact


def _table(entry: dict[str, Any]) -> WithJsonSchema:
    keys = {"pattern": "^[0-9]+(-[0-9]+)?$"}
    return WithJsonSchema({"type": "object", "additionalProperties": entry, "propertyNames": keys})


BytesByDevice = Annotated[
    dict[str, Natural],
    BeforeValidator(_expanded_table),
    PlainSerializer(_compact_table, when_used="json"),
    _table({"type": "integer", "minimum": 0}),
]
"""A size for each rank; in JSON, neighbours of equal size share a key such as "0-7"."""

SecondsByDevice = Annotated[
    dict[str, Amount],
    BeforeValidator(_expanded_table),
    PlainSerializer(_compact_table, when_used="json"),
    _table({"type": "number", "minimum": 0}),
]
"""Seconds for each rank, written alike."""
