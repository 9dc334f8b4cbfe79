"""Callbacks of a real engine: when they are called, on which ranks, and what they raise."""

from __future__ import annotations

import csv
import logging
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from cost_models.cluster import ClusterSpec
from partitioner import Plan, partition
from partitioner.batches.step import StepInfo
from partitioner.engine.callbacks import Callback
from partitioner.engine.engine import Engine
from partitioner.engine.loggers import CsvLogger, LineLogger
from partitioner.evaluation.evaluation import EvalOutput
from runtime.ranks.launch import WorkerPool
from tests.distributed import engine_model as net


class Diary(Callback):
    """Notes everything that it is told."""

    def __init__(self) -> None:
        self.notes: list[Any] = []

    def on_train_start(self, engine: Engine) -> None:
        self.notes.append(("start", engine.step))

    def on_step_end(self, engine: Engine, info: StepInfo) -> None:
        clipped = info.grad_norm is not None
        self.notes.append(("step", info.step, info.samples, clipped, info is engine.last_step))

    def on_evaluate_end(self, engine: Engine, output: EvalOutput) -> None:
        self.notes.append(("evaluated", sorted(output.metrics)))

    def on_save(self, engine: Engine, path: Path) -> None:
        self.notes.append(("saved", path.is_dir()))

    def on_load(self, engine: Engine, directory: Path) -> None:
        self.notes.append(("loaded", engine.step))

    def on_close(self, engine: Engine) -> None:
        self.notes.append("closed")


class Stop(Callback):
    def on_step_end(self, engine: Engine, info: StepInfo) -> None:
        if info.step == 2:
            raise StopIteration("enough")


def course(plan_json: str, folder: str) -> tuple[list[Any], list[Any], str]:
    """In a worker: steps whole and in parts, an evaluation, a save; then a run that resumes and is stopped."""
    plan, first, second = Plan.from_json(plan_json), Diary(), Diary()
    log = CsvLogger(f"{folder}/run.csv")
    with plan.deploy(
        net.workload(), graph=net.graph(), callbacks=[first, log], timeout_seconds=20.0
    ) as engine:
        loss = engine.train_step(net.batch(), max_grad_norm=1.0)
        engine.zero_grad()
        engine.forward_backward(net.batch(5, seed=1))
        engine.clip_grad_norm_(1.0)
        engine.optimizer.step()
        engine.optimizer.step()  # of no step
        engine.eval_step(net.batch())
        engine.save(f"{folder}/saved")
        engine.forward_backward(net.batch())  # to look at gradients: no step
        engine.step = 2
        engine.train_step(net.batch())
        engine.callbacks.remove(first)
    raised = ""
    try:
        with plan.deploy(net.workload(), graph=net.graph(), timeout_seconds=20.0) as engine:
            engine.callbacks += [second, log, Stop()]
            engine.load(f"{folder}/saved")
            engine.step = 1
            engine.train_step(net.batch())
    except StopIteration as error:
        raised = str(error)
    assert loss.item() > 0.0
    return first.notes, second.notes, raised


@pytest.fixture(scope="module")
def plan() -> Plan:
    return partition(
        net.workload(),
        ClusterSpec.local(2),
        batch_size=net.SAMPLES,
        microbatches=net.MICROBATCHES,
        schedule="1f1b",
        pins={"embed": 0, "middle": 0, "norm": 1, "head": 1},
    )


def test_callbacks_are_told_of_everything_on_every_rank(plan: Plan, pool: WorkerPool, tmp_path: Path) -> None:
    text = plan.model_dump_json()
    results = pool.run(course, text, str(tmp_path), world_size=2, timeout_seconds=60.0)
    for first, second, raised in results:
        assert first == [
            ("start", 0),
            ("step", 1, 8, True, True),
            ("step", 2, 5, True, True),
            ("evaluated", ["right", "size"]),
            ("saved", True),
            ("step", 3, 8, False, True),
        ]
        assert second == [("loaded", 2), ("start", 1), ("step", 2, 8, False, True), "closed"]
        assert raised == "enough"
    with (tmp_path / "run.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1", "2", "3", "2"], "rank 0 alone, and a resumed run goes on"
    assert float(rows[0]["grad_norm"]) > 0.0 == len(rows[2]["grad_norm"])
    assert plan.prediction.mfu is not None
    at_one_sample_per_second = plan.prediction.mfu * plan.prediction.step_seconds / net.SAMPLES
    rate = float(rows[1]["samples_per_second"])
    assert float(rows[1]["mfu"]) == pytest.approx(at_one_sample_per_second * rate)
    with (tmp_path / "run.eval.csv").open() as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["2"]
    assert not dist.is_initialized()


class FullDisk(Callback):
    def on_evaluate_end(self, engine: Engine, output: EvalOutput) -> None:
        if engine.rank == 0:
            raise OSError("the disk is full")


def evaluate_and_go_on(plan_json: str) -> None:
    plan = Plan.from_json(plan_json)
    with plan.deploy(
        net.workload(), graph=net.graph(), callbacks=[FullDisk()], timeout_seconds=4.0
    ) as engine:
        engine.train_step(net.batch())
        engine.eval_step(net.batch())
        engine.train_step(net.batch())


def test_what_a_callback_raises_on_one_rank_is_told_to_the_others(plan: Plan, pool: WorkerPool) -> None:
    text = plan.model_dump_json()
    first, second = pool.run_each(evaluate_and_go_on, text, world_size=2, timeout_seconds=30.0)
    assert (first[0], second[0]) == (False, False)
    assert first[1].rstrip().endswith("OSError: the disk is full")
    assert "rank 0 reported: OSError: the disk is full" in second[1]


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def logged(plan_json: str) -> list[str]:
    """In a worker: what the library logs while it deploys and trains, and a warning."""
    library, kept = logging.getLogger("partitioner"), Kept()
    library.addHandler(kept)
    level = library.level
    library.setLevel(logging.INFO)
    try:
        with Plan.from_json(plan_json).deploy(
            net.workload(), callbacks=[LineLogger(every=1)], timeout_seconds=20.0
        ) as engine:
            engine.train_step(net.batch())
            engine.forward_backward(net.batch())
            engine.zero_grad()
            engine.forward_backward(net.batch())
            for _ in range(2):  # gradients are not added up here, as they would be elsewhere
                engine.forward_backward(net.batch())
        library.warning("beware")
    finally:
        library.removeHandler(kept)
        library.setLevel(level)
    return kept.texts


def test_rank_0_alone_logs_and_every_rank_warns(plan: Plan, pool: WorkerPool) -> None:
    first, second = pool.run(logged, plan.model_dump_json(), world_size=2, timeout_seconds=60.0)
    assert any(text.startswith("traced net") for text in first)
    assert any(text.startswith("step 1  loss") for text in first)
    assert first[-1] == "beware"
    replaced, beware = second
    assert replaced in first
    assert replaced.startswith("forward_backward was called again")
    assert beware == "beware"
