"""The user's code of an opaque part as it runs: its tensors in their places, no process group in sight."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor, nn

from runtime.ranks.alone import alone

LOSS = "the loss function"
"""The name of the part that is the loss function, where modules have paths."""


def called(name: str, target: object) -> str:
    """Name a part in a sentence, where a path alone may be "1": module '1' (Router), or Rounded in module '1'."""
    if isinstance(target, nn.Module) and name != LOSS:
        return (
            f"module {name!r} ({type(target).__name__})" if name else f"the model ({type(target).__name__})"
        )
    inside, _, function = name.rpartition(".")
    return f"{function} in module {inside!r}" if inside else name


@dataclass(frozen=True, eq=False)
class Code:
    """The user's code. ``state``: all names of each parameter and buffer of a module, in the order of the arguments.

    A module runs as a copy of ``target``: what it keeps in itself while it runs (caches, hooks that its first call
    installs) stays in this process, and other processes get it as it was when the model was traced. It runs without a
    process group in sight, forward and backward.
    """

    target: Any
    state: tuple[tuple[str, ...], ...] = ()
    _running: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        running = copy.deepcopy(self.target) if isinstance(self.target, nn.Module) else self.target
        if isinstance(running, type):
            running = _with_backward_alone(running)
        object.__setattr__(self, "_running", running)

    def call(self, state: Sequence[Tensor], args: Any, kwargs: Any) -> tuple[Any, list[Tensor]]:
        """Return what the code returns, and the tensors that stand in the places of ``state`` afterwards."""
        if not isinstance(self._running, nn.Module):
            function: Any = self._running
            with alone():
                output = getattr(function, "apply", function)(*args, **kwargs)
            return output, list(state)
        with alone(), self.holding(state) as tables:
            output = self._running(*args, **kwargs)
            return output, [table[name] for table, name in tables]

    def holding(self, state: Sequence[Tensor]) -> AbstractContextManager[list[tuple[dict[str, Any], str]]]:
        """Put ``state`` into its places in a module."""
        if not isinstance(self._running, nn.Module):
            return contextlib.nullcontext([])
        return _holding(self._running, self.state, state)

    def __reduce__(self) -> tuple[Any, ...]:
        return Code, (self.target, self.state)


def _with_backward_alone(function: Any) -> Any:
    """Return a Function like this one: autograd calls its backward later, and on a GPU in a thread of its own."""
    backward = staticmethod(alone()(function.backward))
    return type(function.__name__, (function,), {"backward": backward, "__module__": function.__module__})


@contextlib.contextmanager
def _holding(
    module: nn.Module, names: Sequence[tuple[str, ...]], tensors: Sequence[Tensor]
) -> Iterator[list[tuple[dict[str, Any], str]]]:
    """Put ``tensors`` into the places ``names``; yields the first place of each, as (table of a module, name in it)."""
    places: list[tuple[dict[str, Any], str]] = []
    undo: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for own, tensor in zip(names, tensors, strict=True):
            found = []
            for name in own:
                path, _, attribute = name.rpartition(".")
                owner = module.get_submodule(path)
                table: dict[str, Any] = (
                    owner._parameters if attribute in owner._parameters else cast("Any", owner._buffers)
                )
                undo.append((table, attribute, table[attribute]))
                table[attribute] = tensor
                found.append((table, attribute))
            places.append(found[0])
        yield places
    finally:
        for table, attribute, before in reversed(undo):
            table[attribute] = before
