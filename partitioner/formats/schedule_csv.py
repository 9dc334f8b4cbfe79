"""Schedules of torch.distributed.pipelining as CSV files: a line per rank, a cell per action, empty cells idle.

    0F0,0F1,,0B0,,0B1         F forward, B whole backward, I its input half, W its weight half: stage, letter, micro-batch
    ,1F0,1B0,1F1,1B1,         (2F1;3B0)OVERLAP_F_B: two at once

Such a file is ``compute_only``: torch adds messages and collectives of parameters itself. In a ``compute_comms`` file they
stand there, too: 1RECV_F0 and 1SEND_B0 with a micro-batch, 0UNSHARD, 0RESHARD and 0REDUCE_GRAD without.

Source: torch 2.13, torch.distributed.pipelining.schedules ("_Action", "_load_csv", "_validate_schedule").
Its reader takes what begins like an action (0F0x is 0F0); this one does not.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from cost_models.errors import UsageError
from cost_models.units import counted
from partitioner.record.data import PlanData
from partitioner.record.rebuild import group_programs
from runtime.program.program import Backward, BackwardInput, BackwardWeight, Forward

Form: TypeAlias = Literal["compute_only", "compute_comms"]
COMPUTES = ("F", "B", "I", "W")
MESSAGES = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
OF_STAGES = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
"""Actions that have no micro-batch."""
OVERLAP = "OVERLAP_F_B"
MOST_SHOWN = 8
"""The most problems that an error lists."""
_ACTION = re.compile(rf"(\d{{1,6}})({'|'.join((*OF_STAGES, *MESSAGES, *COMPUTES))})(\d{{0,6}})", re.ASCII)
_PAIRED = re.compile(rf"\(([^()]*)\){OVERLAP}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Action:
    """One action of a rank. ``microbatch``: None for those of ``OF_STAGES``."""

    stage: int
    kind: str
    microbatch: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"


@dataclass(frozen=True, slots=True)
class AtOnce:
    """Computes that run at once."""

    actions: tuple[Action, ...]

    def __str__(self) -> str:
        return f"({';'.join(map(str, self.actions))}){OVERLAP}"


Cell: TypeAlias = Action | AtOnce


@dataclass(frozen=True)
class TorchSchedule:
    """The actions of each rank, in order; idle cells are left out."""

    rows: tuple[tuple[Cell, ...], ...]

    def __str__(self) -> str:
        return "".join(",".join(map(str, row)) + "\n" for row in self.rows)

    @property
    def form(self) -> Form:
        """The form that torch has to be told: with messages and collectives, or without."""
        return "compute_only" if all(a.kind in COMPUTES for _, a in self.actions()) else "compute_comms"

    @property
    def stages(self) -> int:
        return 1 + max((action.stage for _, action in self.actions()), default=-1)

    @property
    def microbatches(self) -> int:
        return 1 + max((a.microbatch for _, a in self.actions() if a.microbatch is not None), default=-1)

    def actions(self) -> Iterator[tuple[int, Action]]:
        """Yield every action with its rank, those that overlap one after another."""
        for rank, row in enumerate(self.rows):
            for cell in row:
                yield from (
                    (rank, action) for action in (cell.actions if isinstance(cell, AtOnce) else (cell,))
                )

    def stage_ranks(self) -> dict[int, int]:
        """Return the rank of each stage that computes: the first that does, as torch finds them."""
        ranks: dict[int, int] = {}
        for rank, action in self.actions():
            if action.kind in COMPUTES:
                ranks.setdefault(action.stage, rank)
        return ranks

    def problems(self) -> tuple[str, ...]:
        """Return the rules of torch's pipelines that it breaks. What is there twice torch does not see, and runs."""
        return (*self._misplaced(), *self._miscounted(), *self._disordered())

    def _misplaced(self) -> Iterator[str]:
        ranks: dict[int, list[int]] = defaultdict(list)
        for rank, action in self.actions():
            if rank not in ranks[action.stage]:
                ranks[action.stage].append(rank)
        for stage, found in ranks.items():
            if len(found) > 1:
                yield f"stage {stage} is on several ranks: {', '.join(map(str, found))}"
        empty = [rank for rank, row in enumerate(self.rows) if not row]
        if empty:
            yield f"{'rank' if len(empty) == 1 else 'ranks'} {', '.join(map(str, empty))} without an action"

    def _miscounted(self) -> Iterator[str]:
        times = Counter((a.stage, a.kind, a.microbatch) for _, a in self.actions())
        for (stage, kind, microbatch), count in times.items():
            if count > 1 and kind not in OF_STAGES:
                yield f"{stage}{kind}{microbatch} is there {count} times"
        owed, forwards = self.stages * self.microbatches, sum(kind == "F" for _, kind, _ in times)
        if owed > 2 * forwards:  # not each by its name: a file can write large numbers
            yield f"{counted(forwards, 'forward')} of {self.stages} stages × {self.microbatches} micro-batches = {owed:,}"
            return
        for stage in range(self.stages):
            for microbatch in range(self.microbatches):
                b, i, w = (times[stage, kind, microbatch] > 0 for kind in ("B", "I", "W"))
                if not times[stage, "F", microbatch]:
                    yield f"{stage}F{microbatch} is missing"
                if not (b or i or w):
                    yield f"backward of stage {stage}, micro-batch {microbatch} is missing"
                elif b and (i or w):
                    yield f"backward of stage {stage}, micro-batch {microbatch} is there whole and in halves"
                elif i != w:
                    yield f"{stage}{'W' if i else 'I'}{microbatch} is missing: the other half is there"

    def _disordered(self) -> Iterator[str]:
        before: set[tuple[int, str, int | None]] = set()
        for _, action in self.actions():
            first = {"B": "F", "I": "F", "W": "I"}.get(action.kind)
            if first is not None and (action.stage, first, action.microbatch) not in before:
                yield f"{action} comes before {action.stage}{first}{action.microbatch}"
            before.add((action.stage, action.kind, action.microbatch))


