"""What the engine adds to a step of the executor: reading the batch, sharing the loss, one optimizer on all ranks.

    make bench              = … && python -m benchmarks.engine [--quick] [--rounds N] [--json FILE]

Two worker processes (Gloo, one thread each) hold one engine on the transformer of the executor benchmark, under 1F1B. They
take turns: ``engine.train_step(batch)``, and ``executor.train_step(leaves, microbatches)`` of the very same
executor and optimizer, on leaves that were read before. A step's time is the slowest rank's from a barrier on; reported
is the median of the paired ratios, also of a step that clips its gradients.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.bootstrap import median_ratio
from benchmarks.executor import TRAINING
from benchmarks.executor_models import ModelSpec
from benchmarks.executor_ours import RANKS, plan_of, trace_of
from partitioner.engine.engine import Engine
from partitioner.plan import Plan
from passes.trace.batch import flatten_batch, forward_names
from passes.trace.loss.reduction import step_weights
from runtime.ranks.launch import WorkerPool

TARGET = 1.02
SIDES = ("engine", "engine, clipping", "executor")

_steps: dict[str, Callable[[], Any]] = {}
_engines: list[Engine] = []


def main(arguments: Sequence[str] | None = None) -> None:
    """Deploy once, alternate, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few alternations, to see whether it works")
    parser.add_argument("--rounds", type=int, help="alternations (default 30; 4 with --quick)")
    parser.add_argument("--json", type=Path, help="also write every measurement here")
    options = parser.parse_args(arguments)
    rounds = options.rounds or (4 if options.quick else 30)
    torch.set_num_threads(1)
    before = os.getloadavg()[0]
    plan = plan_of(TRAINING, trace_of(TRAINING), "1f1b", RANKS)
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    with WorkerPool(RANKS) as pool:
        pool.run(prepare, plan.model_dump_json(), TRAINING)
        for number in range(rounds):
            if sys.stderr.isatty():
                print(f"alternation {number + 1} of {rounds}", file=sys.stderr, end="\r")
            order = SIDES if number % 2 == 0 else SIDES[::-1]
            turns = pool.run(take_turn, order)
            for side in SIDES:
                seconds[side].append(max(turn[side] for turn in turns))
        pool.run(close)
    print(table(seconds))
    print(f"{rounds} alternations; load average before {before:.1f}, after {os.getloadavg()[0]:.1f}")
    if options.json:
        options.json.write_text(json.dumps({"rounds": rounds, "seconds": seconds}, indent=1))


def table(seconds: dict[str, list[float]]) -> str:
    """The medians, and each side's paired ratio to the executor."""
    bare = seconds["executor"]
    lines = ["", f"{'a step of':<20}{'seconds':>9}{'/ executor [95 %]':>26}{'target':>9}"]
    for side, found in seconds.items():
        ratio = median_ratio(found, bare)
        verdict = ""
        if side == "engine":
            verdict = f"{f'<= {TARGET}':>9}{'  met' if ratio.median <= TARGET else ' MISS':>6}"
        lines.append(f"{side:<20}{statistics.median(found):>9.4f}{ratio!s:>26}{verdict}")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------- in the workers


def prepare(plan_json: str, spec: ModelSpec) -> None:
    """One engine; its step, and the bare step of its executor. Both run once before anything is timed."""
    plan, workload, batch = Plan.from_json(plan_json), spec.workload(), spec.batch()
    graph = trace_of(spec)
    engine = plan.deploy(
        workload, graph=graph, optimizer=torch.optim.SGD, optimizer_kwargs={"lr": 1e-6}, timeout_seconds=60.0
    )
    leaves = flatten_batch(batch, forward_names(workload.model))
    weights = step_weights(graph, leaves, plan.microbatches)
    bare = engine.executor
    _engines.append(engine)
    _steps["engine"] = lambda: engine.train_step(batch)
    _steps["engine, clipping"] = lambda: engine.train_step(batch, max_grad_norm=1e6)

    def bare_step() -> None:
        bare.train_step(leaves, plan.microbatches, weights=weights)
        engine.optimizer.step()

    _steps["executor"] = bare_step
    for _ in range(2):
        for step in _steps.values():
            step()


def take_turn(order: Sequence[str]) -> dict[str, float]:
    """Seconds of one step of each side, in this order, a barrier before each."""
    seconds = {}
    for side in order:
        dist.barrier()
        started = time.perf_counter()
        _steps[side]()
        seconds[side] = time.perf_counter() - started
    return seconds


def close() -> None:
    """Stop this rank's engine."""
    _engines.pop().close()
    _steps.clear()


if __name__ == "__main__":
    main()
