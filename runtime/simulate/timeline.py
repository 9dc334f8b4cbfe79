"""A simulated step (or a measured one) as pictures: an ASCII timeline, and a trace for Perfetto.

    step 11.000 s · bubble 27.3% · one column 0.110 s
    rank 0  F0-F1-F2-............B0----F3-B1----…   busy 73%  peak 1.2 GiB

Each compute is its action (F forward, B backward, I input half, W weight half) and micro-batch, filled with ``-`` as
long as it runs; ``.`` is idle, ``+`` a reduction of tied gradients, ``S`` the optimizer. Where a rank runs several
segments, the segment comes first (``2F0``) if there is room.
"""

from __future__ import annotations

from typing import Any

from runtime.program.program import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    Instruction,
    OptimizerStep,
    ReduceGradients,
)
from runtime.simulate.simulate import Simulation, Span

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


def render(simulation: Simulation, width: int = 100) -> str:
    """Draw one row of ``width`` columns per rank, time from left to right; ranks that do nothing are left out."""
    step = simulation.step_seconds
    if step <= 0.0:
        return "the step takes no time"
    lines = [
        f"step {_seconds(step)} · bubble {simulation.bubble_fraction:.1%} · one column {_seconds(step / width)}"
    ]
    ranks = [rank for rank, spans in enumerate(simulation.timeline) if spans]
    margin = len(f"rank {max(ranks, default=0)}")
    for rank in ranks:
        row = _row(simulation.timeline[rank], width / step, width)
        busy = simulation.busy_seconds[rank] / step
        peak = f"  peak {_bytes(simulation.peak_bytes[rank])}" if simulation.memory else ""
        lines.append(f"{f'rank {rank}':<{margin}}  {row}  busy {busy:4.0%}{peak}")
    return "\n".join(lines)


def _row(spans: tuple[Span, ...], columns_per_second: float, width: int) -> str:
    row = ["."] * width
    several = len({getattr(span.instruction, "segment", None) for span in spans} - {None}) > 1
    for span in spans:
        first = round(span.start_seconds * columns_per_second)
        last = round(span.end_seconds * columns_per_second)
        if last > first:
            row[first:last] = _cell(span.instruction, last - first, several)
    return "".join(row)


def _cell(instruction: Instruction, columns: int, several_segments: bool) -> str:
    """Return the most telling text that fits, filled up to ``columns``."""
    if isinstance(instruction, Compute):
        letter: str = instruction.letter
        short = f"{letter}{instruction.microbatch}"
        texts = [f"{instruction.segment}{short}", short, letter] if several_segments else [short, letter]
        text = next(text for text in texts if len(text) <= columns)
    else:
        text = "S" if isinstance(instruction, OptimizerStep) else "+"
    return text.ljust(columns, "-")


def _seconds(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1.0:
            return f"{seconds * factor:.3f} {unit}"
    return f"{seconds * 1e9:.3f} ns"


def _bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def chrome_trace(simulation: Simulation, label: str = "", first: int = 0) -> dict[str, Any]:
    """Return the step in the trace event format, for https://ui.perfetto.dev or chrome://tracing (JSON).

    Each rank is a process with its computes, its outgoing transfers (asynchronous slices) and, where known, its memory.
    Steps can be laid over each other: ``label`` tells their processes apart, which are numbered from ``first``.
    """
    events: list[dict[str, Any]] = []
    for rank, spans in enumerate(simulation.timeline):
        process, name = first + rank, f"rank {rank} {label}".rstrip()
        events.append({"name": "process_name", "ph": "M", "pid": process, "args": {"name": name}})
        for thread, name in enumerate(("instructions", "sends")):
            events.append(
                {"name": "thread_name", "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
            )
        events += [_slice(span, process) for span in spans]
        events += [
            {"name": "memory", "ph": "C", "pid": process, "ts": at * _MICRO, "args": {"bytes": held}}
            for curve in simulation.memory[rank : rank + 1]
            for at, held in zip(curve.seconds.tolist(), curve.bytes_held.tolist(), strict=True)
        ]
    for number, transfer in enumerate(simulation.transfers):
        message, start, end = transfer.message, transfer.start_seconds * _MICRO, transfer.end_seconds * _MICRO
        process = first + message.source
        arrow = {"name": message.label, "cat": "transfer", "id": f"{label}{number}" if label else number}
        events += [
            {
                **arrow,
                "ph": "b",
                "pid": process,
                "tid": 1,
                "ts": start,
                "args": {"bytes": transfer.size_bytes, "to": message.target},
            },
            {**arrow, "ph": "e", "pid": process, "tid": 1, "ts": end},
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _slice(span: Span, process: int) -> dict[str, Any]:
    return {
        "name": span.text,
        "cat": _CATEGORY[type(span.instruction)],
        "ph": "X",
        "pid": process,
        "tid": 0,
        "ts": span.start_seconds * _MICRO,
        "dur": (span.end_seconds - span.start_seconds) * _MICRO,
    }
