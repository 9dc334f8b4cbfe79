"""Loggers: what they write, when they read numbers, how a log goes on after a crash."""

from __future__ import annotations

import csv
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cost_models.errors import UsageError
from partitioner.batches.step import StepInfo
from partitioner.engine.callbacks import Callback, close_all
from partitioner.engine.loggers import CsvLogger, LineLogger, StepLogger, TensorBoardLogger, WandbLogger
from partitioner.evaluation.evaluation import EvalOutput
from partitioner.record.records import Prediction


def engine(rank: int = 0, step: int = 0) -> Any:
    return SimpleNamespace(
        state=SimpleNamespace(rank=rank),
        optimizer=torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5),
        plan=SimpleNamespace(prediction=Prediction.model_construct(mfu=0.4, step_seconds=2.0), batch_size=8),
        step=step,
    )


class Unread:
    """A number that nobody may look at."""

    def item(self) -> float:
        raise AssertionError("read")


def info(step: int, *, loss: Any = None, samples: int = 8, seconds: float = 4.0, **changes: Any) -> StepInfo:
    metrics = {"right": torch.tensor(0.25)}
    made = torch.tensor(float(step)) if loss is None else loss
    fields = {"loss": made, "grad_norm": None, "metrics": metrics, "samples": samples, "tokens": samples * 5}
    return StepInfo(**{**fields, "seconds": seconds, "step": step, **changes})


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_rows_every_few_steps_with_rates_of_all_steps_between(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "run.csv"
    logger, on = CsvLogger(path, every=3), engine()
    logger.on_train_start(on)
    for step in range(1, 3):
        logger.on_step_end(on, info(step, loss=Unread(), samples=8, seconds=1.0))
    assert not path.exists()
    logger.on_step_end(on, info(3, samples=2, seconds=4.0, grad_norm=torch.tensor(2.5), skipped=True))
    (row,) = rows(path)  # written and flushed before the file is closed
    assert list(row)[:5] == ["step", "loss", "grad_norm", "lr", "step_seconds"]
    assert (row["step"], row["loss"], row["grad_norm"], row["lr"]) == ("3", "3.0", "2.5", "0.5")
    assert float(row["step_seconds"]) == 2.0
    assert float(row["samples_per_second"]) == 18 / 6
    assert float(row["tokens_per_second"]) == 90 / 6
    assert float(row["mfu"]) == pytest.approx(0.4 * 3 / (8 / 2))  # the plan's at its own rate of 4 samples/s
    assert (row["skipped"], row["metric/right"]) == ("1.0", "0.25")
    assert float(row["between_seconds"]) < 1.0
    logger.on_step_end(on, info(4, loss=Unread()))
    logger.on_close(on)
    assert len(rows(path)) == 1


def test_a_log_goes_on_after_a_crash_and_nothing_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    for first in (1, 3):
        logger, on = CsvLogger(path), engine(step=first - 1)
        logger.on_train_start(on)
        for step in (first, first + 1):
            logger.on_step_end(on, info(step))
        if first == 1:
            with path.open("a") as file:
                file.write("3,0.1")  # half a row
    found = rows(path)
    assert [row["step"] for row in found] == ["1", "2", "3", "3", "4"]
    assert [row["loss"] for row in found if row["lr"]] == ["1.0", "2.0", "3.0", "4.0"]
    other = CsvLogger(path)
    with pytest.raises(UsageError, match="a log with other columns"):
        other.on_step_end(engine(), info(5, metrics={}))
    other.on_close(engine())
    assert len(rows(path)) == 5


def test_only_rank_0_writes_and_evaluations_have_a_table_of_their_own(tmp_path: Path) -> None:
    output = EvalOutput(torch.tensor(1.5), {"right": torch.tensor(0.5)}, None, 8, None)
    for rank in (1, 0):
        logger, on = CsvLogger(tmp_path / "run.csv"), engine(rank, step=7)
        logger.on_train_start(on)
        logger.on_step_end(on, info(7))
        logger.on_evaluate_end(on, output)
        logger.on_close(on)
        assert len(list(tmp_path.iterdir())) == (2 if rank == 0 else 0)
    assert rows(tmp_path / "run.eval.csv") == [{"step": "7", "loss": "1.5", "metric/right": "0.5"}]


class Writer:
    """The part of TensorBoard's SummaryWriter that is used."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []
        self.flushed = 0

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.scalars.append((tag, scalar_value, global_step))

    def flush(self) -> None:
        self.flushed += 1


def test_tensorboard_gets_scalars_that_exist() -> None:
    writer = Writer()
    logger, on = TensorBoardLogger(writer, every=2), engine(step=2)
    logger.on_train_start(on)
    logger.on_step_end(on, info(1, loss=Unread()))
    logger.on_step_end(on, info(2, tokens=None))
    logger.on_evaluate_end(on, EvalOutput(torch.tensor(3.5), {}, None, 8, None))
    logger.on_close(on)
    scalars = {tag: (value, step) for tag, value, step in writer.scalars}
    assert scalars["train/loss"] == (2.0, 2)
    assert scalars["train/right"] == (0.25, 2)
    assert scalars["train/lr"] == (0.5, 2)
    assert scalars["eval/loss"] == (3.5, 2)
    assert not scalars.keys() & {"train/grad_norm", "train/tokens_per_second"}
    assert writer.flushed == 1
    elsewhere = TensorBoardLogger(None)
    elsewhere.on_train_start(engine(rank=1))
    elsewhere.on_step_end(engine(rank=1), info(1, loss=Unread()))
    with pytest.raises(UsageError, match="was given no writer"):
        elsewhere.on_train_start(engine())


class Run:
    """The part of a run of Weights & Biases that is used."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.logged: list[dict[str, float]] = []
        self.finished = 0
        self.config = SimpleNamespace(update=self._configure)
        self.configured: dict[str, Any] = {}

    def _configure(self, values: dict[str, Any], allow_val_change: bool) -> None:
        assert allow_val_change, "a resumed run would be refused"
        self.configured.update(values)

    def log(self, values: dict[str, float]) -> None:
        self.logged.append(values)

    def finish(self) -> None:
        self.finished += 1


def with_wandb(monkeypatch: pytest.MonkeyPatch, run: Run | None = None) -> list[Run]:
    """Put a stand-in in the place of wandb; return the runs that it starts."""
    begun: list[Run] = []

    def init(**options: Any) -> Run:
        begun.append(Run(**options))
        return begun[-1]

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=run, init=init))
    return begun


