"""Masks and changes of scores as lists of steps over small tensors, for all pairs of query and key or for one.

    i >= j  &  document[b, i] == document[b, j]

    values   %0 [1, 1, l, 1]   %1 [1, 1, 1, s]   %2 [b, 1, l, 1]   %3 [b, 1, 1, s]
    steps    "ge.Tensor %0 %1"   "eq.Tensor %2 %3"   "__and__.Tensor $0 $1"

    %n       value n
    $n       the result of step n
    "%n"     a step alone: value n itself
    others   numbers, types and names, as JSON has them; a type by its name

With values of these shapes the steps give [b, h, l, s]; with the numbers that stand there for one b, h, i and j, one
number. So torch's kernels get the function that they ask for, and every other device the whole mask.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten


class ProgramValue(NamedTuple):
    """An argument that is a value, or the result of a step."""

    number: int
    made: bool = False

    def __str__(self) -> str:
        return f"{'$' if self.made else '%'}{self.number}"


class ProgramStep(NamedTuple):
    """A call of ``op``; None is the value itself."""

    op: Callable[..., Tensor] | None
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]


def write(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Write a step down; None if an argument cannot be."""
    texts = [_text(argument) for argument in args]
    named = [(name, _text(argument)) for name, argument in kwargs.items() if name != "device"]
    if None in texts or any(text is None for _, text in named):
        return None
    name = f"{op._schema.name.removeprefix('aten::')}.{op._overloadname}"
    return " ".join([name, *map(str, texts), *(f"{key}={text}" for key, text in named)])


def _text(argument: Any) -> str | None:
    if isinstance(argument, ProgramValue):
        return str(argument)
    if isinstance(argument, torch.dtype):
        return str(argument)
    plain = argument is None or isinstance(argument, bool | int | float)
    words = isinstance(argument, str) and argument.isidentifier()
    return json.dumps(argument) if plain or words else None


@lru_cache(maxsize=1024)
def parse(steps: tuple[str, ...]) -> tuple[ProgramStep, ...]:
    """Read steps."""
    return tuple(map(_step, steps))


def _step(text: str) -> ProgramStep:
    name, *arguments = text.split(" ")
    if name[0] in "%$":
        return ProgramStep(None, (_argument(name),), ())
    packet, _, overload = name.rpartition(".")
    given = [argument.rpartition("=") for argument in arguments]
    return ProgramStep(
        getattr(getattr(aten, packet), overload),
        tuple(_argument(value) for key, _, value in given if not key),
        tuple((key, _argument(value)) for key, _, value in given if key),
    )


def _argument(text: str) -> Any:
    if text[0] in "%$":
        return ProgramValue(int(text[1:]), made=text[0] == "$")
    if text.startswith("torch."):
        return getattr(torch, text.removeprefix("torch."))
    return json.loads(text)


def evaluate(steps: tuple[ProgramStep, ...], values: Sequence[Tensor], *, wide: bool = False) -> Tensor:
    """Return what the last step gives. ``wide``: casts to floating types are to 64 bits, as in float64 all of them are."""
    results: list[Tensor] = []

    def given(argument: Any) -> Any:
        if isinstance(argument, ProgramValue):
            return (results if argument.made else values)[argument.number]
        if wide and isinstance(argument, torch.dtype) and argument.is_floating_point:
            return torch.float64
        return argument

    for op, args, kwargs in steps:
        found = [given(argument) for argument in args]
        results.append(
            found[0] if op is None else op(*found, **{name: given(value) for name, value in kwargs})
        )
    return results[-1]
