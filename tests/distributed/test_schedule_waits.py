"""Schedules that end and that hang, told beforehand and run by torch on Gloo: messages moved, left out, mixed up."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _defer_recv_ops, _PipelineScheduleRuntime

from partitioner.formats.schedule_csv import OF_STAGES, Action, Cell, TorchSchedule, read_csv
from partitioner.formats.schedule_waits import waits_of, with_messages
from runtime.ranks.launch import WorkerPool
from tests.unit.partitioner.formats.test_schedule_csv import made_by_torch

SECONDS = 4.0
"""The time after which a wait counts as endless; a step takes some milliseconds."""
SIZE = 4


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def stage_of(index: int) -> nn.Linear:
    torch.manual_seed(index)
    return nn.Linear(SIZE, SIZE).double()


def example(microbatches: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    made = torch.randn(2, microbatches, SIZE, generator=draw, dtype=torch.float64)
    return made[0], made[1]


def outcomes(texts: Sequence[str], folder: str, seconds: float) -> list[tuple[str, float | None]]:
    """In a worker: what becomes of a step under each schedule, and its loss on the rank that has it."""
    logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)
    found = []
    for number, text in enumerate(texts):
        group = dist.new_group(timeout=timedelta(seconds=seconds))
        path = Path(folder) / f"{number}-{dist.get_rank()}.csv"
        path.write_text(text)
        try:
            found.append(("ends", step(read_csv(text), str(path), group)))
        except (AssertionError, KeyError, ValueError) as error:
            found.append((f"raises: {error!r}", None))
        except RuntimeError as error:
            waited = any(word in str(error) for word in ("imed out", "closed"))
            found.append(("hangs" if waited else f"raises: {error}", None))
        dist.barrier()
    return found


def step(schedule: TorchSchedule, path: str, group: Any) -> float | None:
    count, last = schedule.stages, schedule.stages - 1
    own = sorted(stage for stage, rank in schedule.stage_ranks().items() if rank == dist.get_rank())
    stages = [PipelineStage(stage_of(stage), stage, count, torch.device("cpu"), group=group) for stage in own]
    runs = _PipelineScheduleRuntime(stages, schedule.microbatches, squared)  # type: ignore[no-untyped-call]
    runs._load_csv(path, schedule.form)
    inputs, targets = example(schedule.microbatches)
    losses: list[Tensor] = []
    has_loss = last in own
    runs.step(
        *((inputs,) if 0 in own else ()),
        target=targets if has_loss else None,
        losses=losses if has_loss else None,
    )
    return torch.stack(losses).mean().item() if has_loss else None


def whole(schedule: TorchSchedule) -> float:
    inputs, targets = example(schedule.microbatches)
    for stage in range(schedule.stages):
        inputs = stage_of(stage)(inputs)
    return squared(inputs, targets).item()


def told(schedule: TorchSchedule) -> str:
    if schedule.problems():
        return "broken"
    waits = waits_of(schedule)
    if any("wrong numbers" in text for text in waits.fails):
        return "mixed"
    return "raises" if waits.fails or waits.refused else "hangs" if waits.hangs else "ends"


BASES = {
    "1f1b": "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n",
    "interleaved": "0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1\n1F0,1F1,3F0,3B0,3F1,3B1,1B0,1B1\n",
    "v, in halves": "0F0,0F1,3F0,3I0,3F1,3I1,0I0,0W0,3W0,0I1,3W1,0W1\n1F0,2F0,1F1,2F1,2I0,1I0,2I1,1I1,2W0,1W0,2W1,1W1\n",
}


def mutated(drawn: random.Random, base: str) -> TorchSchedule:
    """A schedule with its messages, of which one is moved by some places, or left out."""
    rows: list[list[Cell]] = [list(row) for row in with_messages(read_csv(BASES[base]))[0].rows]
    rows = [[c for c in row if not (isinstance(c, Action) and c.kind in OF_STAGES)] for row in rows]
    for _ in range(drawn.randint(1, 3)):
        row = drawn.choice(rows)
        at = drawn.choice([place for place, cell in enumerate(row) if "_" in str(cell)])
        cell = row.pop(at)
        if drawn.random() < 0.9:
            row.insert(max(0, at + drawn.randint(-4, 4)), cell)
    return TorchSchedule(tuple(map(tuple, rows)))


def cases(seed: int, wanted: dict[str, int]) -> list[TorchSchedule]:
    """So many schedules of each kind that is told of them."""
    drawn, left, found = random.Random(seed), dict(wanted), []
    while any(left.values()):
        made = mutated(drawn, drawn.choice(list(BASES)))
        kind = told(made)
        if left.get(kind, 0):
            left[kind] -= 1
            found.append(made)
    return found


def compared(pool: WorkerPool, folder: Path, made: Sequence[TorchSchedule]) -> dict[tuple[str, str], int]:
    """Count (told, seen) of schedules."""
    ranks = len(made[0].rows)
    seconds = 60 + 2 * SECONDS * len(made)
    by_rank = pool.run(
        outcomes, [str(s) for s in made], str(folder), SECONDS, world_size=ranks, timeout_seconds=seconds
    )
    table: dict[tuple[str, str], int] = {}
    for schedule, seen in zip(made, zip(*by_rank, strict=True), strict=True):
        words = [text for text, _ in seen]
        raised = any(text.startswith("raises") for text in words)
        what = "raises" if raised else "hangs" if "hangs" in words else "ends"
        if what == "ends":
            (loss,) = (loss for _, loss in seen if loss is not None)
            what = "ends" if abs(loss - whole(schedule)) < 1e-9 * abs(loss) else "wrong"
        key = (told(schedule), what)
        table[key] = table.get(key, 0) + 1
    return table


def test_what_is_told_of_schedules_happens(pool: WorkerPool, tmp_path: Path) -> None:
    made = cases(1, {"ends": 12, "hangs": 2})
    assert compared(pool, tmp_path, made) == {("ends", "ends"): 12, ("hangs", "hangs"): 2}


@pytest.mark.parametrize("name", ["Interleaved1F1B", "ZBVZeroBubble"])
def test_late_receives_of_torchs_own(pool: WorkerPool, tmp_path: Path, name: str) -> None:
    """torch 2.13 mixes up the messages of ZBVZeroBubble where it posts receives late (defer_pp_recv)."""
    made = made_by_torch(name, 2, 4)
    late = _defer_recv_ops(made.pipeline_order_with_comms, made.stage_index_to_group_rank.__getitem__)
    schedule = read_csv("".join(",".join(map(str, row)) + "\n" for _, row in sorted(late.items())))
    (pair,) = compared(pool, tmp_path, [schedule])
    assert pair in {("ends", "ends"), ("mixed", "wrong")}
    assert pair[0] == "ends" or name == "ZBVZeroBubble"


def test_messages_taken_for_others_give_wrong_numbers(pool: WorkerPool, tmp_path: Path) -> None:
    """torch does not see it: what two ranks send each other has no names."""
    swapped = read_csv(
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F1,1RECV_F0,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n"
    )
    assert waits_of(swapped).fails == (
        "rank 1: 1RECV_F1 takes what rank 0 sends with 0SEND_F0, its next: wrong numbers",
        "rank 1: 1RECV_F0 takes what rank 0 sends with 0SEND_F1, its next: wrong numbers",
    )
    assert compared(pool, tmp_path, [swapped]) == {("mixed", "wrong"): 1}