def planned(rank: int = 0) -> Any:
    """An engine whose plan has what a run is told of it."""
    on = engine(rank, step=2)
    on.plan = SimpleNamespace(
        **vars(on.plan), model=SimpleNamespace(name="net"), strategy="layer", schedule="1f1b", world_size=2,
        stages=(1, 2), microbatches=4,
    )  # fmt: skip
    return on


def test_wandb_gets_numbers_that_exist_and_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = with_wandb(monkeypatch)
    logger, on = WandbLogger(every=2, project="llms"), planned()
    logger.on_train_start(on)
    logger.on_step_end(on, info(1, loss=Unread()))
    logger.on_step_end(on, info(2, tokens=None))
    logger.on_evaluate_end(on, EvalOutput(torch.tensor(3.5), {}, None, 8, None))
    logger.on_close(on)
    (run,) = begun
    assert run.options == {"project": "llms"}
    assert run.configured["plan"]["schedule"] == "1f1b"
    assert run.configured["plan"]["predicted_step_seconds"] == 2.0
    train, evaluated = run.logged
    assert (train["train/loss"], train["train/right"], train["train/step"]) == (2.0, 0.25, 2)
    assert not train.keys() & {"train/grad_norm", "train/tokens_per_second"}
    assert evaluated == {"eval/loss": 3.5, "eval/step": 2}
    assert run.finished == 1


def test_wandb_runs_of_the_user_are_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    assert with_wandb(monkeypatch, run) == []
    logger, on = WandbLogger(), planned()
    logger.on_train_start(on)
    logger.on_step_end(on, info(1))
    logger.on_close(on)
    assert len(run.logged) == 1
    assert run.finished == 0


def test_wandb_is_needed_on_rank_0_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    logger, elsewhere = WandbLogger(), planned(rank=1)
    logger.on_train_start(elsewhere)
    logger.on_step_end(elsewhere, info(1, loss=Unread()))
    logger.on_close(elsewhere)
    with pytest.raises(UsageError, match="pip install wandb"):
        WandbLogger().on_train_start(planned())


def test_lines_go_to_the_librarys_logger(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="partitioner"):
        logger = LineLogger(every=2)
        for step in (1, 2):
            logger.on_step_end(engine(), info(step))
    (record,) = caplog.records
    assert record.getMessage().startswith("step 2  loss 2  lr 0.5  step_seconds 4")
    assert record.getMessage().endswith("right 0.25")


def test_every_group_has_its_learning_rate(tmp_path: Path) -> None:
    on = engine()
    on.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": torch.tensor(0.125)})
    CsvLogger(tmp_path / "run.csv").on_step_end(on, info(1))
    (row,) = rows(tmp_path / "run.csv")
    assert (row["lr"], row["lr_1"]) == ("0.5", "0.125")


@pytest.mark.parametrize("every", [0, -1])
def test_a_logger_that_never_logs_is_refused(every: int) -> None:
    with pytest.raises(UsageError, match=f"every {every} steps"):
        StepLogger(every)


def test_all_are_closed_and_the_first_error_is_raised() -> None:
    closed: list[str] = []

    class Bad(Callback):
        def __init__(self, text: str) -> None:
            self.text = text

        def on_close(self, engine: Any) -> None:
            closed.append(self.text)
            raise ValueError(self.text)

    with pytest.raises(ValueError, match="one"):
        close_all([Bad("one"), Callback(), Bad("two")], engine(), lambda: closed.append("last"))
    assert closed == ["one", "two", "last"]
