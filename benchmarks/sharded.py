"""Sharded training beside PyTorch's own: one transformer block, two processes, the same layouts.

    make bench              = … && python -m benchmarks.sharded [--only column_row|data] [--rounds N] [--json FILE]

    column_row   our executor beside ``parallelize_module`` with ``ColwiseParallel`` and ``RowwiseParallel``
    data         our executor beside ``DistributedDataParallel``

Both sides live in the same two worker processes (Gloo, one thread each) and take turns, so noise hits both alike. A step
sets gradients to None, runs forward and backward and ends with all gradients summed and in ``.grad``; there is no optimizer
on either side. Its time is the slowest rank's from a barrier on; an alternation's is the median of its steps. Reported is
the median of the paired ratios ours / theirs; beside it the same of both ranks' processor time, which other work on
the machine changes far less.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from benchmarks.bootstrap import Ratio, median_ratio
from benchmarks.sharded_models import RANKS, BlockSpec, task_of
from benchmarks.sharded_rank import TOLERANCE, close, prepare, take_turn
from runtime.ranks.launch import WorkerPool

TARGETS = {"column_row": 0.95, "data": 1.02}
THEIR_NAMES = {"column_row": "parallelize_module", "data": "DistributedDataParallel"}


@dataclass
class Case:
    """One placement: seconds per step of each alternation by the slowest rank, and processor seconds of both ranks."""

    name: str
    difference: float
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    ours_processor: list[float] = field(default_factory=list)
    theirs_processor: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> Ratio:
        return median_ratio(self.ours, self.theirs)

    @property
    def processor_ratio(self) -> Ratio:
        return median_ratio(self.ours_processor, self.theirs_processor)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prepare, compare gradients, alternate, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=list(TARGETS), help="one of the two")
    parser.add_argument("--rounds", type=int, default=30, help="alternations")
    parser.add_argument("--steps", type=int, default=5, help="steps of each side in an alternation")
    parser.add_argument("--json", type=Path, help="also write every measurement here")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    spec, before = BlockSpec(), os.getloadavg()[0]
    with WorkerPool(RANKS) as pool:
        cases = [_prepared(pool, name, spec) for name in TARGETS if options.only in (None, name)]
        for number in range(options.rounds):
            if sys.stderr.isatty():
                print(f"alternation {number + 1} of {options.rounds}", file=sys.stderr, end="\r")
            for case in cases:
                alternate(pool, case, options.steps, ours_first=number % 2 == 0)
        for case in cases:
            pool.run(close, case.name)
    print(_table(spec, cases))
    after = os.getloadavg()[0]
    print(
        f"{options.rounds} alternations of {options.steps} steps; "
        f"load average before {before:.1f}, after {after:.1f}"
    )
    if options.json:
        report = {"spec": asdict(spec), "load": [before, after], "cases": [asdict(case) for case in cases]}
        options.json.write_text(json.dumps(report, indent=1))


def _prepared(pool: WorkerPool, name: str, spec: BlockSpec) -> Case:
    """Build both sides, and refuse to compare two that compute different things."""
    return case_of(name, pool.run(prepare, name, spec, task_of(spec, name)))


def case_of(name: str, differences: Sequence[Mapping[str, float]]) -> Case:
    """The case whose sides differ so on each rank. Raises AssertionError if that is more than rounding."""
    largest = max(value for rank in differences for value in rank.values())
    if not largest <= TOLERANCE:
        raise AssertionError(f"{name}: loss or gradients differ by {largest:.1e} of the largest entry")
    return Case(name, largest)


def alternate(pool: WorkerPool, case: Case, steps: int, *, ours_first: bool) -> None:
    """Let both sides take their turn, and note the median of each side's steps."""
    turns = pool.run(take_turn, case.name, steps, ours_first)
    for side in ("ours", "theirs"):
        by_step = list(zip(*(getattr(turn, side) for turn in turns), strict=True))
        getattr(case, side).append(statistics.median(max(s for s, _ in ranks) for ranks in by_step))
        getattr(case, f"{side}_processor").append(
            statistics.median(sum(used for _, used in ranks) for ranks in by_step)
        )


def _table(spec: BlockSpec, cases: Sequence[Case]) -> str:
    lines = [
        "",
        f"{spec}; {RANKS} processes",
        f"{'placement':<12}{'beside':<26}{'ours ms':>9}{'theirs ms':>11}{'ours / theirs [95 %]':>24}{'target':>9}"
        f"{'':>6}{'processor time':>24}{'gradients differ by':>21}",
    ]
    for case in cases:
        ours, theirs, target = (
            statistics.median(case.ours),
            statistics.median(case.theirs),
            TARGETS[case.name],
        )
        verdict = f"{f'<= {target}':>9}{'  met' if case.ratio.median <= target else ' MISS':>6}"
        lines.append(
            f"{case.name:<12}{THEIR_NAMES[case.name]:<26}{ours * 1e3:>9.2f}{theirs * 1e3:>11.2f}"
            f"{case.ratio!s:>24}{verdict}{case.processor_ratio!s:>24}{case.difference:>21.0e}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
