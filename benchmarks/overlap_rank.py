"""What each worker of the overlap benchmark does: hold a plan's executor with and without an overlap, run steps of both."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from benchmarks.prediction_rank import close, prepare, step
from partitioner.verify.rank import VerificationTask
from passes.shard.beside import Ahead
from runtime.ops.bridges import bind

WITH = 0
"""The executor that overlaps, of the two."""


@dataclass(frozen=True)
class Turn:
    """Per step: this rank's seconds and its processor seconds."""

    seconds: list[float]
    processor_seconds: list[float]


def _bind(module: Any, axes: Any, **_: Any) -> Any:
    return bind(module, axes)


def _nothing(*_: Any) -> None:
    """Start nothing early."""


def _no_layers(*_: Any) -> dict[str, tuple[str, ...]]:
    return {}


def _no_gathers(*_: Any) -> Ahead:
    return Ahead()


def _no_sums(*_: Any) -> tuple[int, list[int]]:
    return -1, []


WITHOUT: dict[str, tuple[tuple[str, Callable[..., Any]], ...]] = {
    "input gradients": (
        ("runtime.execute.loaded.bind", _bind),
        ("passes.lower.on_mesh.layers_beside", _no_layers),
    ),
    "gathers": (
        ("runtime.ops.bridges.start_ahead", _nothing),
        ("passes.lower.on_mesh.gathers_ahead", _no_gathers),
    ),
    "replica sums": (
        ("runtime.execute.bind.overlap", _nothing),
        ("runtime.simulate.flatten.early_sums", _no_sums),
    ),
}
"""Overlap -> functions that start or charge it, and others in their places that do not."""


@contextmanager
def without(overlap: str) -> Iterator[None]:
    """Build executors, and predict steps, that do not overlap so."""
    with ExitStack() as stack:
        for name, other in WITHOUT[overlap]:
            stack.enter_context(patch(name, other))
        yield


def prepare_both(task: VerificationTask, overlap: str) -> None:
    """Build the executor with the overlap and the one without, in place of those before, and warm both up."""
    close()
    prepare(WITH, task)
    with without(overlap):
        prepare(1 - WITH, task)


def take_turns(steps: int, with_first: bool) -> tuple[Turn, Turn]:
    """Run steps of both executors; return those with the overlap first."""
    torch.set_num_threads(1)
    found = {
        which: _turn(partial(step, which), steps) for which in (WITH ^ (not with_first), WITH ^ with_first)
    }
    return found[WITH], found[1 - WITH]


def _turn(run: Callable[[], None], steps: int) -> Turn:
    turn = Turn([], [])
    run()
    for _ in range(steps):
        dist.barrier()
        own, started = time.process_time(), time.perf_counter()
        run()
        turn.seconds.append(time.perf_counter() - started)
        turn.processor_seconds.append(time.process_time() - own)
    return turn
