"""A simulated step (or a measured one) as an ASCII timeline.

    step 11.0 s · bubble 27.3% · one column 110 ms
    rank 0     F0-F1-F2-............B0----F3-B1----…   busy 73%  peak 1.20 GiB
    ranks 1-3  ...F0-F1-......B0----F3-B1----......…   busy 73%  peak 1.20 GiB

Each compute is its action (F forward, B backward, I input half, W weight half) and micro-batch, filled with ``-`` as
long as it runs; ``.`` is idle, ``+`` a reduction of tied gradients, ``S`` the optimizer. Where a rank runs several
segments, the segment comes first (``2F0``) if there is room.
"""

from __future__ import annotations

from cost_models.units import format_bytes, format_seconds, runs
from runtime.program.program import (
    Compute,
    Instruction,
    OptimizerStep,
)
from runtime.simulate.simulation import Occupied, Simulation

FEWEST_COLUMNS = 10
"""The least columns of a row that say anything."""
LONGEST_LIST = 20
"""Ranks that read longer than this are counted."""


def render(simulation: Simulation, width: int = 100, most_rows: int | None = None) -> str:
    """Draw one row of ``width`` columns per rank, time from left to right; ranks that look alike share one.

    Ranks that do nothing are left out; of more than ``most_rows`` the first and last are shown.
    """
    step = simulation.step_seconds
    if step <= 0.0:
        return "the step takes no time"
    alike: dict[tuple[str, str], list[int]] = {}
    for rank, spans in enumerate(simulation.timeline):
        if spans:
            busy = f"busy {simulation.busy_seconds[rank] / step:4.0%}"
            peak = f"  peak {format_bytes(simulation.peak_bytes[rank])}" if simulation.memory else ""
            alike.setdefault((_row(spans, width / step, width), f"{busy}{peak}"), []).append(rank)
    rows = [(_ranks(ranks), row, told) for (row, told), ranks in alike.items()]
    if most_rows is not None and len(rows) > most_rows:
        half = most_rows // 2
        rows[half:-half] = [("…", f"({len(rows) - 2 * half} more rows)", "")]
    margin = max((len(ranks) for ranks, _, _ in rows), default=0)
    heading = f"step {format_seconds(step)} · bubble {simulation.bubble_fraction:.1%}"
    lines = [f"{heading} · one column {format_seconds(step / width)}"]
    lines += [f"{ranks:<{margin}}  {row}  {told}".rstrip() for ranks, row, told in rows]
    return "\n".join(lines)


def render_within(simulation: Simulation, width: int, most_rows: int | None = None) -> str:
    """Draw rows that take ``width`` characters together with what stands beside them."""
    columns = width
    for _ in range(3):  # ranks share rows by how they look, so what stands beside them depends on the columns
        text = render(simulation, columns, most_rows)
        over = max(map(len, text.splitlines()[1:]), default=0) - width
        if over <= 0 or columns == FEWEST_COLUMNS:
            break
        columns = max(FEWEST_COLUMNS, columns - over)
    return text


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    listed = runs(ranks)
    if len(listed) > LONGEST_LIST:
        return f"{len(ranks)} ranks in {ranks[0]}-{ranks[-1]}"
    return f"ranks {listed}"


def _row(spans: tuple[Occupied, ...], columns_per_second: float, width: int) -> str:
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
