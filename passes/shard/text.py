"""Layouts and choices as text, for plan files and people, and back.

placements     "S0 R"                                     one word per mesh axis: R, P, or S and a dimension
choice         "S0 R~ R~ -> S0"                           needs of the operands -> what each output is
               "S0 R -> P by cross_entropy:samples"       by a local form
               "S1 S0 S0 -> S1 in 4,4"                    counts among the arguments that the axis must divide
"""

from __future__ import annotations

import re

from cost_models.layout import Partial, Placement, Replicate, Shard
from passes.shard.words import Choice, Need, Placements, short

_CHOICE = re.compile(
    r"(?P<inputs>[^>]*?) ?-> ?(?P<outputs>[^a-z]*?)(?: by (?P<local>[a-z_]+:[a-z_]+))?(?: in (?P<divides>[0-9,]+))?"
)


def placements_text(placements: Placements) -> str:
    """ "S0 R"."""
    return " ".join(map(short, placements))


def read_placements(text: str) -> Placements:
    """The inverse of ``placements_text``. Raises ValueError."""
    return tuple(map(read_placement, text.split()))


def choice_text(choice: Choice) -> str:
    """Everything about a choice."""
    return f"{choice} in {','.join(map(str, choice.divides))}" if choice.divides else str(choice)


def read_choice(text: str) -> Choice:
    """The inverse of ``choice_text``. Raises ValueError."""
    found = _CHOICE.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no choice such as 'S0 R~ -> S0'")
    needs = tuple(
        Need(read_placement(word.removesuffix("~")), word.endswith("~")) for word in found["inputs"].split()
    )
    divides = tuple(int(count) for count in (found["divides"] or "").split(",") if count)
    return Choice(needs, read_placements(found["outputs"]), found["local"] or "", divides)


def read_placement(word: str) -> Placement:
    """ "S0": of one mesh axis. Raises ValueError."""
    if word in ("R", "P"):
        return Replicate() if word == "R" else Partial()
    if not re.fullmatch(r"S[0-9]", word):
        raise ValueError(f"{word!r} is not R, P, or S and a dimension")
    return Shard(int(word[1:]))
