"""Measure a run of a program, instruction by instruction. Nothing here is in the way of a run that is not measured.

    recorder = Recorder(device)
    with executor.binding_with(recorder.bind):        handlers are made anew, each between two marks
        executor.run_step(...)
        record = recorder.take()                      and afterwards the handlers from before are back

On a CPU a mark is the clock. On a GPU it is an event in the current stream, read when the run is over, so that marks
measure the kernels and not their launches, and add no wait.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runtime.execute.bind import Binder, Handler
from runtime.execute.context import ProgramContext, Shared
from runtime.execute.early_sends import PostTensor
from runtime.program.program import Message, Program
from runtime.ranks.groups import Channel

TimeMark = Any
"""A moment that can be read once the run is over."""


class HostClock:
    """The clock of the CPU: marks are seconds of this process's ``time.perf_counter``."""

    mark = staticmethod(time.perf_counter)

    def seconds(self, marks: Sequence[TimeMark]) -> list[float]:
        return list(marks)


class CudaClock:
    """The clock of a GPU: events in the current stream of ``device``, read in seconds of ``time.perf_counter``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.synchronize(device)
        self._zero = self.mark()
        self._zero.synchronize()
        self._zero_seconds = time.perf_counter()

    def mark(self) -> TimeMark:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, marks: Sequence[TimeMark]) -> list[float]:
        torch.cuda.synchronize(self._device)
        return [self._zero_seconds + self._zero.elapsed_time(mark) * 1e-3 for mark in marks]


@dataclass(frozen=True)
class WaitMark:
    """A time in which the rank stood still until the communication at ``position`` of its program was over."""

    position: int
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class SendMark:
    """The moment at which the tensor of the send at ``position`` was put on its way."""

    position: int
    seconds: float
    size_bytes: int


@dataclass(frozen=True)
class RunRecord:
    """One measured run. ``spans``: (start, end) of each instruction of the program, its waits included."""

    program: Program
    spans: tuple[tuple[float, float], ...]
    waits: tuple[WaitMark, ...]
    sent: tuple[SendMark, ...]


class RunRecorder:
    """A recorder of runs on one rank: ``bind`` makes handlers, ``take`` reads what they noted."""

    def __init__(self, device: torch.device) -> None:
        self.clock = CudaClock(device) if device.type == "cuda" else HostClock()
        self.program: Program | None = None
        self.starts: list[TimeMark] = []
        self.ends: list[TimeMark] = []
        self.waits: list[tuple[int, TimeMark, TimeMark]] = []
        self.sent: list[tuple[int, TimeMark, int]] = []

    def bind(self, context: ProgramContext, shared: Shared) -> Binder:
        """Make measured handlers for a batch shape."""
        return _MeasuringBinder(context, shared, self)

    def take(self) -> RunRecord:
        """Return the run since the last call. Waits for the device."""
        assert self.program is not None
        seconds = self.clock.seconds
        spans = zip(seconds(self.starts), seconds(self.ends), strict=True)
        waited = zip(seconds([w[1] for w in self.waits]), seconds([w[2] for w in self.waits]), strict=True)
        posted = seconds([s[1] for s in self.sent])
        record = RunRecord(
            self.program,
            tuple(spans),
            tuple(WaitMark(w[0], *span) for w, span in zip(self.waits, waited, strict=True)),
            tuple(SendMark(s[0], at, s[2]) for s, at in zip(self.sent, posted, strict=True)),
        )
        for noted in (self.starts, self.ends, self.waits, self.sent):
            noted.clear()
        return record


class _MeasuringBinder(Binder):
    def __init__(self, context: ProgramContext, shared: Shared, recorder: RunRecorder) -> None:
        self._recorder = recorder
        super().__init__(context, shared)
        self.handlers = [self._timed(handler) for handler in self.handlers]
        self.handlers.insert(0, self._begin)

    def wait(self, position: int) -> None:
        if self.works[position] is None:
            return
        start = self._recorder.clock.mark()
        super().wait(position)
        self._recorder.waits.append((position, start, self._recorder.clock.mark()))

    def _begin(self) -> None:
        self._recorder.program = self.context.program

    def _timed(self, handler: Handler) -> Handler:
        mark, starts, ends = self._recorder.clock.mark, self._recorder.starts, self._recorder.ends

        def run() -> None:
            starts.append(mark())
            handler()
            ends.append(mark())

        return run

    def _post(self, position: int, message: Message, channel: Channel) -> PostTensor:
        post, recorder = super()._post(position, message, channel), self._recorder

        def run(tensor: Tensor) -> None:
            size_bytes = tensor.numel() * tensor.element_size()
            recorder.sent.append((position, recorder.clock.mark(), size_bytes))
            post(tensor)

        return run
