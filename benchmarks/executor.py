"""Our executor beside ``torch.distributed.pipelining``: same stages, same micro-batches, same two processes.

    make bench              = python -m benchmarks.executor [--quick] [--rounds N] [--schedules 1f1b,gpipe,…]

Both executors of every schedule live in the same two worker processes (Gloo, one thread each) and take turns, so noise
hits both alike. A step zeroes the gradients, runs forward and backward of every micro-batch and ends with the gradients
in ``.grad``; its time is the slowest rank's from a barrier on. What is reported is the median of the paired ratios
ours / theirs. docs/11-benchmarks.md says what is compared and how to read it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.bootstrap import Ratio, median_ratio
from benchmarks.executor_models import ModelSpec
from benchmarks.executor_ours import RANKS, plan_of, task_of, trace_of
from benchmarks.executor_rank import TOLERANCE, close, prepare, take_turn, time_whole_model
from runtime.ranks.launch import WorkerPool
from runtime.schedules import SCHEDULES

STAGES = {"1f1b": 2, "gpipe": 2, "interleaved": 4, "zb-v": 4}
TRAINING = ModelSpec(microbatches=8, batch_size=16)
SIZES = {"8 B": 8, "512 KB": 512 * 1024}
TARGETS = {"training": 1.02, "8 B": 0.8, "512 KB": 0.9}


@dataclass
class Case:
    """One schedule on one model: seconds per step of each alternation, by the slowest rank."""

    schedule: str
    spec: ModelSpec
    label: str
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    local: list[float] = field(default_factory=list)
    difference: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.label} {self.schedule}"

    @property
    def ratio(self) -> Ratio:
        """ours / theirs; with trivial compute, after the local compute is taken off both."""
        return median_ratio(self._less(self.ours), self._less(self.theirs))

    def _less(self, seconds: Sequence[float]) -> list[float]:
        if not self.local:
            return list(seconds)
        local = statistics.median(self.local)
        return [s - local for s in seconds]

    def overhead_microseconds(self, seconds: Sequence[float]) -> float:
        """Median per micro-batch beyond the local compute."""
        return statistics.median(self._less(seconds)) / self.spec.microbatches * 1e6


def main(arguments: Sequence[str] | None = None) -> None:
    """Prepare, compare gradients, alternate, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few alternations, to see whether it works")
    parser.add_argument("--rounds", type=int, help="alternations (default 30; 4 with --quick)")
    parser.add_argument("--schedules", default=",".join(STAGES), help="some of " + " ".join(STAGES))
    parser.add_argument("--only", choices=["training", "overhead"], help="one half of the benchmark")
    parser.add_argument("--json", type=Path, help="also write every measurement here")
    options = parser.parse_args(arguments)
    schedules = options.schedules.split(",")
    unknown = set(schedules) - set(STAGES)
    if unknown:
        parser.error(f"unknown schedules {sorted(unknown)}; known are {' '.join(STAGES)}")
    rounds = options.rounds or (4 if options.quick else 30)
    torch.set_num_threads(1)
    before = os.getloadavg()[0]
    report: dict[str, Any] = {"rounds": rounds, "load_before": before}
    with WorkerPool(RANKS) as pool:
        if options.only != "overhead":
            whole, cases = _training(pool, schedules, rounds)
            print(_training_table(cases, whole))
            report["one_process_seconds"] = whole
            report["training"] = [asdict(case) for case in cases]
        if options.only != "training":
            steps = 20 if options.quick else 40
            cases = _overhead(pool, schedules, rounds, steps)
            print(_overhead_table(cases))
            report["overhead"] = [asdict(case) for case in cases]
    report["load_after"] = os.getloadavg()[0]
    print(f"{rounds} alternations; load average before {before:.1f}, after {report['load_after']:.1f}")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))


