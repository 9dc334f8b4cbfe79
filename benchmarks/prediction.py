"""Predicted beside measured: step time and peak memory of many plans on local workers, two or four.

    make predict            = python -m benchmarks.prediction [--turns N] [--steps N] [--only GLOB] [--calibration FILE]
                              … and the same with --hybrid: pipelines of sharded stages, on four workers
                              … and with --residuals, then python -m benchmarks.intervals: the intervals of predictions

Every plan runs for real: Gloo processes, one thread each, the executor on the plan's own programs. A step's time is the
slowest rank's from a barrier on. Peak memory is from a step of its own under ``tests.support.alive.AliveBytes``.

Whatever else runs on a machine, seen or unseen, slows it down; a virtual one computes a fifth slower for seconds, several
times a minute, or for minutes. So the machine's pace, the same work on all workers, is timed before and after every step,
and beside the calibration. A step counts at the calibration's pace, the better of those around it, since the least of a
calibration's turns counts; the table shows both, as measured and at that pace. All is done in turns: each calibrates,
plans, and runs every plan, and a plan's row is of the turn whose error is its middle one.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.prediction_plans import WORKERS_OF_HYBRID, PlanCase, hybrid_cases, plan_cases
from benchmarks.prediction_rank import (
    RankSteps,
    measure_memory,
    pace_seconds,
    prepare,
    time_steps,
)
from benchmarks.residuals import Residual, replace_residuals, residual_of
from cost_models.cluster import ClusterSpec
from cost_models.files import CALIBRATION
from cost_models.host import core_count
from cost_models.measure.run import calibrate_workers
from cost_models.measure.shown import render_calibration
from partitioner.plan import Plan
from partitioner.record.rebuild import simulate_plan
from passes.costs.cases import count_case
from runtime.measure.collectives import measure_collectives
from runtime.ranks.launch import WorkerPool


@dataclass
class Row:
    """One plan's predictions and measurements in one turn.

    ``seconds``, ``paces`` and ``own``: of each step its time, the pace around it, and the processor seconds of each rank.
    """

    case: PlanCase
    plan: Plan
    seconds: list[float] = field(default_factory=list)
    paces: list[float] = field(default_factory=list)
    own: list[tuple[float, ...]] = field(default_factory=list)
    calibrated_pace: float = 1.0
    peak_bytes: tuple[int, ...] = ()

    @property
    def predicted(self) -> float:
        return self.plan.prediction.step_seconds

    @property
    def as_measured(self) -> float:
        return statistics.median(self.seconds)

    @property
    def measured(self) -> float:
        """Median of the steps' times at the calibration's pace."""
        pairs = zip(self.seconds, self.paces, strict=True)
        return statistics.median(seconds * self.calibrated_pace / pace for seconds, pace in pairs)

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1.0

    @property
    def predicted_bytes(self) -> tuple[int, ...]:
        peaks = self.plan.prediction.peak_memory_bytes
        return tuple(peaks[str(rank)] for rank in range(self.plan.world_size))

    @property
    def memory_errors(self) -> tuple[float, ...]:
        return tuple(
            p / m - 1.0 if m else 0.0 for p, m in zip(self.predicted_bytes, self.peak_bytes, strict=True)
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Calibrate unless told not to, plan, measure, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=3, help="calibrations, each followed by all plans")
    parser.add_argument("--steps", type=int, default=6, help="steps per plan and turn")
    parser.add_argument("--only", default="*", help="glob over plan names")
    parser.add_argument("--calibration", type=Path, help="use this file instead of calibrating anew")
    parser.add_argument(
        "--nice", type=int, default=0, help="niceness of the workers during a step, such as -15"
    )
    parser.add_argument("--json", type=Path, help="also write the rows here")
    parser.add_argument("--hybrid", action="store_true", help="pipelines of sharded stages, on four workers")
    parser.add_argument("--residuals", action="store_true", help="put the rows into benchmarks/residuals.csv")
    options = parser.parse_args(arguments)
    if options.residuals and options.only != "*":
        parser.error("--residuals replaces all rows of this benchmark: leave out --only")
    known: Sequence[PlanCase] = hybrid_cases() if options.hybrid else plan_cases()
    workers = WORKERS_OF_HYBRID if options.hybrid else 2
    cases = [case for case in known if fnmatch.fnmatch(case.name, options.only)]
    if not cases:
        names = ", ".join(case.name for case in known)
        parser.error(f"--only {options.only!r} matches none of: {names}")
    torch.set_num_threads(1)
    load = os.getloadavg()
    turns = [_turn(cases, workers, options) for _ in range(options.turns)]
    rows = [_middle(of_case) for of_case in zip(*turns, strict=True)]
    print(_table(rows, [[row.error for row in of_case] for of_case in zip(*turns, strict=True)]))
    print(f"load average before and after: {load[0]:.1f}, {os.getloadavg()[0]:.1f}")
    if options.json:
        data = [{"turn": number, **_as_data(row)} for number, turn in enumerate(turns) for row in turn]
        options.json.write_text(json.dumps(data, indent=1))
    if options.residuals:
        benchmark = "prediction --hybrid" if options.hybrid else "prediction"
        replace_residuals(benchmark, [_residual(benchmark, row, workers) for row in rows])


def _middle(of_case: Sequence[Row]) -> Row:
    """Choose the turn whose error is the middle one; of two in the middle the one that is further off."""
    ordered = sorted(of_case, key=lambda row: row.error)
    return max(ordered[(len(ordered) - 1) // 2 : len(ordered) // 2 + 1], key=lambda row: abs(row.error))


def _turn(cases: Sequence[PlanCase], workers: int, options: argparse.Namespace) -> list[Row]:
    """Calibrate, plan and run all cases."""
    before = _paces(workers)
    os.environ[CALIBRATION] = str(options.calibration or calibrated())
    better = min(*before, *_paces(workers))
    rows = [Row(case, case.plan(ClusterSpec.local(workers)), calibrated_pace=better) for case in cases]
    print(f"predictions rest on: {rows[0].plan.prediction.confidence}", flush=True)
    with WorkerPool(workers) as pool:
        for number, row in enumerate(rows):
            pool.run(prepare, number, row.case.task(row.plan))
            row.peak_bytes = tuple(pool.run(measure_memory, number))
        _time(pool, rows, options)
    return rows


def _paces(workers: int) -> list[float]:
    """Time the machine's pace eight times, each as the mean of the workers' seconds.

    Where they share cores the last one's count: the others may have had the cores to themselves.
    """
    of_workers = max if workers > core_count() else statistics.mean
    with WorkerPool(workers) as pool:
        return [of_workers(ranks) for ranks in zip(*pool.run(pace_seconds, 8), strict=True)]


def _residual(benchmark: str, row: Row, workers: int) -> Residual:
    peak = row.peak_bytes[row.plan.fullest_device]
    source = f"{row.case.model}, local:{workers}"
    return residual_of(benchmark, source, row.case.name, row.plan, row.measured, peak)


def calibrated() -> Path:
    """A calibration of this moment, next to the user's own but not in its place.

    With two workers, or one where there is one core: rates are those of a worker that has a core.
    """
    calibration = calibrate_workers(min(2, core_count()), count_case, measure_collectives)
    print(render_calibration(calibration))
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"partitioner-prediction-{os.getpid()}.json"
    calibration.save(path)
    return path


def _time(pool: WorkerPool, rows: Sequence[Row], options: argparse.Namespace) -> None:
    """Time all plans by turns, so that none has the machine's slow minute to itself."""
    for first in range(0, options.steps, 2):
        at_once = min(2, options.steps - first)
        for number, row in enumerate(rows):
            ranks: list[RankSteps] = pool.run(time_steps, number, at_once, options.nice)
            for step in range(at_once):
                row.seconds.append(max(rank.seconds[step] for rank in ranks))
                row.paces.append(max(statistics.mean(rank.pace_seconds[step]) for rank in ranks))
                row.own.append(tuple(rank.own_seconds[step] for rank in ranks))


