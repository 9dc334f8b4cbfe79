"""Plans of earlier schemas, read as plans of today's.

1 -> 2   ``placements`` (op -> devices) is gone: stages name their ops and devices. Groups and tables by device may be
         written briefly (``partitioner.record.compact``); plain lists and tables, as schema 1 has them, are read too
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Upgrade = Callable[[dict[str, Any]], dict[str, Any]]


def _from_1(data: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in data.items() if key != "placements"} | {"schema_version": 2}


UPGRADES: Mapping[int, Upgrade] = {1: _from_1}
"""Version -> what makes it the next one."""
