"""Segments that talk to other ranks inside of a compute, and the shapes that a compute has promised to its readers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch

from cost_models.errors import InternalError
from runtime.execute.context import Shared
from runtime.ranks.collective import Waited
from runtime.ranks.failure import FailureMonitor
from runtime.segment.code import SegmentCode


class SegmentWait:
    """The wait for a collective inside of a segment; its failure counts as that of the instruction that runs it."""

    def __init__(self, monitor: FailureMonitor, waited: Waited, *, on_gpu: bool) -> None:
        self._monitor, self._waited, self._on_gpu = monitor, waited, on_gpu
        self._timeout = timedelta(seconds=monitor.wait_seconds)

    def __call__(self, work: Any) -> None:
        monitor = self._monitor
        monitor.waiting = number = monitor.running
        if not self._on_gpu:
            work.wait(self._timeout)
        else:
            work.wait()
            if self._waited and self._waited[-1][0] == number:  # one after the other: the last says it all
                self._waited.pop()
            self._waited.append((number, _Passed()))
        monitor.waiting = -1


class _Passed:
    """The moment at which a GPU's stream is through with a wait. The work itself would keep its tensors alive."""

    def __init__(self) -> None:
        self._event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def is_completed(self) -> bool:
        """Tell whether the stream came so far."""
        return bool(self._event.query())


def shared_compute(
    monitor: FailureMonitor, shared: Shared, position: int, handler: Callable[[], None]
) -> Callable[[], None]:
    """Return ``handler``, of a compute that waits for other ranks inside, with its number set for ``SegmentWait``."""

    def run() -> None:
        monitor.running = shared.first_wait + position
        handler()

    return run


def shape_check(
    code: SegmentCode, promised: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> Callable[[Any], None]:
    """Return a check that raises InternalError unless a segment's outputs are as their readers were told."""

    def check(outputs: Any) -> None:
        wrong = []
        for tensor, output in zip(outputs, code.outputs, strict=True):
            if output.kind != "value" or output.name not in promised:
                continue
            found = (tuple(tensor.shape), tensor.dtype)
            if found != promised[output.name]:
                wrong.append(f"{output.name}: promised {promised[output.name]}, found {found}")
        if wrong:
            raise InternalError(
                f"segment {code.index} makes other values than its consumers expect", because=wrong
            )

    return check
