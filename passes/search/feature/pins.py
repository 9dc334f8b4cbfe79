"""Pins of a feature-wise plan: ``{glob: layout}`` over parameters, batch leaves, ops and modules.

{"*.up_proj.weight": "S0"}          the stored layout of parameters, on a mesh of one axis
{"*.weight": "R/S0?"}               whole, with gradient and optimizer state split (ZeRO-1); where the tensor can have it
{"input_ids": "S0 R"}               how a batch leaf arrives, on a mesh of two
{"*.mlp.down_proj": "S0 P"}         the first output of ops, by name or module path
{"*": "data column_row"}            a known pattern per axis (``passes.search.feature.presets``), where it can be had

A layout must hold for all that its glob matches; with "?", and of patterns, for what can have it, and for something.
An exact layout goes before one with "?", and that before a pattern.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase

import numpy as np
from numpy.typing import NDArray

from cost_models.errors import UsageError
from cost_models.layout import Shard
from passes.graph.graph import OpGraph
from passes.search.feature.graph import Unit, makes_values
from passes.search.feature.options import Options, StoredChoice, UnitNumbers
from passes.search.feature.presets import PRESETS, AxisRule, refused_word, rules_of
from passes.shard.words import Placements, crossing_text, read_placement

Rules = tuple[AxisRule | None, ...]
"""One per mesh axis; None: anything."""

_PLACEMENT = r"(R|P|S\d)(?:/(R|S\d))?"


@dataclass(frozen=True)
class Pin:
    """A demand on a node. ``rules``: one per mesh axis, or one for all axes of a pattern. ``firm``: nothing else
    will do."""

    name: str
    """The node's name, as users know it."""
    glob: str
    text: str
    rules: Rules
    firm: bool
    pattern: bool = False

    @property
    def mark(self) -> str:
        """Nodes with unlike marks are decided apart."""
        return f"{'' if self.firm else '?'}{' '.join(map(str, self.rules))}"


def resolve(graph: OpGraph, pins: Mapping[str, str]) -> dict[str, Pin]:
    """Node -> what is fixed of it. Raises UsageError with every glob that matches nothing or contradicts another."""
    if not pins:
        return {}
    problems: list[str] = []
    found: dict[str, Pin] = {}
    names = _names(graph)
    parameters = {given.node for given in graph.inputs if given.kind == "parameter"}
    for glob, text in pins.items():
        matched = [node for name, own in names.items() if fnmatchcase(name, glob) for node in own]
        if not matched:
            close = get_close_matches(glob, names, n=2, cutoff=0.4)
            hint = f" (there is {', '.join(close)})" if close else ""
            problems.append(f"{glob!r} matches no parameter, batch leaf, op or module{hint}")
            continue
        made = list(_pins(graph, glob, text, matched, parameters))
        problems += [f"{glob!r}: {why}" for why in _empty(text, [pin for _, pin in made])]
        for node, pin in made:
            known = found.setdefault(node, pin)
            if known.rules != pin.rules and _rank(known) == _rank(pin):
                problems.append(f"{pin.name} matches {known.glob!r} ({known.text}) and {glob!r} ({text})")
            elif _rank(pin) < _rank(known):
                found[node] = pin
    if problems:
        raise UsageError("cannot use these pins", list(dict.fromkeys(problems)))
    return found


def pins_of_part(
    part: OpGraph,
    pins: Mapping[str, Pin],
    arriving: Mapping[tuple[str, str], tuple[Placements, Placements]],
    shared: Collection[str] = (),
) -> dict[str, Pin]:
    """Choose the pins of a part's nodes from those of the whole model: what a pattern is about depends on all of it.

    ``arriving``: (kind, name) of inputs whose layouts, and their gradients', other parts on the same ranks have settled.
    Another value arrives as its op was to make it. ``shared``: parameters that other parts read too, which are whole
    whatever a pattern says.
    """
    found = {}
    for node in part.graph.nodes:
        given, pin = part.input_of.get(node.name), pins.get(node.name)
        if given is not None and (settled := arriving.get((given.kind, given.name))) is not None:
            rules = tuple(
                AxisRule(frozenset({p}), state=frozenset({back})) for p, back in zip(*settled, strict=True)
            )
            pin = Pin(given.name, given.name, crossing_text(*settled), rules, firm=True)
        elif given is not None and given.kind == "value" and pin is not None:
            made = tuple(
                None if rule is None or rule.outputs is None else AxisRule(rule.outputs, essential=False)
                for rule in pin.rules
            )
            pin = replace(pin, rules=made, firm=False)
        elif given is not None and given.name in shared and pin is not None and pin.pattern:
            pin = replace(
                pin,
                rules=tuple(None if rule is None else replace(rule, essential=False) for rule in pin.rules),
            )
        if pin is not None:
            found[node.name] = pin
    return found


