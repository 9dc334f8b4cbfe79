"""User's code as in one process: without a process group in sight.

A plan is of what one process computes on the whole batch. On ranks there is a process group, and code that asks for it and
gathers where it is, as data-parallel recipes do, would be another model there, or wait for ranks that never come.

    with alone() as asked:          in this thread; ``threads=True``: in all of them (autograd has its own on GPUs)
        dist.is_initialized()       False; ``asked`` tells the line
        dist.all_gather(…)          NoGroupError, which is a ValueError as torch's own is
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from cost_models.errors import ModelError
from runtime.user_code import users_frame

_BETWEEN = (str(Path(dist.__file__).parent) + os.sep, __file__)

WHY = "a plan is of what one process computes on the whole batch, without a process group"
"""The reason for which the code sees none."""
TRY = (
    "put it behind `if dist.is_initialized():`, so that one process computes the same on the whole batch; ranks exchange "
    "what the plan needs"
)


class NoGroupError(ModelError, ValueError):
    """The error of code that communicates by itself where one process is all there is."""


SourceLine = tuple[str, int]
"""A file and a line in it."""

_CONTEXTS: list[tuple[int | None, list[SourceLine]]] = []
"""The contexts that are open: the thread (None: all threads), and the lines that asked."""
_LOCK = threading.Lock()


@contextlib.contextmanager
def alone(*, threads: bool = False) -> Iterator[list[SourceLine]]:
    """Hide the process group from this thread, or from all; yields the lines that ask whether there is one."""
    _patch()
    context = (None if threads else threading.get_ident(), list[SourceLine]())
    with _LOCK:
        _CONTEXTS.append(context)
    try:
        yield context[1]
    finally:
        with _LOCK:
            _CONTEXTS[:] = [other for other in _CONTEXTS if other is not context]


def _here() -> list[list[SourceLine]]:
    """Return the lists of the contexts that this thread is in."""
    return [asked for thread, asked in tuple(_CONTEXTS) if thread in (None, threading.get_ident())]


@functools.cache
def _patch() -> None:
    """Let torch ask here first, from now on: code may have imported its functions by name, and threads overlap."""
    c10d: Any = dist.distributed_c10d
    world, not_in_group = c10d._World.default_pg, c10d._rank_not_in_group

    def default_pg(self: Any) -> Any:
        contexts = _here()
        for asked in contexts:
            asked.append(_caller())
        return None if contexts else world.fget(self)

    def rank_not_in_group(group: Any) -> Any:
        """Stand where every collective, and every question for a rank or a size, begins."""
        if _here():
            raise _talks()
        return not_in_group(group)

    os.register_at_fork(
        after_in_child=_CONTEXTS.clear
    )  # a process that is forked meanwhile has a group of its own
    c10d._World.default_pg = property(default_pg, world.fset, world.fdel)
    c10d._rank_not_in_group = rank_not_in_group


def _caller() -> SourceLine:
    """Return what called torch.distributed."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def _talks() -> NoGroupError:
    frame = users_frame()
    place = [] if frame is None else [f"{Path(frame.filename).name}:{frame.lineno}: {frame.line}"]
    return NoGroupError("the model's code talks to other ranks itself", [*place, WHY], [TRY])
