"""Loggers: a CSV file, TensorBoard, Weights & Biases, lines for the console. Rank 0 writes, the others do nothing.

    step   loss     grad_norm  lr       step_seconds  between_seconds  samples_per_second  ...  metric/accuracy
    10     2.3012   0.91       0.0003   0.212         0.004            37.7                     0.12

``step_seconds`` is the engine's time per step, ``between_seconds`` what passes between two steps: loading data, evaluating,
saving. Rates are of the engine's time. Nothing is read from a device until the ``every``-th step; then one row is made:
loss, gradient norm, learning rate and metrics of that step, rates over all steps since the row before.
"""

from __future__ import annotations

import csv
import logging
import os
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from cost_models.errors import UsageError
from partitioner.engine.callbacks import Callback

if TYPE_CHECKING:
    from partitioner.batches.step import StepInfo
    from partitioner.engine.engine import Engine
    from partitioner.evaluation.evaluation import EvalOutput

logger = logging.getLogger("partitioner")

LogKind: TypeAlias = Literal["train", "eval"]
Row = Mapping[str, float | None]
"""Numbers by name; None where there is none."""


class StepLogger(Callback):
    """A callback that makes rows on rank 0; subclasses write them. ``every``: steps per row."""

    def __init__(self, every: int = 1) -> None:
        if every < 1:
            raise UsageError(f"cannot log every {every} steps", suggestions=["every=1 or more"])
        self._every = every
        self._forget()
        self._ended: float | None = None

    def on_train_start(self, engine: Engine) -> None:
        self._ended = None

    def on_step_end(self, engine: Engine, info: StepInfo) -> None:
        if engine.state.rank != 0:
            return
        now = time.perf_counter()
        if self._ended is not None:
            self._between_seconds += max(0.0, now - self._ended - info.seconds)
        self._ended = now
        self._steps += 1
        self._seconds += info.seconds
        self._samples += info.samples
        self._tokens += info.tokens or 0
        if info.step % self._every == 0:
            row = self._row(engine, info)
            self._forget()
            self.write("train", info.step, row)

    def on_evaluate_end(self, engine: Engine, output: EvalOutput) -> None:
        if engine.state.rank == 0:
            metrics = {f"metric/{name}": metric.item() for name, metric in output.metrics.items()}
            self.write("eval", engine.step, {"loss": output.loss.item(), **metrics})

    def write(self, kind: LogKind, step: int, row: Row) -> None:
        """Write a row, on rank 0: at the end of step number ``step``, or loss and metrics of an evaluation after it."""
        raise NotImplementedError

    def _row(self, engine: Engine, info: StepInfo) -> Row:
        groups = engine.optimizer.param_groups
        rates = {f"lr_{number}": float(group["lr"]) for number, group in enumerate(groups[1:], 1)}
        prediction, batch_size = engine.plan.prediction, engine.plan.batch_size
        return {
            "loss": info.loss.item(),
            "grad_norm": None if info.grad_norm is None else info.grad_norm.item(),
            "lr": float(groups[0]["lr"]),
            **rates,
            "step_seconds": self._seconds / self._steps,
            "between_seconds": self._between_seconds / self._steps,
            "samples_per_second": self._samples / self._seconds,
            "tokens_per_second": None if info.tokens is None else self._tokens / self._seconds,
            "mfu": prediction.utilization(batch_size, self._samples / self._seconds),
            "skipped": float(info.skipped),
            **{f"metric/{name}": metric.item() for name, metric in info.metrics.items()},
        }

    def _forget(self) -> None:
        self._steps = self._samples = self._tokens = 0
        self._seconds = self._between_seconds = 0.0


class CsvLogger(StepLogger):
    """Appends a row to ``path`` every ``every`` steps, written at once; evaluations go to ``NAME.eval.csv`` beside it.

    Nothing is ever deleted: where a run was resumed from a checkpoint before its last row, steps stand twice, and the
    later row counts. Raises UsageError where the file has other columns.
    """

    def __init__(self, path: str | os.PathLike[str], every: int = 1) -> None:
        super().__init__(every)
        train = Path(path)
        evaluations = train.with_suffix(f".eval{train.suffix or '.csv'}")
        self._tables: dict[LogKind, _CsvTable] = {"train": _CsvTable(train), "eval": _CsvTable(evaluations)}

    def write(self, kind: LogKind, step: int, row: Row) -> None:
        self._tables[kind].append({"step": step, **row})

    def on_close(self, engine: Engine) -> None:
        for table in self._tables.values():
            table.close()


class _CsvTable:
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

    def on_close(self, engine: Engine) -> None:
        if engine.state.rank == 0 and self._writer is not None:
            self._writer.flush()

    def write(self, kind: LogKind, step: int, row: Row) -> None:
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

    def on_close(self, engine: Engine) -> None:
        if self._run is not None and self._own:
            self._run.finish()
        self._run = None

    def write(self, kind: LogKind, step: int, row: Row) -> None:
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


def _tagged(kind: LogKind, row: Row) -> dict[str, float]:
    """Name the numbers that exist "train/loss", "eval/accuracy"."""
    found = {f"{kind}/{name.removeprefix('metric/')}": value for name, value in row.items()}
    return {tag: value for tag, value in found.items() if value is not None}


class LineLogger(StepLogger):
    """A line every ``every`` steps to ``logging.getLogger("partitioner")``, at level INFO."""

    def __init__(self, every: int = 10) -> None:
        super().__init__(every)

    def write(self, kind: LogKind, step: int, row: Row) -> None:
        when = "step" if kind == "train" else "evaluated after step"
        logger.info("%s %d  %s", when, step, _line(row))


def _line(row: Row) -> str:
    """Write a row as "loss 2.301  lr 0.0003  …"; what is None, or zero as usual, is left out."""
    shown = {name: value for name, value in row.items() if value is not None and (value or name != "skipped")}
    return "  ".join(f"{name.removeprefix('metric/')} {value:.4g}" for name, value in shown.items())
