"""A pipeline of sharded stages beside PyTorch's own: four transformer blocks, 2 stages x 2 shards, four processes.

    make bench              = … && python -m benchmarks.hybrid_executor [--quick] [--rounds N] [--json FILE]

    ours      the executor of a plan that ``strategy="hybrid"`` made with the stages and layouts of theirs
    theirs    ``torch.distributed.pipelining`` (``Schedule1F1B``) on stages that went through ``parallelize_module``
              (``ColwiseParallel``, ``RowwiseParallel``), on a ``DeviceMesh`` of 2 x 2

Both sides live in the same four worker processes (Gloo, one thread each) and take turns, so noise hits both alike. A step
sets gradients to None, runs forward and backward of every micro-batch and ends with all gradients in ``.grad``; there is no
optimizer on either side. Its time is the slowest rank's from a barrier on; an alternation's is the median of its steps.
Reported is the median of the paired ratios ours / theirs, and the same of the processor time of all four processes. Where
processes share cores, a rank that waits leaves its core to another: the wall time is then near the processor time by the
number of cores, and the ratios say less about waiting than they would on a core each.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.hybrid_executor_models import RANKS, SHARDS, STAGES, HybridSpec, task_of
from benchmarks.hybrid_executor_rank import prepare
from benchmarks.sharded import Case, alternate, case_of
from benchmarks.sharded_rank import close
from runtime.ranks.launch import WorkerPool

TARGET = 1.0
NAME = "1f1b"


def main(arguments: Sequence[str] | None = None) -> None:
    """Prepare, compare gradients, alternate, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few alternations, to see whether it works")
    parser.add_argument("--rounds", type=int, help="alternations (default 30; 4 with --quick)")
    parser.add_argument("--steps", type=int, default=2, help="steps of each side in an alternation")
    parser.add_argument("--json", type=Path, help="also write every measurement here")
    options = parser.parse_args(arguments)
    rounds = options.rounds or (4 if options.quick else 30)
    torch.set_num_threads(1)
    spec, before = HybridSpec(), os.getloadavg()[0]
    with WorkerPool(RANKS) as pool:
        case = case_of(NAME, pool.run(prepare, NAME, spec, task_of(spec)))
        for number in range(rounds):
            if sys.stderr.isatty():
                print(f"alternation {number + 1} of {rounds}", file=sys.stderr, end="\r")
            alternate(pool, case, options.steps, ours_first=number % 2 == 0)
        pool.run(close, NAME)
    print(_table(spec, case))
    after = os.getloadavg()[0]
    print(
        f"{rounds} alternations of {options.steps} steps; {RANKS} processes share {_cores()} cores; "
        f"load average before {before:.1f}, after {after:.1f}"
    )
    if options.json:
        report = {"spec": asdict(spec), "load": [before, after], "cores": _cores(), "case": asdict(case)}
        options.json.write_text(json.dumps(report, indent=1))


def _cores() -> int:
    """The processor cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _table(spec: HybridSpec, case: Case) -> str:
    rows = (
        ("wall time, slowest rank", case.ours, case.theirs, case.ratio),
        ("processor time, all ranks", case.ours_processor, case.theirs_processor, case.processor_ratio),
    )
    lines = [
        "",
        f"{spec}; {STAGES} stages x {SHARDS} shards; gradients differ by {case.difference:.0e}",
        f"{'a step':<27}{'ours s':>9}{'theirs s':>10}{'ours / theirs [95 %]':>24}{'target':>9}",
    ]
    for label, ours, theirs, ratio in rows:
        lines.append(
            f"{label:<27}{statistics.median(ours):>9.3f}{statistics.median(theirs):>10.3f}{ratio!s:>24}"
            f"{f'<= {TARGET}':>9}{'  met' if ratio.median <= TARGET else ' MISS':>6}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
