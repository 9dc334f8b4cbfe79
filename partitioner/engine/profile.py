"""``engine.profile(batches)``: the cost of training steps, instruction by instruction, beside the plan's prediction.

profile = engine.profile(batches)           trains on them, measured; the same on every rank
print(profile)                              where each rank's time goes, measured and predicted
print(profile.timeline())                   both timelines, one under the other
profile.save("trace.json")                  both, for https://ui.perfetto.dev
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

import torch

from cost_models.errors import UsageError
from partitioner.batches.step import StepInfo
from partitioner.record.data import PlanData
from partitioner.record.rebuild import simulate_plan
from partitioner.report.profile import Profile, TrainingRates
from runtime.execute.execute import Executor
from runtime.measure.instrument import RunRecorder, TimeMark
from runtime.measure.measured_step import (
    StepRecord,
    measured_step,
    measured_times,
    simulated_times,
)
from runtime.program.relabel import RankMap
from runtime.ranks.clock_offset import ClockOffset, clock_offset, system_name
from runtime.ranks.side_group import SideGroup
from runtime.simulate.simulation import Simulation


def profile_steps(
    train_step: Callable[[Any], StepInfo],
    batches: Iterable[Any],
    steps: int | None,
    plan: PlanData,
    ranks: RankMap,
    executor: Executor,
    optimizer: torch.optim.Optimizer,
    side: SideGroup,
) -> Profile:
    """Train on ``batches`` (on the first ``steps`` of them) and measure. Collective; the same profile on every rank."""
    recorder = RunRecorder(executor.device)
    records: list[StepRecord] = []
    infos: list[StepInfo] = []
    with executor.binding_with(recorder.bind), _marked(optimizer, recorder) as marks:
        for batch in islice(batches, steps):
            marks.clear()
            started = time.perf_counter()
            infos.append(train_step(batch))
            if executor.device.type == "cuda":
                torch.cuda.synchronize(executor.device)
            ended = time.perf_counter()
            seconds = recorder.clock.seconds(marks)
            span = (seconds[0], seconds[-1]) if seconds else None
            records.append(StepRecord(started, ended, span, recorder.take()))
    if not records:
        raise UsageError("there is nothing to profile", ["no batch was given"])
    own = [record.end_seconds - record.start_seconds for record in records]
    durations = tuple(max(ranks) for ranks in zip(*side.agree("profiling", lambda: own), strict=True))
    shown = _typical(durations, [info.samples == plan.batch_size for info in infos])
    own_offset = clock_offset(side, system_name())
    offsets: list[ClockOffset] = side.agree("profiling", lambda: own_offset)
    of_ranks: list[StepRecord] = side.agree("profiling", lambda: records[shown])
    measured = measured_step(of_ranks, [offset.seconds for offset in offsets])
    predicted = of_launch(simulate_plan(plan), ranks)
    return Profile(
        model=plan.model.name,
        fingerprint=plan.model.fingerprint,
        devices=ranks.device_of_rank,
        step_seconds=durations,
        shown=shown,
        samples=infos[shown].samples,
        rates=_rates(plan, infos[shown], durations[shown]),
        predicted_rates=TrainingRates(
            plan.prediction.samples_per_second, plan.prediction.tokens_per_second, plan.prediction.mfu
        ),
        measured=measured,
        predicted=predicted,
        times=tuple(measured_times(record) for record in of_ranks),
        predicted_times=tuple(simulated_times(predicted, rank) for rank in range(len(of_ranks))),
        clock_error_seconds=max(offset.error_seconds for offset in offsets),
    )


def of_launch(simulation: Simulation, ranks: RankMap) -> Simulation:
    """Turn a simulation of a plan's devices into one of the ranks that play them."""
    devices, rank_of = ranks.device_of_rank, ranks.rank_of_device
    return replace(
        simulation,
        timeline=tuple(simulation.timeline[device] for device in devices),
        busy_seconds=tuple(simulation.busy_seconds[device] for device in devices),
        memory=tuple(simulation.memory[device] for device in devices),
        transfers=tuple(
            transfer._replace(
                message=transfer.message._replace(
                    source=rank_of[transfer.message.source], target=rank_of[transfer.message.target]
                )
            )
            for transfer in simulation.transfers
        ),
        pair_bytes={(rank_of[a], rank_of[b]): size for (a, b), size in simulation.pair_bytes.items()},
    )


@contextmanager
def _marked(optimizer: torch.optim.Optimizer, recorder: RunRecorder) -> Iterator[list[TimeMark]]:
    """Take marks before and after every ``optimizer.step()``."""
    marks: list[TimeMark] = []

    def mark(*_: Any) -> None:
        marks.append(recorder.clock.mark())

    hooks = optimizer.register_step_pre_hook(mark), optimizer.register_step_post_hook(mark)
    try:
        yield marks
    finally:
        for hook in hooks:
            hook.remove()


def _typical(durations: tuple[float, ...], full: list[bool]) -> int:
    """Choose the median step: of full batches where there are any, without the first step where there are others."""
    later = list(range(1, len(durations))) or [0]
    numbers = [number for number in later if full[number]] or later
    middle = statistics.median_low(durations[number] for number in numbers)
    return next(number for number in numbers if durations[number] == middle)


def _rates(plan: PlanData, info: StepInfo, seconds: float) -> TrainingRates:
    samples = info.samples / seconds
    return TrainingRates(
        samples,
        None if info.tokens is None else info.tokens / seconds,
        plan.prediction.utilization(plan.batch_size, samples),
    )
