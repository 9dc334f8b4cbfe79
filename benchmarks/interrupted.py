"""Ctrl-C sent to a search for a large cluster at random moments: a whole plan, or a clear word that there is none yet.

    python -m benchmarks.interrupted [--moments 5] [--seed 0] [--seconds S] [PLAN ARGUMENTS]

By default Llama-405B on 16,384 GPUs, about 60 s. A row per moment: processor seconds until Ctrl-C, seconds until
the process ended after it, its exit code, and the plan's step where one was written: loaded again, its programs proved and
simulated anew.
"""

from __future__ import annotations

import argparse
import math
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

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
        ended = format_seconds(self.ending_seconds) if self.ending_seconds >= 0 else "before"
        return [f"{self.moment_seconds:.1f} s", ended, str(self.code), step, gap, self.said]


def interrupted(arguments: list[str], moment_seconds: float) -> Row:
    """Plan in a process of its own, and interrupt it once."""
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryFile("w+") as stderr:
        folder = Path(name)
        command = [
            sys.executable,
            "-m",
            "partitioner",
            "plan",
            *arguments,
            "--no-cache",
            "-o",
            str(folder / "plan.json"),
        ]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr)
        watched, pressed = psutil.Process(process.pid), math.inf
        until = time.monotonic() + MOST_SECONDS
        while process.poll() is None and time.monotonic() < until:
            if math.isinf(pressed) and processor_seconds(watched) > moment_seconds:
                process.send_signal(signal.SIGINT)
                pressed = time.monotonic()
            time.sleep(0.02)
        if process.poll() is None:
            process.kill()
            raise TimeoutError(f"did not end in {MOST_SECONDS:g} s")
        ending = time.monotonic() - pressed
        stderr.seek(0)
        said = stderr.read()
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


def processor_seconds(process: psutil.Process) -> float:
    """Return the processor time that a process took; 0 once it has ended."""
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def main() -> int:
    """Print the rows; 1 if any is neither a plan nor a clear word."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--moments", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60.0, help="the latest moment")
    known, arguments = parser.parse_known_args()
    draws = random.Random(known.seed)
    rows = []
    moments = sorted(draws.uniform(1.0, known.seconds) for _ in range(known.moments))
    for moment in moments:
        rows.append(interrupted(arguments or ARGUMENTS, moment))
        print(*rows[-1].words(), sep=" | ", file=sys.stderr, flush=True)
    print(columns(HEAD, [row.words() for row in rows], left=("said",)))
    return 0 if all(row.right for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