def _names(graph: OpGraph) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for given in graph.inputs:
        if given.kind in ("parameter", "batch"):
            names.setdefault(given.name, []).append(given.node)
    for alias, name in graph.aliases.items():  # a tied parameter goes by any of its names
        names.setdefault(alias, []).extend(names.get(name, []))
    for node in graph.ops:
        if makes_values(node):
            names.setdefault(node.name, []).append(node.name)
            if path := str(node.meta.get("module_path", "")):
                names.setdefault(path, []).append(node.name)
    return names


def _known_as(graph: OpGraph, node: str) -> str:
    return graph.input_of[node].name if node in graph.input_of else node


def _pins(
    graph: OpGraph, glob: str, text: str, matched: Sequence[str], parameters: set[str]
) -> Iterator[tuple[str, Pin]]:
    if words := _patterns(text):
        per_axis = [rules_of(graph, word) for word in words]
        for node in dict.fromkeys(matched):
            rules = tuple(by_node.get(node) for by_node in per_axis)
            if any(rules):
                yield node, Pin(_known_as(graph, node), glob, text, rules, firm=False, pattern=True)
        return
    rules = parse_layout(text)
    of_state = any(rule.state is not None for rule in rules)
    for node in dict.fromkeys(matched):
        if not of_state or node in parameters:
            yield node, Pin(_known_as(graph, node), glob, text, rules, not text.rstrip().endswith("?"))


def _patterns(text: str) -> list[str]:
    """The patterns that a text names; none where it is a layout."""
    words = _words(text)
    return words if all(word in PRESETS for word in words) else []


def _words(text: str) -> list[str]:
    return [word for word in re.split(r"[\s,]+", text.strip()) if word]


def _empty(text: str, made: Sequence[Pin]) -> Iterator[str]:
    """Name the parts of a pin that are about nothing its glob matches."""
    if words := _patterns(text):
        for axis, word in enumerate(words):
            if not any((rule := pin.rules[axis]) is not None and rule.essential for pin in made):
                yield f"nothing that it matches is what {word!r} is about"
    elif not made:
        yield f"it matches no parameter, and nothing else has the gradients and state of {text!r}"


def _rank(pin: Pin) -> int:
    """Order pins of one node: the lowest goes first."""
    return 0 if pin.firm else 2 if pin.pattern else 1


def parse_layout(text: str) -> tuple[AxisRule, ...]:
    """ "S0 R", "S0,R", "R/S0?": one rule per mesh axis. Raises UsageError."""
    words = _words(text.strip().removesuffix("?"))
    problems: list[str] = [] if words else ["it is empty"]
    found: list[AxisRule] = []
    for word in words:
        if read := re.fullmatch(_PLACEMENT, word):
            stored = read_placement(read[1])
            state = None if read[2] is None else read_placement(read[2])
            if state is not None and isinstance(stored, Shard) and state != stored:
                problems.append(f"{word!r}: what is stored in parts has its state in the same parts")
            found.append(AxisRule(frozenset({stored}), state=None if state is None else frozenset({state})))
        else:
            problems.append(refused_word(word))
    if problems:
        raise UsageError(
            f"cannot read the layout {text!r}",
            problems,
            [
                '"S0" on a mesh of one axis, "R S1" on one of two; "R/S0": whole, with split state; "S0?": where it can be',
                f"or one of {', '.join(PRESETS)}, per axis or for all",
            ],
        )
    return tuple(found)


def axes_of_layout(text: str) -> int | None:
    """Count the mesh axes that a pin speaks of; None where one pattern is for all. Raises UsageError if it says nothing."""
    words = _patterns(text)
    if words:
        return None if len(words) == 1 else len(words)
    return len(parse_layout(text))


# ----------------------------------------------------------------------------------------------------------
# On a mesh.


def restricted(unit: Unit, numbers: UnitNumbers, pin: Pin, axes: int) -> UnitNumbers:
    """The unit's options that the pin allows: none where a firm one cannot be had on this mesh."""
    if unit.kind in ("output", "leaving"):
        return numbers
    for rules in _relaxed(pin, axes):
        allowed = _allowed(numbers, rules)
        if allowed.any():
            return numbers.keep(allowed)
    return numbers.keep(np.zeros(len(numbers.seconds), dtype=bool)) if pin.firm else numbers


def _per_axis(pin: Pin, axes: int) -> Rules | None:
    """None where the pin speaks of another number of axes. One pattern is for all axes."""
    if len(pin.rules) == axes:
        return pin.rules
    return pin.rules * axes if len(pin.rules) == 1 and pin.pattern else None


