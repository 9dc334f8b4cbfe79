"""Ctrl-C sent to a search for a large cluster at random moments: a whole plan, or a clear word that there is none yet.

    python -m benchmarks.interrupted [--moments 5] [--seed 0] [--seconds S] [PLAN ARGUMENTS]

By default Llama-405B on 16,384 GPUs. A row per moment: seconds until Ctrl-C, until the process ended after it, its exit
code, and the plan's step where one was written: loaded again, its programs proved and simulated anew.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from cost_models.units import format_seconds
from partitioner import Plan
from partitioner.report.text import columns

ARGUMENTS = ["llama-405b", "--cluster", "dgx-h100:2048", "--batch-size", "2048", "--strategy", "hybrid"]
MOST_SECONDS = 600.0
HEAD = ("Ctrl-C after", "ended after", "exit code", "step", "within", "said")


@dataclass(frozen=True)
class Row:
    """One run."""

    moment_seconds: float
    ending_seconds: float
    """From Ctrl-C to the end of the process; negative if it had ended before."""
    code: int
    plan: Plan | None
    said: str
    """The first line of its error."""

    @property
    def right(self) -> bool:
        """A plan with its code, or no plan with the code for that."""
        return self.code in ((0, 5) if self.plan else (130,))

    def words(self) -> list[str]:
        """Say it in a row of the table."""
        step = format_seconds(self.plan.prediction.step_seconds) if self.plan else "no plan"
        gap = f"{self.plan.certificate.gap:.1%}" if self.plan else ""
        ended = format_seconds(self.ending_seconds) if self.ending_seconds >= 0 else ""
        moment = f"{self.moment_seconds:.1f} s" if ended else "never"
        return [moment, ended, str(self.code), step, gap, self.said]


def interrupted(arguments: list[str], moment_seconds: float) -> Row:
    """Plan in a process of its own, and interrupt it once."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "partitioner", "plan", *arguments, "-o", str(folder / "plan.json")]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        pressed = time.monotonic() + moment_seconds
        try:
            _, said = process.communicate(timeout=moment_seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                _, said = process.communicate(timeout=MOST_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        ending = time.monotonic() - pressed
        files = sorted(file.name for file in folder.iterdir())
        if files not in ([], ["plan.json"]):
            raise AssertionError(f"left behind: {files}")
        plan = Plan.load(folder / "plan.json") if files else None
        if plan is not None:
            again = plan.simulate().step_seconds
            if abs(again - plan.prediction.step_seconds) > 1e-9 * again:
                raise AssertionError(f"the plan says {plan.prediction.step_seconds} s, simulated: {again} s")
        errors = [line for line in said.splitlines() if "error[" in line or line == "interrupted"]
        return Row(moment_seconds, ending, process.returncode, plan, errors[0] if errors else "")


def main() -> int:
    """Print the rows; 1 if any is neither a plan nor a clear word."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--moments", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, help="the latest moment; by default as long as a run takes")
    known, arguments = parser.parse_known_args()
    draws = random.Random(known.seed)
    rows = []
    latest = known.seconds
    if latest is None:
        began = time.monotonic()
        rows.append(interrupted(arguments or ARGUMENTS, MOST_SECONDS))
        latest = time.monotonic() - began
    moments = sorted(draws.uniform(1.0, latest) for _ in range(known.moments))
    for moment in moments:
        rows.append(interrupted(arguments or ARGUMENTS, moment))
        print(*rows[-1].words(), sep=" | ", file=sys.stderr, flush=True)
    print(columns(HEAD, [row.words() for row in rows], left=("said",)))
    return 0 if all(row.right for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
