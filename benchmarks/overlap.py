"""Steps with and without an overlap of collectives with computing, measured and predicted.

    python -m benchmarks.overlap [--pairs N] [--steps N] [--only GLOB] [--calibration FILE]

    input gradients   their sums along a tensor-parallel axis, beside weight gradients
    gathers           of parameters that replicas keep in parts, beside the ops in front of them
    replica sums      sums of parameters' gradients over replicas, inside of the last backward

Two Gloo processes (four for pipelines) hold the executor of each plan twice, with the overlap and without, and take turns,
so that a drifting machine drifts for both. A step's time is the slowest rank's from a barrier on, a turn's the median of
its steps; reported is the median of the paired ratios with / without, of time and of all ranks' processor time.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.bootstrap import median_ratio
from benchmarks.overlap_rank import prepare_both, take_turns, without
from benchmarks.prediction import calibrated
from benchmarks.prediction_plans import PlanCase, fixed
from cost_models.cluster import ClusterSpec
from cost_models.files import CALIBRATION
from runtime.ranks.launch import WorkerPool

HEAD = (
    f"{'overlap: plan':56}{'with':>10}{'without':>10}{'with / without [95 %]':>24}{'processor time':>24}"
    f"{'predicted':>11}{'without':>10}"
)


@dataclass
class Case:
    """One plan and one overlap. Seconds of each turn: of the slowest rank, and of both ranks' processors."""

    overlap: str
    plan: PlanCase
    ranks: int
    seconds: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    processor: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    predicted: tuple[float, float] = (0.0, 0.0)

    @property
    def name(self) -> str:
        return f"{self.overlap}: {self.plan.name}"


def cases() -> list[Case]:
    """All plans."""
    return [
        Case(overlap, fixed(model, fix, "1f1b", count, size), 2 if "pipeline=1" in fix else 4)
        for overlap, model, count, size, fix in (
            ("input gradients", "gpt2-small", 1, 8, "pipeline=1 tensor=2"),
            ("input gradients", "llama-small", 1, 8, "pipeline=1 tensor=2"),
            ("input gradients", "llama-small", 1, 8, "pipeline=1 sequence=2"),
            ("input gradients", "llama-small", 4, 32, "pipeline=1 tensor=2"),
            ("gathers", "llama-small", 1, 8, "pipeline=1 data=2 zero=3"),
            ("gathers", "mlp", 1, 128, "pipeline=1 data=2 zero=3"),
            ("replica sums", "gpt2-small", 1, 8, "pipeline=1 data=2"),
            ("replica sums", "llama-small", 2, 8, "pipeline=1 data=2"),
            ("replica sums", "mlp", 1, 256, "pipeline=1 data=2"),
            ("replica sums", "mlp", 2, 256, "pipeline=2 data=2"),
        )
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan, build, take turns, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=16, help="turns of each side")
    parser.add_argument("--steps", type=int, default=3, help="steps of a turn")
    parser.add_argument("--only", default="*", help="glob over names of cases")
    parser.add_argument("--calibration", type=Path, help="use this file instead of calibrating anew")
    options = parser.parse_args(arguments)
    chosen = [case for case in cases() if fnmatch.fnmatch(case.name, options.only)]
    torch.set_num_threads(1)
    os.environ[CALIBRATION] = str(options.calibration or calibrated())
    print(f"computing beside a message takes {ClusterSpec.local(2).contention([0, 1]):.2f}x")
    load = os.getloadavg()[0]
    print(HEAD)
    for case in chosen:
        cluster = ClusterSpec.local(case.ranks)
        plan = case.plan.plan(cluster)
        with without(case.overlap):
            apart = case.plan.plan(cluster)
        case.predicted = plan.prediction.step_seconds, apart.prediction.step_seconds
        with WorkerPool(case.ranks) as pool:
            pool.run(prepare_both, case.plan.task(plan), case.overlap)
            for pair in range(options.pairs):
                _alternate(pool, case, options.steps, with_first=pair % 2 == 0)
            print(_row(case), flush=True)
    print(f"{options.pairs} pairs; load average before {load:.1f}, after {os.getloadavg()[0]:.1f}")


def _alternate(pool: WorkerPool, case: Case, steps: int, *, with_first: bool) -> None:
    ranks = pool.run(take_turns, steps, with_first)
    for side in (0, 1):
        turns = [rank[side] for rank in ranks]
        by_step = zip(*(turn.seconds for turn in turns), strict=True)
        case.seconds[side].append(statistics.median(max(step) for step in by_step))
        used = zip(*(turn.processor_seconds for turn in turns), strict=True)
        case.processor[side].append(statistics.median(sum(step) for step in used))


def _row(case: Case) -> str:
    seconds = [statistics.median(side) * 1e3 for side in case.seconds]
    predicted = [each * 1e3 for each in case.predicted]
    return (
        f"{case.name:56}{seconds[0]:7.1f} ms{seconds[1]:7.1f} ms{median_ratio(*case.seconds)!s:>24}"
        f"{median_ratio(*case.processor)!s:>24}{predicted[0]:8.1f} ms{predicted[1]:7.1f} ms"
    )


if __name__ == "__main__":
    main()
