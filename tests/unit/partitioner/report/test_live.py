"""The live line: what it says, and that it is shown on a terminal only, without colour where that is asked for."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from partitioner.report.live import words_of
from passes.progress import Progress

ROOT = Path(__file__).parents[4]
WORK = """
import time
from partitioner.report.live import live_line
from passes.progress import report_option, report_phase
with live_line(quiet=%r):
    report_phase("place")
    report_option("4 groups, tensor 2", 1.0, 3, 5, 40)
    time.sleep(0.6)
print("done")
"""


COMMAND = """
import time
from partitioner.commands.options import progress
with progress("simulating", quiet=%r):
    time.sleep(0.6)
print("done")
"""


def on_a_terminal(work: str = WORK, *, quiet: bool = False, **environment: str) -> str:
    """Run some work with its stderr on a terminal, and return what that shows."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", work % quiet], cwd=ROOT, stdout=subprocess.PIPE, stderr=slave,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120", **environment},
    )  # fmt: skip
    os.close(slave)
    shown = b""
    while True:
        try:
            read = os.read(master, 65536)
        except OSError:  # the terminal's other side was closed
            break
        if not read:
            break
        shown += read
    os.close(master)
    assert process.communicate(timeout=60)[0] == b"done\n"
    assert process.returncode == 0
    return shown.decode()


def test_a_terminal_shows_one_line() -> None:
    shown = on_a_terminal()
    assert "place" in shown
    assert "bound 1.00 s · 3 solved, 2 bounded of 40 options" in shown
    assert "\x1b[36m" in shown
    assert "4 groups, tensor 2" in shown
    assert "\x1b[?25l" not in shown, "the cursor is hidden: killing the process would leave it so"
    assert shown.rstrip().endswith("\x1b[2K"), "the line is wiped out at the end"


def test_no_color_is_heeded() -> None:
    shown = on_a_terminal(NO_COLOR="1")
    assert "4 groups, tensor 2" in shown
    assert "\x1b[36m" not in shown


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {}])
def test_quiet_and_dumb_terminals_show_nothing(environment: dict[str, str]) -> None:
    assert on_a_terminal(quiet=not environment, **environment) == ""


def test_the_progress_of_any_command_is_such_a_line() -> None:
    shown = on_a_terminal(COMMAND)
    assert "simulating" in shown
    assert shown.rstrip().endswith("\x1b[2K"), "the line is wiped out at the end"
    assert on_a_terminal(COMMAND, quiet=True) == ""
    assert on_a_terminal(COMMAND, RANK="1") == "", "under torchrun, one voice is enough"


def test_no_terminal_shows_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WORK % False], cwd=ROOT, capture_output=True, timeout=60,
        env={**os.environ, "FORCE_COLOR": "1"},
    )  # fmt: skip
    assert (done.stdout, done.stderr) == (b"done\n", b"")


@pytest.mark.parametrize(
    ("progress", "words"),
    [
        (Progress("trace"), "trace  3 s"),
        (Progress("place", "1f1b", 1, 2), "place  3 s · 1 solved, 2 bounded · 1f1b"),
        (
            Progress("place", "1f1b", 1, 2, 4000, 2.0, 1.5),
            "place  3 s · estimate 2.00 s, bound 1.50 s, gap 25.0% · 1 solved, 2 bounded of 4,000 options · 1f1b",
        ),
        (
            Progress("place", found_seconds=2.0, step_seconds=2.1, stopping=True),
            "interrupted, the best so far is made a plan  3 s · step 2.10 s · estimate 2.00 s",
        ),
    ],
)
def test_what_is_said(progress: Progress, words: str) -> None:
    assert words_of(progress, 3.2).plain == words
