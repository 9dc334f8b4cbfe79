"""The data of a page in fewer bytes, and what its first script makes of them again (``page/scripts/00-report.js``).

[7, 7, 7, 7, 9]                                         {"__runs__": [7, 4, 9, 1]}
{"0:8": "waits for h of micro-batch 3 from rank 1"}     {"__texts__": ["waits for h of micro-batch # from rank 1"],
                                                         "__of__": {"0:8": [0, 3]}}
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import chain, groupby
from typing import Any

RUNS, TEXTS, OF = "__runs__", "__texts__", "__of__"
FEWEST = 8
"""Numbers and texts of which it is worth while. By hand."""
_MICROBATCH = re.compile(r"(?<=micro-batch )\d+")


def packed(data: Any) -> Any:
    """Return data that is written in fewer bytes and means the same."""
    if isinstance(data, Mapping):
        if len(data) >= FEWEST and all(isinstance(value, str) for value in data.values()):
            return _texts(data)
        return {key: packed(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        if len(data) >= FEWEST and all(type(value) in (int, float) for value in data):
            runs = [(value, len(list(row))) for value, row in groupby(data)]
            return {RUNS: list(chain(*runs))} if 2 * len(runs) < len(data) else data
        return [packed(value) for value in data]
    return data


def _texts(data: Mapping[str, str]) -> dict[str, Any]:
    """Pack texts by name: each unlike one once, but for the number of its micro-batch."""
    number: dict[str, int] = {}
    of: dict[str, list[int]] = {}
    for key, text in data.items():
        found = _MICROBATCH.findall(text)
        if len(found) == 1 and "#" not in text:
            text = _MICROBATCH.sub("#", text)
            of[key] = [number.setdefault(text, len(number)), int(found[0])]
        else:
            of[key] = [number.setdefault(text, len(number))]
    return {TEXTS: list(number), OF: of}
