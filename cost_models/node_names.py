"""Names with ranges: ``dgx[00-63]`` is 64 names, ``r[0-1]n[1,4-6]`` is eight."""

from __future__ import annotations

import itertools
import math
import re

MAX_NAMES = 65536
"""More names than any cluster has nodes: a range beyond it is a slip of the keyboard."""

_BRACKET = re.compile(r"\[([^\[\]]*)\]")
_SPAN = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
_LITERAL = re.compile(r"[A-Za-z0-9_.\-]*")


def expand_names(text: str) -> tuple[str, ...]:
    """List all names that ``text`` stands for, in order; zeros in front are kept. ``ValueError`` if it is malformed."""
    parts = _BRACKET.split(text)  # literal, range, literal, range, …, literal
    literals, ranges = parts[0::2], parts[1::2]
    for literal in literals:
        if not _LITERAL.fullmatch(literal):
            raise ValueError('a name of letters, digits, "_", "-" and ".", with ranges such as "dgx[00-63]"')
    if not text:
        raise ValueError('a name such as "dgx[00-63]"')
    spans = [_spans(r) for r in ranges]
    total = math.prod(sum(last - first + 1 for first, last, _ in span) for span in spans)
    if total > MAX_NAMES:
        raise ValueError(f"a range of at most {MAX_NAMES} names")
    numbers = [
        [f"{n:0{width}d}" for first, last, width in span for n in range(first, last + 1)] for span in spans
    ]
    return tuple(
        literals[0] + "".join(number + literal for number, literal in zip(chosen, literals[1:], strict=True))
        for chosen in itertools.product(*numbers)
    )


def _spans(text: str) -> list[tuple[int, int, int]]:
    """Read ranges as (first, last, width): ``"00-03,7"`` → ``[(0, 3, 2), (7, 7, 1)]``."""
    spans = []
    for piece in text.split(","):
        match = _SPAN.fullmatch(piece.strip())
        if match is None:
            raise ValueError('a range such as "[00-63]" or "[0,4-7]"')
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError("a range that counts up")
        spans.append((first, last, len(match[1])))
    return spans
