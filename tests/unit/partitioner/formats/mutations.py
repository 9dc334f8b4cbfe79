"""Files with a few letters changed, for readers that refuse what they cannot read."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

PIECES = [
    "",
    "-",
    ":",
    "0",
    '"',
    "x",
    " ",
    "\n",
    "[",
    "{",
    "}",
    ",",
    "9",
    "&a",
    "*a",
    "\x00",
    "é",
    "null",
    "true",
]


def mutated(texts: Sequence[str], times: int) -> Iterator[str]:
    """Yield each text so many times, changed at one to four places."""
    drawn = random.Random(43)
    for text in list(texts) * times:
        letters = list(text)
        for _ in range(drawn.randint(1, 4)):
            at = drawn.randrange(len(letters))
            letters[at : at + drawn.randint(0, 2)] = drawn.choice(PIECES)
        yield "".join(letters)
