"""What a page's first script makes of its packed data."""

from __future__ import annotations

from typing import Any

from partitioner.pictures.page import OF, RUNS, TEXTS


def unpacked(data: Any) -> Any:
    """As ``page/scripts/00-report.js`` has it."""
    if isinstance(data, list):
        return [unpacked(value) for value in data]
    if not isinstance(data, dict):
        return data
    if RUNS in data:
        pairs = zip(data[RUNS][::2], data[RUNS][1::2], strict=True)
        return [value for value, count in pairs for _ in range(count)]
    if TEXTS in data:
        texts = data[TEXTS]
        return {
            name: texts[at[0]].replace("#", str(at[1]), 1) if len(at) > 1 else texts[at[0]]
            for name, at in data[OF].items()
        }
    return {key: unpacked(value) for key, value in data.items()}
