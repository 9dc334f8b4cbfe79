"""The progress of a compile as one line on a terminal, rewritten while it runs, gone afterwards.

place  38 s · estimate 27.2 s, bound 25.1 s, gap 7.7% · 3 solved, 9 bounded of 412 options · 32 groups, tensor 4, 1f1b, …

Estimate, bound and gap are by the search's own count; a simulated step stands before them once there is one.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.text import Text

from cost_models.units import format_seconds, percent
from passes.progress import Progress, watched

REFRESHES_PER_SECOND = 4
"""Fast enough for a clock of seconds that does not stutter."""


class _Terminal(Console):
    """A terminal whose cursor stays: a process that is killed cannot bring it back."""

    def show_cursor(self, show: bool = True) -> bool:
        """Leave it as it is."""
        return False


@contextmanager
def live_line(*, quiet: bool = False) -> Iterator[None]:
    """Show the progress of what runs within on stderr, if that is a terminal, and no log is printed there."""
    terminal = _Terminal(stderr=True)
    shown = terminal.file.isatty() and terminal.is_terminal and not terminal.is_dumb_terminal
    if quiet or not shown or logging.getLogger("partitioner").isEnabledFor(logging.INFO):
        yield
        return
    now, began = Progress(), time.monotonic()

    def keep(progress: Progress) -> None:
        nonlocal now
        now = progress

    def line() -> Text:
        return words_of(now, time.monotonic() - began)

    live = Live(
        console=terminal, get_renderable=line, refresh_per_second=REFRESHES_PER_SECOND, transient=True
    )
    with live, watched(keep):
        yield


def words_of(progress: Progress, seconds: float) -> Text:
    """Say the progress in a line, the option last: what does not fit the terminal is cut off."""
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(
        "interrupted, the best so far is made a plan" if progress.stopping else progress.phase, "bold"
    )
    parts = [f"{seconds:.0f} s"]
    if math.isfinite(progress.step_seconds):
        parts.append(f"step {format_seconds(progress.step_seconds)}")
    search = []
    if math.isfinite(progress.found_seconds):
        search.append(f"estimate {format_seconds(progress.found_seconds)}")
    if progress.bound_seconds:
        search.append(f"bound {format_seconds(progress.bound_seconds)}")
    if math.isfinite(progress.gap):
        search.append(f"gap {percent(progress.gap)}")
    parts += [", ".join(search)] if search else []
    if progress.options:
        parts.append(f"{progress.solved} solved, {progress.bounded} bounded of {progress.options:,} options")
    elif progress.solved or progress.bounded:
        parts.append(f"{progress.solved} solved, {progress.bounded} bounded")
    text.append(f"  {' · '.join(parts)}")
    if trying := str(progress.trying):
        text.append(f" · {trying}", "cyan")
    return text