def _table(rows: Sequence[Row], errors_by_turn: Sequence[Sequence[float]]) -> str:
    lines = [
        f"{'plan':34}{'predicted':>11}{'measured':>11}{'at pace':>11}{'error':>8}   {'peak predicted':>17}{'measured':>17}"
        f"{'error':>14}   errors by turn"
    ]
    for row, by_turn in zip(rows, errors_by_turn, strict=True):
        errors = " ".join(f"{e:+.1%}" for e in row.memory_errors)
        lines.append(
            f"{row.case.name:34}{row.predicted * 1e3:8.1f} ms{row.as_measured * 1e3:8.1f} ms"
            f"{row.measured * 1e3:8.1f} ms{row.error:+8.1%}   "
            f"{_mib(row.predicted_bytes):>17}{_mib(row.peak_bytes):>17}{errors:>14}"
            f"   {' '.join(f'{e:+.1%}' for e in by_turn)}"
        )
    times = [abs(row.error) for row in rows]
    memory = [abs(e) for row in rows for e in row.memory_errors]
    lines.append(
        f"median |error|: step time {statistics.median(times):.1%} (largest {max(times):.1%}), "
        f"peak memory {statistics.median(memory):.1%} (largest {max(memory):.1%})"
    )
    raw = [abs(row.predicted / row.as_measured - 1.0) for row in rows]
    lines.append(
        f"as measured, whatever the pace: step time {statistics.median(raw):.1%} (largest {max(raw):.1%})"
    )
    for model in dict.fromkeys(row.case.model for row in rows):
        group = [row for row in rows if row.case.model == model]
        predicted_best = min(group, key=lambda row: row.predicted)
        measured_best = min(group, key=lambda row: row.measured)
        excess = predicted_best.measured / measured_best.measured - 1.0
        lines.append(
            f"{model}: predicted best {predicted_best.case.name}, measured best {measured_best.case.name}: "
            f"{excess:.1%} above it"
        )
    return "\n".join(lines)


def _mib(sizes: Sequence[int]) -> str:
    return " ".join(f"{size / 2**20:.1f}" for size in sizes) + " MiB"


def _as_data(row: Row) -> dict[str, Any]:
    return {
        "plan": row.case.name,
        "model": row.case.model,
        "predicted_seconds": row.predicted,
        "measured_seconds": row.measured,
        "own_seconds": row.own,
        "busy_predicted": simulate_plan(row.plan).busy_seconds,
        "seconds": row.seconds,
        "paces": row.paces,
        "predicted_bytes": row.predicted_bytes,
        "measured_bytes": row.peak_bytes,
    }


if __name__ == "__main__":
    main()
