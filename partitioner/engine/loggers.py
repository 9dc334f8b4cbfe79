"""Loggers: a CSV file, TensorBoard, Weights & Biases, lines for the console. Rank 0 writes, the others do nothing.

    step   loss     grad_norm  lr       step_seconds  between_seconds  samples_per_second  ...  metric/accuracy
    10     2.3012   0.91       0.0003   0.212         0.004            37.7                     0.12

``step_seconds`` is the engine's time per step, ``between_seconds`` what passes between two steps: loading data, evaluating,
saving. Rates are of the engine's time.
"""

from __future__ import annotations

import csv
import logging
import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from cost_models.errors import UsageError
from partitioner.engine.step_log import Row, StepLogger

if TYPE_CHECKING:
    from partitioner.engine.engine import Engine

logger = logging.getLogger("partitioner")


class CsvLogger(StepLogger):
    """Appends a row to ``path`` every ``every`` steps, written at once; evaluations go to ``NAME.eval.csv`` beside it.

    Nothing is ever deleted: where a run was resumed from a checkpoint before its last row, steps stand twice, and the
    later row counts. Raises UsageError where the file has other columns.
    """

    def __init__(self, path: str | os.PathLike[str], every: int = 1) -> None:
        super().__init__(every)
        train = Path(path)
        self._train, self._eval = _Table(train), _Table(train.with_suffix(f".eval{train.suffix or '.csv'}"))

    def write(self, step: int, row: Row) -> None:
        self._train.append({"step": step, **row})

    def write_evaluation(self, step: int, row: Row) -> None:
        self._eval.append({"step": step, **row})

    def on_close(self, engine: Engine) -> None:
        self._train.close()
        self._eval.close()


class _Table:
    """A CSV file that rows are appended to. It is opened, or made, with the first one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def append(self, row: Row) -> None:
        if self._file is None:
            self._file = self._open(list(row))
        self._write(self._file, ["" if value is None else value for value in row.values()])
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, columns: list[str]) -> IO[str]:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        before = self._path.read_text() if self._path.exists() else ""
        found = next(csv.reader(before.splitlines()[:1]), None)
        if found is not None and found != columns:
            raise UsageError(
                f"{self._path} is a log with other columns",
                [f"it has {', '.join(found)}", f"this run has {', '.join(columns)}"],
                ["log to another file"],
            )
        file = self._path.open("a", newline="")
        if found is None:
            self._write(file, columns)
        elif not before.endswith("\n"):  # a crash while the last row was written
            file.write("\n")
        return file

    def _write(self, file: IO[str], values: Sequence[object]) -> None:
        csv.writer(file, lineterminator="\n").writerow(values)


class SummaryWriter(Protocol):
    """The methods of TensorBoard's ``torch.utils.tensorboard.SummaryWriter`` that are used."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...

    def flush(self) -> None: ...


class TensorBoardLogger(StepLogger):
    """Writes scalars ``train/…`` and ``eval/…`` to a TensorBoard writer of yours (rank 0's; others may give None)."""

    def __init__(self, writer: SummaryWriter | None, every: int = 1) -> None:
        super().__init__(every)
        self._writer = writer

    def on_train_start(self, engine: Engine) -> None:
        super().on_train_start(engine)
        if engine.state.rank == 0 and self._writer is None:
            raise UsageError("rank 0 logs to TensorBoard, and was given no writer")

    def write(self, step: int, row: Row) -> None:
        self._scalars("train", step, row)

    def write_evaluation(self, step: int, row: Row) -> None:
        self._scalars("eval", step, row)

    def on_close(self, engine: Engine) -> None:
        if engine.state.rank == 0 and self._writer is not None:
            self._writer.flush()

    def _scalars(self, kind: str, step: int, row: Row) -> None:
        for tag, value in _tagged(kind, row).items():
            if self._writer is not None:
                self._writer.add_scalar(tag, value, step)


class WandbLogger(StepLogger):
    """Logs ``train/…`` and ``eval/…`` to Weights & Biases, with the plan's facts as the run's configuration.

    ``options``: those of ``wandb.init``, such as ``project="llms"``, for a run that rank 0 starts, and finishes at the end.
    Where a run of yours is under way (``wandb.run``), it is used and left open. Other ranks import nothing.
    """

    def __init__(self, every: int = 1, **options: Any) -> None:
        super().__init__(every)
        self._options = options
        self._run: Any = None
        self._own = False

    def on_train_start(self, engine: Engine) -> None:
        super().on_train_start(engine)
        if engine.state.rank != 0 or self._run is not None:
            return
        try:
            wandb = import_module("wandb")
        except ImportError as error:
            raise UsageError(
                "cannot log to Weights & Biases", ["wandb is not installed"], ["pip install wandb"]
            ) from error
        self._own = wandb.run is None
        self._run = wandb.init(**self._options) if self._own else wandb.run
        self._run.config.update({"plan": _facts(engine)}, allow_val_change=True)

    def write(self, step: int, row: Row) -> None:
        self._log("train", step, row)

    def write_evaluation(self, step: int, row: Row) -> None:
        self._log("eval", step, row)

    def on_close(self, engine: Engine) -> None:
        if self._run is not None and self._own:
            self._run.finish()
        self._run = None

    def _log(self, kind: str, step: int, row: Row) -> None:
        # Not as wandb's own step: it refuses numbers below the last one, and a run may be resumed from a checkpoint.
        if self._run is not None:
            self._run.log({**_tagged(kind, row), f"{kind}/step": step})


def _facts(engine: Engine) -> dict[str, Any]:
    """Return what tells a run's plan from others."""
    plan = engine.plan
    return {
        "model": plan.model.name,
        "strategy": plan.strategy,
        "schedule": plan.schedule,
        "devices": plan.world_size,
        "stages": len(plan.stages),
        "batch_size": plan.batch_size,
        "microbatches": plan.microbatches,
        "predicted_step_seconds": plan.prediction.step_seconds,
    }


def _tagged(kind: str, row: Row) -> dict[str, float]:
    """Name the numbers that exist "train/loss", "eval/accuracy"."""
    found = {f"{kind}/{name.removeprefix('metric/')}": value for name, value in row.items()}
    return {tag: value for tag, value in found.items() if value is not None}


class LineLogger(StepLogger):
    """A line every ``every`` steps to ``logging.getLogger("partitioner")``, at level INFO."""

    def __init__(self, every: int = 10) -> None:
        super().__init__(every)

    def write(self, step: int, row: Row) -> None:
        logger.info("step %d  %s", step, _line(row))

    def write_evaluation(self, step: int, row: Row) -> None:
        logger.info("evaluated after step %d  %s", step, _line(row))


def _line(row: Row) -> str:
    """Write a row as "loss 2.301  lr 0.0003  …"; what is None, or zero as usual, is left out."""
    shown = {name: value for name, value in row.items() if value is not None and (value or name != "skipped")}
    return "  ".join(f"{name.removeprefix('metric/')} {value:.4g}" for name, value in shown.items())