def schedule_of(plan: PlanData) -> TorchSchedule:
    """Return the order in which a plan's own programs compute: a row for each group of devices, in the pipeline's order."""
    programs = group_programs(plan).programs
    leaders = dict.fromkeys(min(stage.devices) for stage in plan.stages)
    return TorchSchedule(
        tuple(
            tuple(
                Action(instruction.segment, instruction.letter, instruction.microbatch)
                for instruction in programs[leader].instructions
                if isinstance(instruction, Forward | Backward | BackwardInput | BackwardWeight)
            )
            for leader in leaders
        )
    )


def read_csv(text: str) -> TorchSchedule:
    """Read a schedule of either form. Raises UsageError that names lines and cells."""
    problems: list[str] = []
    rows = []
    try:
        lines = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except csv.Error as error:
        raise UsageError("cannot read the schedule", [f"it is no CSV file: {error}"]) from error
    for number, line in enumerate(lines, 1):
        row: list[Cell] = []
        for place, cell in enumerate(line, 1):
            where = f"line {number}, cell {place}"
            try:
                found = _cell(cell.strip())
            except ValueError as error:
                problems.append(f"{where}: {error}")
                continue
            if found is not None:
                row.append(found)
        rows.append(tuple(row))
    while rows and not rows[-1]:  # an empty line at the end is no rank
        rows.pop()
    if not problems and not any(rows):
        problems.append("no action is there")
    if problems:
        left = len(problems) - MOST_SHOWN
        more = [f"and {counted(left, 'more cell')}"] if left > 0 else []
        raise UsageError(
            "cannot read the schedule",
            problems[:MOST_SHOWN] + more,
            ["cells are stage, action, micro-batch: 0F0, 1B2, 1RECV_F0, 0UNSHARD, (0F1;1B0)OVERLAP_F_B"],
        )
    return TorchSchedule(tuple(rows))


def _cell(text: str) -> Cell | None:
    """Return what a cell says; None where it is empty. Raises ValueError with what is wrong."""
    if not text:
        return None
    together = _PAIRED.fullmatch(text)
    if together is None:
        return _action(text)
    actions = tuple(_action(part.strip()) for part in together[1].split(";"))
    others = [str(action) for action in actions if action.kind not in COMPUTES]
    if others:
        raise ValueError(f"{others[0]} is no compute: only these overlap")
    return AtOnce(actions)


def _action(text: str) -> Action:
    shown = text if len(text) <= 40 else f"{text[:37]}..."
    match = _ACTION.fullmatch(text)
    if match is None:
        raise ValueError(f"{shown!r} is no action")
    stage, kind, microbatch = match.groups()
    if (kind in OF_STAGES) != (microbatch == ""):
        raise ValueError(f"{shown!r} {'has a' if microbatch else 'lacks its'} micro-batch")
    return Action(int(stage), kind, int(microbatch) if microbatch else None)
