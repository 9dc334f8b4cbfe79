"""The answer of ``plan.explain``: facts in words, and the ways that something could have been."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cost_models.shown import ShownInNotebooks, printable
from cost_models.units import format_bytes, format_seconds
from partitioner.report.text import columns, labelled
from passes.search.outcome import PlacedWay

MOST_WAYS = 20
"""The most ways that the text shows; ``ways`` has all."""


@dataclass(frozen=True)
class Explanation(ShownInNotebooks):
    """``str()`` is what the command prints. ``ways``: cheapest first; none for layer-wise plans, which fix nothing but the
    stage. ``facts``: label and text, why among them."""

    name: str
    facts: Mapping[str, str]
    ways: tuple[PlacedWay, ...]

    @property
    def why(self) -> str:
        """The reason that it is as it is, in words."""
        return self.facts["why"]

    def __str__(self) -> str:
        lines = [labelled(label, text) for label, text in self.facts.items()]
        table = _table(self.ways) if self.ways else ""
        return printable("\n\n".join(["\n".join(lines), table]) if table else "\n".join(lines))

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {
            "name": self.name,
            "facts": dict(self.facts),
            "ways": [asdict(way) for way in self.ways],
        }


def _table(ways: tuple[PlacedWay, ...]) -> str:
    chosen = next(way for way in ways if way.chosen)
    shown = list(ways[:MOST_WAYS])
    if chosen not in shown:
        shown[-1] = chosen
    header = ("", "layout", "step", "to chosen", "computes", "sends", "on a device")
    rows = [
        [
            "*" if way.chosen else "",
            way.layout,
            format_seconds(way.step_seconds) if way.possible else "-",
            f"{signed(way.step_seconds - chosen.step_seconds)}" if way.possible and not way.chosen else "",
            format_seconds(way.computes_seconds),
            format_seconds(way.sends_seconds) if way.possible else "no bridge",
            format_bytes(int(way.memory_bytes)),
        ]
        for way in shown
    ]
    hidden = len(ways) - len(shown)
    if hidden:
        rows.append(["", f"({hidden} more)", *[""] * 5])
    return columns(header, rows, left=("", "layout"))


def signed(seconds: float) -> str:
    """Write seconds with their sign: "+1.2 ms"."""
    return f"{'-' if seconds < 0 else '+'}{format_seconds(abs(seconds))}"
