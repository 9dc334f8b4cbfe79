"""Layouts and ways to run an op, in words for people who do not know the letters.

S0 R    over data 2 × tensor 4        ->   split along dimension 0 over data, whole over tensor
R S1 -> S1                            ->   takes whole, split along dimension 1; makes split along dimension 1
"""

from __future__ import annotations

from collections.abc import Sequence

from cost_models.layout import Placement, Replicate, Shard
from passes.shard.words import Choice, Placements


def layout_words(placements: Placements, axes: Sequence[str]) -> str:
    """Say how a tensor lies on the axes of a mesh; "" if it is whole on all of them."""
    if all(isinstance(one, Replicate) for one in placements):
        return ""
    return ", ".join(f"{_words(one)} over {axis}" for one, axis in zip(placements, axes, strict=True))


def choice_words(choices: Sequence[Choice], axes: Sequence[str]) -> str:
    """Say how an op takes its operands and what it makes, axis by axis."""
    return "; ".join(f"over {axis}: {_choice(choice)}" for choice, axis in zip(choices, axes, strict=True))


def _choice(choice: Choice) -> str:
    takes = ", ".join(_words(need.placement) for need in choice.inputs) or "nothing"
    makes = ", ".join(map(_words, choice.outputs)) or "nothing"
    if choice.local:
        makes += f" by {choice.local.replace(':', ', ').replace('_', ' ')}"
    return f"takes {takes}; makes {makes}"


def _words(placement: Placement) -> str:
    if isinstance(placement, Shard):
        return f"split along dimension {placement.dim}"
    return "whole" if isinstance(placement, Replicate) else "a part of a sum"
