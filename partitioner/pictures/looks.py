"""Colours that tell stages, micro-batches and kinds of memory apart in still pictures; from the ninth on a hatch helps.

The colours are those of the report page in its light theme: eight that people with any colour vision tell apart
(M. Okabe and K. Ito, "Color Universal Design", two of them made darker), thinned so that black text stands on them.
"""

from __future__ import annotations

PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#7b61c4", "#8f8200")
TINT = 0.24
"""The share of the colour in a tint; the rest is white."""


def tint(number: int, share: float = TINT) -> str:
    """Return a colour thinned with white."""
    colour = PALETTE[number % len(PALETTE)]
    parts = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(255 - (255 - part) * share):02x}" for part in parts)
