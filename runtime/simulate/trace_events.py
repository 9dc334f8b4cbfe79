"""A simulated step (or a measured one) in the trace event format, which Perfetto and chrome://tracing read.

rank                        a process: one rank, or "ranks 0-7" that do the same at the same times
compute, sums of gradients  tracks of a process: its instructions
sends, receives             tracks of messages on their way; "sends 2" holds those that overlap others
memory                      a counter
arrows                      from a send to its receive, where both are shown
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from cost_models.errors import UsageError
from cost_models.units import runs
from runtime.program.program import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    OptimizerStep,
    ReduceGradients,
)
from runtime.simulate.memory import MemoryCurve
from runtime.simulate.simulation import Occupied, Simulation, Transfer, equal_ranks

Event: TypeAlias = dict[str, Any]

_CATEGORY: dict[type, str] = {
    Forward: "forward",
    Backward: "backward",
    BackwardInput: "backward input",
    BackwardWeight: "backward weight",
    ReduceGradients: "reduce gradients",
    OptimizerStep: "optimizer",
}
_MICRO = 1e6
"""Microseconds in a second; trace files count in them."""
_DIGITS = 3
"""Digits behind the microsecond: Perfetto keeps nanoseconds."""
_COMPUTE, _SUMS, _FIRST_SEND, _FIRST_RECEIVE = 0, 1, 100, 200
"""Numbers of tracks; further ones of sends and receives follow the first."""


def chrome_trace(
    simulation: Simulation, label: str = "", first: int = 0, ranks: Sequence[int] | None = None
) -> dict[str, Any]:
    """Return the step in the trace event format, for https://ui.perfetto.dev or chrome://tracing (JSON).

    ``ranks``: those to show; without it all, equal ones once. Steps can be laid over each other: ``label`` tells their
    processes apart, which are numbered from ``first``.
    """
    groups = equal_ranks(simulation) if ranks is None else [(rank,) for rank in dict.fromkeys(ranks)]
    shown_by = {rank: group[0] for group in groups for rank in group}
    events: list[Event] = []
    for group in groups:
        rank = group[0]
        process, plural = first + rank, "" if len(group) == 1 else "s"
        events.append(_named("process", f"rank{plural} {runs(group)} {label}".rstrip(), process))
        events.append({"name": "process_sort_index", "ph": "M", "pid": process, "args": {"sort_index": rank}})
        events += _instructions(simulation.timeline[rank], process)
        for curve in simulation.memory[rank : rank + 1]:
            events += _memory(curve, process)
    events += _messages(simulation.transfers, shown_by, first, label)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def save_trace(path: str | os.PathLike[str], trace: Mapping[str, Any]) -> None:
    """Write a trace as compact JSON; packed with gzip, as Perfetto reads it too, where ``path`` ends in ``.gz``."""
    data = json.dumps(trace, separators=(",", ":")).encode()
    target = Path(path)
    try:
        target.write_bytes(gzip.compress(data, mtime=0) if target.suffix == ".gz" else data)
    except OSError as error:
        raise UsageError(f"cannot write the trace to {target}", [str(error.strerror)]) from error


def _named(what: str, name: str, process: int, track: int | None = None) -> Event:
    event: Event = {"name": f"{what}_name", "ph": "M", "pid": process, "args": {"name": name}}
    return event if track is None else {**event, "tid": track}


def _micro(seconds: float) -> float:
    return round(seconds * _MICRO, _DIGITS)


def _slice(name: str, category: str, process: int, track: int, start: float, end: float) -> Event:
    start, end = _micro(start), _micro(end)
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "pid": process,
        "tid": track,
        "ts": start,
        "dur": round(end - start, _DIGITS),
    }


def _instructions(spans: Iterable[Occupied], process: int) -> Iterator[Event]:
    names = {_COMPUTE: "compute", _SUMS: "sums of gradients"}
    for span in spans:
        kind = type(span.instruction)
        track = _SUMS if kind is ReduceGradients else _COMPUTE
        if track in names:
            yield _named("thread", names.pop(track), process, track)
        yield _slice(span.text, _CATEGORY[kind], process, track, span.start_seconds, span.end_seconds)


def _memory(curve: MemoryCurve, process: int) -> Iterator[Event]:
    """Yield the counter's changes; of all at one moment the most that was held, and what it came to."""
    steps = zip(curve.seconds.tolist(), curve.bytes_held.tolist(), strict=True)
    before = None
    for at, changes in itertools.groupby(steps, key=lambda step: _micro(step[0])):
        held = [int(size) for _, size in changes]
        for size in (max(held), held[-1]):
            if size != before:
                yield {"name": "memory", "ph": "C", "pid": process, "ts": at, "args": {"bytes": size}}
            before = size


def _messages(
    transfers: Iterable[Transfer], shown_by: Mapping[int, int], first: int, label: str
) -> Iterator[Event]:
    """Yield each message that a shown rank sends or receives, and an arrow where both do."""
    tracks = _Tracks()
    numbers = itertools.count()
    for start, end, message, size_bytes in transfers:
        source, target = message.source, message.target
        sender, receiver = shown_by.get(source), shown_by.get(target)
        category = "gradient" if message.gradient else "value"
        sent = received = None
        if sender == source:
            track, named = tracks.take(first + source, "sends", _FIRST_SEND, start, end)
            sent = _slice(message.label, category, first + source, track, start, end)
            sent["args"] = {"bytes": int(size_bytes), "to": target}
            yield from (*named, sent)
        if receiver == target:
            track, named = tracks.take(first + target, "receives", _FIRST_RECEIVE, start, end)
            received = _slice(message.label, category, first + target, track, start, end)
            received["args"] = {"bytes": int(size_bytes), "from": source}
            yield from (*named, received)
        if sent and received:
            number = next(numbers)
            arrow = {"name": "sent", "cat": "message", "id": f"{label}{number}" if label else number}
            yield {**arrow, "ph": "s", "pid": sent["pid"], "tid": sent["tid"], "ts": sent["ts"]}
            yield {
                **arrow,
                "ph": "f",
                "bp": "e",
                "pid": received["pid"],
                "tid": received["tid"],
                "ts": received["ts"],
            }


class _Tracks:
    """Tracks of processes on which slices do not overlap: each takes the first that is free."""

    def __init__(self) -> None:
        self._free_from: dict[tuple[int, int], list[float]] = {}

    def take(self, process: int, name: str, base: int, start: float, end: float) -> tuple[int, list[Event]]:
        """Return the track, and the event that names it where it is new. Slices come by their starts."""
        free_from = self._free_from.setdefault((process, base), [])
        for place, free in enumerate(free_from):
            if free <= start:
                free_from[place] = end
                return base + place, []
        free_from.append(end)
        track = base + len(free_from) - 1
        number = f" {len(free_from)}" if len(free_from) > 1 else ""
        return track, [_named("thread", f"{name}{number}", process, track)]
