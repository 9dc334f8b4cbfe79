"""A CSV file of torch.distributed.pipelining by itself: a plan's order out, others' orders in, with what they wait for."""

from __future__ import annotations

import re
from collections.abc import Iterator

from cost_models.units import counted
from partitioner.formats.from_plan import parallelism_of
from partitioner.formats.parallelism import Parallelism
from partitioner.formats.schedule_csv import COMPUTES, TorchSchedule, read_csv, schedule_of
from partitioner.formats.schedule_waits import waits_of
from partitioner.formats.tool import Tool, Understood, Written, cannot_express
from partitioner.formats.torchtitan import NAMED
from partitioner.record.data import PlanData
from runtime.schedules import SCHEDULES, Schedule

TITLE = "torch.distributed.pipelining"


def write(plan: PlanData) -> Written:
    """Write the order in which a plan's groups of devices compute."""
    p = parallelism_of(plan)
    if p.pipeline == 1:
        raise cannot_express(TITLE, ["it has one group of devices: there is nothing to order"], "pipeline=…")
    name = f'; torch has the same order as "{NAMED[p.schedule]}"' if p.schedule in NAMED else ""
    note = f'_PipelineScheduleRuntime(…)._load_csv("{p.schedule}.csv") takes it{name}'
    return Written({f"{p.schedule}.csv": str(schedule_of(plan))}, (note,))


def read(text: str, devices: int) -> Understood:
    """Read a schedule of either form. What hangs, and rules that it breaks, are its problems."""
    schedule = read_csv(text)
    ranks, stages = len(schedule.rows), schedule.stages
    problems = list(_problems(schedule, devices))
    name = named(schedule)
    notes = [
        "a schedule says nothing of samples and of devices that share a stage: planned as replicas, a sample each"
    ]
    if name is None:
        notes.append("torch and this planner have no name for its order: planned with the list scheduler's")
    if not problems:
        circle = waits_of(schedule).hangs_on_nccl
        if circle:
            notes.append(f"on NCCL it may hang, if messages are larger than its buffers: {'; '.join(circle)}")
    return Understood(
        Parallelism(
            pipeline=ranks,
            chunks=max(1, stages // ranks),
            data=max(1, devices // ranks),
            microbatches=max(1, schedule.microbatches),
            schedule=name or "list",
        ),
        tuple(problems),
        tuple(notes),
    )


def _problems(schedule: TorchSchedule, devices: int) -> Iterator[str]:
    """Yield the rules that it breaks, and why it does not end."""
    ranks = len(schedule.rows)
    if devices % ranks:
        yield f"{counted(devices, 'device')} are no multiple of its {counted(ranks, 'rank')}"
    if schedule.stages % ranks:
        yield f"{counted(schedule.stages, 'stage')} on {counted(ranks, 'rank')}: no multiple"
    broken = schedule.problems()
    yield from broken
    if not broken:
        waits = waits_of(schedule)
        yield from (f"torch refuses it: {text}" for text in waits.refused)
        yield from waits.fails
        yield from (f"it hangs: {text}" for text in waits.hangs)


def named(schedule: TorchSchedule) -> str | None:
    """Return the published schedule whose order this is, messages aside; None if it is another one."""
    ranks, stages, microbatches = len(schedule.rows), schedule.stages, schedule.microbatches
    order: list[list[str]] = [[] for _ in range(ranks)]
    for rank, action in schedule.actions():
        if action.kind in COMPUTES:
            order[rank].append(str(action))
    if sum(map(len, order)) < 2 * stages * microbatches:
        return None
    for name, published in SCHEDULES.items():
        if name.startswith("list") or published.check(stages, ranks, microbatches) is not None:
            continue
        if all(
            row == published_row(published, rank, stages, ranks, microbatches)
            for rank, row in enumerate(order)
        ):
            return name
    return None


def published_row(schedule: Schedule, rank: int, stages: int, ranks: int, microbatches: int) -> list[str]:
    """Return what a rank does under a published schedule, in torch's words."""
    own = schedule.stages_at(rank, stages, ranks)
    steps = schedule.steps(rank, ranks, stages // ranks, microbatches)
    return [f"{own[chunk]}{kind}{microbatch}" for kind, chunk, microbatch in steps]


def is_mine(source: str, text: str) -> bool:
    """Tell a file by its first cell that holds something: a stage, what it does, a micro-batch."""
    first = text.lstrip(" ,\r\n")[:80].partition(",")[0]
    return source.endswith(".csv") and re.match(r"\(?\d+(F|UNSHARD|SEND_F|RECV_F)\d*", first) is not None


TOOL = Tool(TITLE, write=write, read=read, is_mine=is_mine)
