"""Draws from Python's and NumPy's own generators: who made them, and the same draws again."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sympy
import torch

from passes.trace.noted import same
from runtime.user_code import caller

_QUIET = frozenset(
    {"seed", "getstate", "setstate", "get_state", "set_state", "get_bit_generator", "default_rng"}
)
"""Functions of the two modules that draw nothing."""


_TOOLS = tuple(str(Path(module.__file__ or "").parent) for module in (torch, sympy))

DRAWN = "forward draws Python's random numbers"
"""The beginning of the note on draws that a trace has made."""


@dataclass
class Draws:
    """The draws of some code. ``places``: function → the first line that called it."""

    places: dict[str, str] = field(default_factory=dict)
    modules: list[str] = field(default_factory=list)
    """Modules whose generator was advanced."""

    def notes(self) -> list[str]:
        """Say what a trace made of it."""
        where = [f"{function} is called in {place}" for function, place in self.places.items()]
        return (
            [f"{DRAWN} ({', '.join(where[:3])}): the traced graph keeps those of its first call"]
            if where
            else []
        )

    def __bool__(self) -> bool:
        return bool(self.modules)

    def lines(self) -> list[str]:
        """Say what was drawn from, and where."""
        found = [f"{function} is called in {place}" for function, place in self.places.items()]
        silent = [m for m in self.modules if not any(f.startswith(f"{m}.") for f in self.places)]
        return found + [f"the generator of Python's module {module} is drawn from" for module in silent]


@contextlib.contextmanager
def watch_draws() -> Iterator[Draws]:
    """Note the calls of ``random.*`` and ``numpy.random.*``, and whether these generators were advanced."""
    draws = Draws()
    before = states_of_generators()
    undo: list[tuple[Any, str, Any]] = []

    def watched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not sys._getframe(1).f_code.co_filename.startswith(
                _TOOLS
            ):  # a tracer's own draws are none of forward's
                draws.places.setdefault(name, caller())
            return original(*args, **kwargs)

        return call

    for module_name, (module, _, _) in _generators().items():
        for name in getattr(module, "__all__", ()):
            function = getattr(module, name, None)
            if name not in _QUIET and callable(function) and not isinstance(function, type):
                undo.append((module, name, function))
                setattr(module, name, watched(f"{module_name}.{name}", function))
    try:
        yield draws
    finally:
        for module, name, function in undo:
            setattr(module, name, function)
        draws.modules = [n for n, (_, read, _) in _generators().items() if not same(before.get(n), read())]


_UNIFORM = ("random", "uniform", "rand", "random_sample", "ranf", "sample")
"""Functions of the two modules that draw between two numbers; in ``random``, ``sample`` draws elements instead."""


@contextlib.contextmanager
def extreme_draws(high: bool) -> Iterator[None]:
    """Make uniform draws as large as can be, or as small: both branches of ``random.random() < p`` are taken then."""
    undo: list[tuple[Any, str, Any]] = []

    def extreme(original: Callable[..., Any], module: Any, to_scale: bool) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            drawn = original(*args, **kwargs)
            low, top = (args or (0.0, 1.0))[:2] if to_scale and len(args) >= 2 else (0.0, 1.0)
            value = low + (top - low) * (1.0 - 2.0**-53 if high else 0.0)
            return value if module is random or isinstance(drawn, float) else drawn * 0.0 + value

        return call

    for module, _, _ in _generators().values():
        for name in _UNIFORM:
            function = getattr(module, name, None)
            if callable(function) and not (module is random and name == "sample"):
                undo.append((module, name, function))
                setattr(module, name, extreme(function, module, name == "uniform"))
    try:
        yield
    finally:
        for module, name, function in undo:
            setattr(module, name, function)


@contextlib.contextmanager
def draws_restored() -> Iterator[None]:
    """Put both generators back to where they were."""
    before = states_of_generators()
    try:
        yield
    finally:
        for name, (_, _, write) in _generators().items():
            if name in before:
                write(before[name])


def states_of_generators() -> dict[str, Any]:
    """Return the states of the generators of both modules."""
    return {name: read() for name, (_, read, _) in _generators().items()}


def _generators() -> dict[str, tuple[Any, Callable[[], Any], Callable[[Any], Any]]]:
    """Return the modules with a global generator that are loaded: the module, and how to read and set its state."""
    found: dict[str, tuple[Any, Callable[[], Any], Callable[[Any], Any]]] = {
        "random": (random, random.getstate, random.setstate)
    }
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        found["numpy.random"] = (numpy, numpy.get_state, numpy.set_state)
    return found
