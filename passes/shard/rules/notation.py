"""Index notation: which dimensions of an op go together. One string says all ways to shard it.

    input'[b* i] weight'[o i] bias+[o] -> [b* o]          linear

    [b* o]     a letter per dimension; the same letter is the same range of numbers. ``b*``: any number of dimensions,
               counted from the right. ``.``: a dimension that stays whole; ``.*``: any number of those.
    '          the op is linear in this operand, the others fixed
    +          this operand is added to the rest

What follows from it, per letter (a dimension of size 0 or 1 has none):
    operands that have it     S(its dimension)
    the others                R, and their gradient is one rank's part of a sum (~)
    outputs that have it      S(its dimension)
    no output has it          it is summed over: outputs P, added operands P
Besides: all R; and P through linear operands: one of the ' operands and all + operands P, the others R~ -> P.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import torch
from torch import fx

from cost_models.errors import InternalError
from cost_models.layout import Partial, Placement, Replicate, Shard
from passes.graph.nodes import tensors_of
from passes.shard.rules.shapes import operand_names, shape
from passes.shard.words import Choice, Need, all_replicated, operands

Rule: TypeAlias = Callable[[fx.Node], tuple[Choice, ...]]

R, P = Replicate(), Partial()
_TERM = re.compile(r"(\w*)(['+]?)\[([^\]]*)\]")


@dataclass(frozen=True)
class Term:
    """The dimensions of one operand or output: a letter each, None where it stays whole."""

    dims: tuple[str | None, ...]
    linear: bool = False
    added: bool = False


@dataclass(frozen=True)
class Pattern:
    """A term before the number of dimensions is known."""

    name: str
    mark: str
    tokens: tuple[str, ...]

    def of_rank(self, rank: int) -> Term:
        """Return its term for a tensor of ``rank`` dimensions."""
        stars = [t for t in self.tokens if t.endswith("*")]
        extra = rank - (len(self.tokens) - len(stars))
        if len(stars) > 1 or extra < 0 or (extra and not stars):
            raise InternalError(
                f"a sharding rule has {' '.join(self.tokens)} for a tensor of {rank} dimensions"
            )
        dims: list[str | None] = []
        for token in self.tokens:
            letter = token.removesuffix("*")
            if token.endswith("*"):
                dims += [None if letter == "." else f"{letter}{i}" for i in reversed(range(extra))]
            else:
                dims.append(None if letter == "." else letter)
        return Term(tuple(dims), linear=self.mark == "'", added=self.mark == "+")


@lru_cache(maxsize=512)
def parse(text: str) -> tuple[tuple[Pattern, ...], tuple[Pattern, ...]]:
    """Parse a rule into its operands' and outputs' patterns."""
    left, arrow, right = text.partition("->")
    sides = [
        tuple(Pattern(n, m, tuple(d.split())) for n, m, d in _TERM.findall(side)) for side in (left, right)
    ]
    if not arrow or _TERM.sub("", left + right).strip():
        raise InternalError(f"not a sharding rule: {text!r}")
    return sides[0], sides[1]


def notation(text: str) -> Rule:
    """Make the rule that a string states; operands that an op was not given are left out."""
    return lambda node: from_text(node, text)


def from_text(
    node: fx.Node, text: str, divides: Mapping[str, int] | None = None, local: Mapping[str, str] | None = None
) -> tuple[Choice, ...]:
    """Apply ``from_terms`` to a string's terms for this op."""
    left, right = parse(text)
    by_name = {pattern.name: pattern for pattern in left}
    inputs = [
        by_name[name].of_rank(len(value.meta["val"].shape))
        for name, value in zip(operand_names(node), operands(node), strict=True)
    ]
    values = tensors_of(node)
    patterns = right * len(values) if len(right) == 1 else right
    return from_terms(
        node,
        inputs,
        [p.of_rank(v.dim()) for p, v in zip(patterns, values, strict=True)],
        divides=divides,
        local=local,
    )


def from_terms(
    node: fx.Node,
    inputs: Sequence[Term],
    outputs: Sequence[Term],
    *,
    divides: Mapping[str, int] | None = None,
    local: Mapping[str, str] | None = None,
) -> tuple[Choice, ...]:
    """List every choice on one axis; all replicated first.

    ``divides``: a count that the axis must divide, by letter. ``local``: the local function, by letter.
    """
    values = tuple(operand.meta["val"] for operand in operands(node))
    taken = [_lettered(term, value) for term, value in zip(inputs, values, strict=True)]
    made = [_lettered(term, value) for term, value in zip(outputs, tensors_of(node), strict=True)]
    letters = dict.fromkeys(letter for dims in [*taken, *made] for letter in dims if letter)
    floats = [value.is_floating_point() or value.is_complex() for value in values]
    found = [all_replicated(len(inputs), len(outputs))]
    for letter in letters:
        choice = _shard(letter, taken, made, inputs, floats)
        found.append(
            Choice(
                choice.inputs,
                choice.outputs,
                (local or {}).get(letter, ""),
                (divides[letter],) if letter in (divides or {}) else (),  # type: ignore[index]
            )
        )
    found += _partial(inputs, len(outputs), floats)
    return tuple(dict.fromkeys(found))


def _lettered(term: Term, value: torch.Tensor) -> tuple[str | None, ...]:
    """Return the letters of the dimensions that have more than one element: others are broadcast, or nothing to shard."""
    return tuple(letter if size > 1 else None for letter, size in zip(term.dims, shape(value), strict=True))


def _shard(
    letter: str,
    taken: Sequence[tuple[str | None, ...]],
    made: Sequence[tuple[str | None, ...]],
    inputs: Sequence[Term],
    floats: Sequence[bool],
) -> Choice:
    kept = [letter in dims for dims in made]
    if any(kept) and not all(kept):
        raise InternalError(f"a sharding rule has {letter} in some outputs only")
    summed = not any(kept)
    needs = [
        Need(Shard(dims.index(letter)))
        if letter in dims
        else Need(P)
        if summed and term.added
        else Need(R, partial_gradient=is_float)
        for dims, term, is_float in zip(taken, inputs, floats, strict=True)
    ]
    results: list[Placement] = [P if summed else Shard(dims.index(letter)) for dims in made]
    return Choice(tuple(needs), tuple(results))


def _partial(inputs: Sequence[Term], outputs: int, floats: Sequence[bool]) -> list[Choice]:
    """List the choices with P in, P out: once per operand that the op is linear in."""
    linear = [i for i, term in enumerate(inputs) if term.linear]
    partial = [i for i, term in enumerate(inputs) if term.linear or term.added]
    if not partial or not all(floats[i] for i in partial):
        return []
    return [
        Choice(
            tuple(
                Need(P) if term.added or i == chosen else Need(R, partial_gradient=is_float)
                for i, (term, is_float) in enumerate(zip(inputs, floats, strict=True))
            ),
            (P,) * outputs,
        )
        for chosen in (linear or [-1])
    ]