def _prepare(pool: WorkerPool, cases: Sequence[Case]) -> None:
    """Build both sides of every case and refuse to compare two that compute different things."""
    graphs = {case.spec: trace_of(case.spec) for case in cases}
    for case in cases:
        graph, stages = graphs[case.spec], STAGES[case.schedule]
        plan = plan_of(case.spec, graph, case.schedule, stages)
        expected = SCHEDULES[case.schedule].stage_ranks(stages, range(RANKS))
        found = tuple(stage.devices[0] for stage in plan.stages)
        if found != expected:
            raise AssertionError(f"{case.name}: the plan's stages are on ranks {found}, not {expected}")
        task = task_of(case.spec, graph, plan)
        differences = pool.run(prepare, case.name, case.spec, task, case.schedule, expected)
        case.difference = max(d for rank in differences for d in rank.values())
        if not case.difference <= TOLERANCE:
            raise AssertionError(
                f"{case.name}: gradients differ by {case.difference:.1e} of the largest entry"
            )


def _alternate(pool: WorkerPool, cases: Sequence[Case], rounds: int, steps: int, with_local: bool) -> None:
    """Rounds over all cases; the side that goes first changes every round."""
    for number in range(rounds):
        if sys.stderr.isatty():
            print(f"alternation {number + 1} of {rounds}", file=sys.stderr, end="\r")
        for case in cases:
            turns = pool.run(take_turn, case.name, steps, number % 2 == 0, with_local)
            for side in ("ours", "theirs", "local") if with_local else ("ours", "theirs"):
                slowest = [max(ranks) for ranks in zip(*(getattr(turn, side) for turn in turns), strict=True)]
                getattr(case, side).append(statistics.median(slowest))


def _training(pool: WorkerPool, schedules: Sequence[str], rounds: int) -> tuple[list[float], list[Case]]:
    cases = [Case(schedule, TRAINING, "training") for schedule in schedules]
    _prepare(pool, cases)
    whole: list[float] = []
    for part in _parts(rounds, 5):
        whole += pool.run(time_whole_model, TRAINING, 1)[0]
        _alternate(pool, cases, part, 1, with_local=False)
    for case in cases:
        pool.run(close, case.name)
    return whole, cases


def _overhead(pool: WorkerPool, schedules: Sequence[str], rounds: int, steps: int) -> list[Case]:
    cases = [
        Case(schedule, ModelSpec(8, 8, size), label)
        for label, size in SIZES.items()
        for schedule in schedules
    ]
    _prepare(pool, cases)
    _alternate(pool, cases, rounds, steps, with_local=True)
    for case in cases:
        pool.run(close, case.name)
    return cases


def _parts(total: int, at_most: int) -> list[int]:
    return [min(at_most, total - start) for start in range(0, total, at_most)]


def _training_table(cases: Sequence[Case], whole: Sequence[float]) -> str:
    one = statistics.median(whole)
    lines = [
        "",
        f"8 blocks, d 512, 128 positions, batch 16, 8 micro-batches, float32; one process, full batch: {one:.3f} s",
        f"{'schedule':<14}{'ours s':>9}{'theirs s':>10}{'ours / one':>12}{'theirs / one':>14}"
        f"{'ours / theirs [95 %]':>26}{'target':>9}{'':>6}{'gradients differ by':>21}",
    ]
    for case in cases:
        ours, theirs = statistics.median(case.ours), statistics.median(case.theirs)
        lines.append(
            f"{case.schedule:<14}{ours:>9.3f}{theirs:>10.3f}{ours / one:>12.3f}{theirs / one:>14.3f}"
            f"{case.ratio!s:>26}{_target(case)}{case.difference:>21.0e}"
        )
    return "\n".join(lines)


def _overhead_table(cases: Sequence[Case]) -> str:
    lines = [
        "",
        "overhead per micro-batch with trivial compute: (step - local compute) / 8, in microseconds",
        f"{'message':<9}{'schedule':<14}{'local':>8}{'ours':>8}{'theirs':>8}"
        f"{'ours / theirs [95 %]':>26}{'target':>9}{'':>6}",
    ]
    for case in cases:
        local = statistics.median(case.local) / case.spec.microbatches * 1e6
        lines.append(
            f"{case.label:<9}{case.schedule:<14}{local:>8.0f}{case.overhead_microseconds(case.ours):>8.0f}"
            f"{case.overhead_microseconds(case.theirs):>8.0f}{case.ratio!s:>26}{_target(case)}"
        )
    return "\n".join(lines)


def _target(case: Case) -> str:
    target = TARGETS[case.label]
    return f"{f'<= {target}':>9}{'  met' if case.ratio.median <= target else ' MISS':>6}"


if __name__ == "__main__":
    main()