def _relaxed(pin: Pin, axes: int) -> Iterator[Rules]:
    """Yield what is wanted, then what the pin says otherwise; of one that is not firm then what it wants on some of the
    axes only, the first axes before others."""
    rules = _per_axis(pin, axes)
    if rules is None:
        return
    yield rules
    if any(rule is not None and rule.otherwise is not None for rule in rules):
        yield tuple(rule if rule is None else rule.otherwise or rule for rule in rules)
    if not pin.firm:
        for left_out in sorted(range(1, 2**axes - 1), key=lambda mask: (mask.bit_count(), mask)):
            yield tuple(None if left_out >> axes - 1 - axis & 1 else rules[axis] for axis in range(axes))


def _allowed(numbers: UnitNumbers, rules: Rules) -> NDArray[np.bool_]:
    """Shape [options]."""
    detail = numbers.detail
    allowed = np.ones(len(numbers.index), dtype=bool)
    for axis, rule in enumerate(rules):
        if rule is None:
            continue
        if isinstance(detail, Options):
            each = np.array([rule.allows(choice) for choice in detail.choices], dtype=bool)
            allowed &= each[detail.axes[numbers.index, axis]]
        else:
            known: dict[StoredChoice, bool] = {}
            for k, option in enumerate(numbers.index.tolist()):
                way = detail[option][axis]
                allowed[k] &= known.setdefault(way, rule.allows_stored(way))
    return allowed


@dataclass(frozen=True)
class Unmet:
    """The demands of pins on one mesh, or several: what cannot be, what must hold for something, and what does."""

    impossible: tuple[str, ...] = ()
    """Tensors that cannot be as they must."""
    wanted: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """(glob, layout) -> something that it is about."""
    kept: frozenset[tuple[str, str]] = frozenset()

    def __or__(self, other: Unmet) -> Unmet:
        return Unmet(
            self.impossible + other.impossible, {**other.wanted, **self.wanted}, self.kept | other.kept
        )

    @property
    def problems(self) -> list[str]:
        """The reasons why a mesh does not allow the pins; none if it does."""
        return list(self.impossible) or [
            f"nothing that matches {glob!r} can be {what}, such as {name}"
            for (glob, what), name in self.wanted.items()
            if (glob, what) not in self.kept
        ]


def unmet_of(units: Sequence[tuple[Unit, UnitNumbers]], pins: Mapping[str, Pin], axes: int) -> Unmet:
    """Look at what a mesh of so many ``axes`` leaves the units of their pins."""
    problems: list[str] = []
    wanted: dict[tuple[str, str], str] = {}
    kept: set[tuple[str, str]] = set()
    for unit, numbers in units:
        pin = pins.get(unit.name)
        if pin is None or unit.kind in ("output", "leaving"):
            continue
        if not len(numbers.seconds):
            problems.append(f"{pin.name} cannot be {pin.text} ({pin.glob!r}){_why_not(unit, pin, axes)}")
            continue
        for what, rules in _to_hold(pin, axes):
            sizes = ", ".join(map(str, unit.outputs[0].shape)) if unit.kind == "parameter" else ""
            wanted.setdefault((pin.glob, what), f"{pin.name} of {sizes}" if sizes else pin.name)
            if _allowed(numbers, rules).all():
                kept.add((pin.glob, what))
    return Unmet(tuple(problems), wanted, frozenset(kept))


def _why_not(unit: Unit, pin: Pin, axes: int) -> str:
    """Name the reason as far as it is plain: another number of axes, or of dimensions, a sum that is stored, sizes."""
    if len(pin.rules) != axes and not pin.pattern:
        return f": the mesh has {axes} {'axis' if axes == 1 else 'axes'}"
    words = _words(pin.text.strip().removesuffix("?"))
    if unit.kind == "op" or not unit.outputs:
        return ": no way to run it makes that, or the sizes do not divide"
    if "P" in words:
        return ": what is given is whole or split, never a part of a sum"
    sizes = ", ".join(map(str, unit.outputs[0].shape))
    return f": its sizes are ({sizes})" if "S" in pin.text else ""


def _to_hold(pin: Pin, axes: int) -> Iterator[tuple[str, Rules]]:
    """(in words, rules) of what must hold somewhere: a layout on all axes together, what a pattern is about on each."""
    rules = _per_axis(pin, axes)
    if rules is None:
        yield f"{pin.text} on {axes} axes", (AxisRule(outputs=frozenset()),) * axes
    elif not pin.pattern:
        yield pin.text, rules
    else:
        words = _patterns(pin.text)
        for axis, rule in enumerate(rules):
            if rule is not None and rule.essential:
                alone = tuple(rule if other == axis else None for other in range(axes))
                yield f"{words[axis % len(words)]} on axis {axis}", alone
