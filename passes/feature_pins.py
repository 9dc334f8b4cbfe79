"""Pins of a feature-wise plan: ``{glob: layout}`` over parameters, batch leaves, ops and modules.

{"*.up_proj.weight": "S0"}          the stored layout of parameters, on a mesh of one axis
{"input_ids": "S0 R"}               how a batch leaf arrives, on a mesh of two
{"*.mlp.down_proj": "S0 P"}         the first output of ops, by name or module path
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase

import numpy as np
from numpy.typing import NDArray

from cost_models.errors import UsageError
from cost_models.layout import Partial, Placement, Replicate, Shard
from passes.feature_codes import source_placements
from passes.feature_graph import Unit, makes_values
from passes.feature_problem import UnitNumbers
from passes.graph import OpGraph
from passes.sharding import Placements


def parse_layout(text: str) -> Placements:
    """ "S0 R" or "S0,R": one placement per mesh axis. Raises UsageError."""
    words = [word for word in re.split(r"[\s,]+", text.strip()) if word]
    found: list[Placement] = []
    for word in words:
        if word in ("R", "P"):
            found.append(Replicate() if word == "R" else Partial())
        elif re.fullmatch(r"S\d", word):
            found.append(Shard(int(word[1:])))
        else:
            raise UsageError(
                f"cannot read the layout {text!r}",
                [f"{word!r} is not R, P, or S and a dimension"],
                ['"S0" on a mesh of one axis, "R S1" on one of two'],
            )
    if not found:
        raise UsageError(f"cannot read the layout {text!r}", ["it is empty"])
    return tuple(found)


def resolve(graph: OpGraph, pins: Mapping[str, str]) -> dict[str, str]:
    """Node -> layout text, normalized. Raises UsageError with every glob that matches nothing or contradicts another."""
    problems: list[str] = []
    found: dict[str, tuple[str, str]] = {}
    names: dict[str, list[str]] = {}
    for given in graph.inputs:
        if given.kind in ("parameter", "batch"):
            names.setdefault(given.name, []).append(given.node)
    for node in graph.ops:
        if makes_values(node):
            names.setdefault(node.name, []).append(node.name)
            if path := str(node.meta.get("module_path", "")):
                names.setdefault(path, []).append(node.name)
    for glob, text in pins.items():
        layout = " ".join(_short(p) for p in parse_layout(text))
        matched = [node for name, own in names.items() if fnmatchcase(name, glob) for node in own]
        if not matched:
            close = get_close_matches(glob, names, n=2, cutoff=0.4)
            hint = f" (there is {', '.join(close)})" if close else ""
            problems.append(f"{glob!r} matches no parameter, batch leaf, op or module{hint}")
        for member in matched:
            known = found.setdefault(member, (layout, glob))
            if known[0] != layout:
                problems.append(f"{member} matches {known[1]!r} ({known[0]}) and {glob!r} ({layout})")
    if problems:
        raise UsageError("cannot use these pins", list(dict.fromkeys(problems)))
    return {node: layout for node, (layout, _) in found.items()}


def allowed_by_pin(unit: Unit, numbers: UnitNumbers, layout: str, axes: int) -> NDArray[np.bool_]:
    """Which of the unit's options have the layout. Shape [options]."""
    wanted = parse_layout(layout)
    return np.array([source_placements(code, axes) == wanted for code in numbers.outputs[0].tolist()])


def _short(placement: Placement) -> str:
    if isinstance(placement, Shard):
        return f"S{placement.dim}"
    return "P" if isinstance(placement, Partial) else "R"
