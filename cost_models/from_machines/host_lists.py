"""Lists of hosts and counts as SLURM writes them.

node[01-03,07],gpu-a      node01, node02, node03, node07, gpu-a: in this order, zeros in front kept
8(x4),4                   8, 8, 8, 8, 4
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from cost_models.spec.fields import MAX_NAMES, expand_names

_ITEM = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_COUNT = re.compile(r"([1-9]\d{0,4})(?:\(x([1-9]\d{0,4})\))?")
_NUMBERED = re.compile(r"(.*?)(\d{1,9})(\D*)")


def read_hosts(text: str) -> tuple[str, ...]:
    """List the hosts; ``ValueError`` says what was expected."""
    names: list[str] = []
    if _ITEM.sub("", text).strip(",") or not text or ",," in f",{text},":
        raise ValueError('a list such as "node[01-04,07]"')
    for item in _ITEM.findall(text):
        names += expand_names(item)
        if len(names) > MAX_NAMES:
            raise ValueError(f"at most {MAX_NAMES} hosts")
    twice = (
        next((name for name in names if names.count(name) > 1), None)
        if len(set(names)) < len(names)
        else None
    )
    if twice is not None:
        raise ValueError(f"each host once ({twice} is there twice)")
    return tuple(names)


def read_counts(text: str) -> tuple[int, ...]:
    """List counts, one for each node; ``ValueError`` says what was expected."""
    found: list[int] = []
    for piece in text.split(","):
        match = _COUNT.fullmatch(piece.strip())
        if match is None or len(found) > MAX_NAMES:
            raise ValueError('counts such as "8(x4),4"')
        found += [int(match[1])] * int(match[2] or 1)
    return tuple(found)


def write_hosts(names: Sequence[str]) -> list[str]:
    """Write hosts with ranges, in their order, as texts of one pattern each: node01, node02, gpu -> node[01-02], gpu."""
    written = []
    for (prefix, suffix), group in itertools.groupby(names, key=_pattern):
        members = list(group)
        if len(members) == 1 or prefix is None:
            written += members
        else:
            numbers = [name[len(prefix) : len(name) - len(suffix)] for name in members]
            written.append(f"{prefix}[{','.join(_spans(numbers))}]{suffix}")
    return written


def _pattern(name: str) -> tuple[str | None, str]:
    """Return what stands before and behind the last number of a name."""
    match = _NUMBERED.fullmatch(name)
    return (match[1], match[3]) if match else (None, name)


def _spans(numbers: Sequence[str]) -> list[str]:
    """Write numbers as spans: 01, 02, 03, 7 -> 01-03, 7."""
    spans: list[tuple[str, str]] = []
    for number in numbers:
        if spans and f"{int(spans[-1][1]) + 1:0{len(spans[-1][0])}d}" == number:
            spans[-1] = (spans[-1][0], number)
        else:
            spans.append((number, number))
    return [first if first == last else f"{first}-{last}" for first, last in spans]
