"""Schedules of torch's pipelines with messages moved or left out: what is told of them, and what torch does on Gloo.

    python -m benchmarks.torch_schedules                   500 schedules, on two and on four processes; 15 minutes
    python -m benchmarks.torch_schedules --count 50

told     ends, hangs, mixed (a message is taken for another one: wrong numbers), raises
seen     ends with the loss of the whole model, wrong, hangs (nothing moves for some seconds), raises

A row of the table counts the schedules of one pair. The exit code is 1 where one that is told to end, or to hang, does not.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from partitioner.formats.schedule_csv import OF_STAGES, Action, Cell, TorchSchedule, read_csv
from partitioner.formats.schedule_waits import waits_of, with_messages
from runtime.ranks.launch import WorkerPool

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
    """Return, in a worker, what becomes of a step under each schedule, and its loss on the rank that has it."""
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


BASES |= {
    "1f1b on 4": (
        "0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n1F0,1F1,1F2,1B0,1F3,1B1,1B2,1B3\n"
        "2F0,2F1,2B0,2F2,2B1,2F3,2B2,2B3\n3F0,3B0,3F1,3B1,3F2,3B2,3F3,3B3\n"
    ),
    "interleaved on 4": "".join(
        ",".join(
            [f"{rank + 4 * chunk}F{m}" for chunk in range(2) for m in range(4)]
            + [f"{rank + 4 * chunk}B{m}" for chunk in (1, 0) for m in range(4)]
        )
        + "\n"
        for rank in range(4)
    ),
}


def mutated(drawn: random.Random, base: str) -> TorchSchedule:
    """Return a schedule with its messages, of which some are moved by some places, or left out."""
    rows: list[list[Cell]] = [list(row) for row in with_messages(read_csv(BASES[base]))[0].rows]
    rows = [[c for c in row if not (isinstance(c, Action) and c.kind in OF_STAGES)] for row in rows]
    for _ in range(drawn.randint(1, 3)):
        row = drawn.choice(rows)
        at = drawn.choice([place for place, cell in enumerate(row) if "_" in str(cell)])
        cell = row.pop(at)
        if drawn.random() < 0.9:
            row.insert(max(0, at + drawn.randint(-4, 4)), cell)
    return TorchSchedule(tuple(map(tuple, rows)))


def cases(
    seed: int, wanted: dict[str, int], bases: Sequence[str] = ("1f1b", "interleaved", "v, in halves")
) -> list[TorchSchedule]:
    """Make so many schedules of each kind that is told of them."""
    drawn, left, found = random.Random(seed), dict(wanted), []
    while any(left.values()):
        made = mutated(drawn, drawn.choice(bases))
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


SHARE = {"ends": 0.75, "hangs": 0.1, "mixed": 0.15}
"""The shares of what is told among the schedules that are run. By hand: one that hangs takes seconds."""
IN_A_POOL = 50
"""Schedules that one pool of processes runs: groups of processes are made anew for each, and given up with the pool."""
BASES_OF = {2: ("1f1b", "interleaved", "v, in halves"), 4: ("1f1b on 4", "interleaved on 4")}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for ranks, bases in BASES_OF.items():
        table: Counter[tuple[str, str]] = Counter()
        wanted = given.count // len(BASES_OF)
        for start in range(0, wanted, IN_A_POOL):
            size = min(IN_A_POOL, wanted - start)
            numbers = {kind: round(size * share) for kind, share in SHARE.items()}
            made = cases(given.seed + start, numbers, bases)
            with WorkerPool(ranks) as pool, tempfile.TemporaryDirectory() as folder:
                table.update(compared(pool, Path(folder), made))
        for (before, after), count in sorted(table.items()):
            print(f"{ranks} processes  told {before:<7} seen {after:<7} {count:4d}", flush=True)
        broken = sum(n for (said, seen), n in table.items() if said in ("ends", "hangs") and said != seen)
        if broken:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
