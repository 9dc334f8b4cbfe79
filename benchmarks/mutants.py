"""Mutants of real programs: whatever the checker accepts must compute the same, in time.

    python -m benchmarks.mutants                     40 mutants of each plan
    python -m benchmarks.mutants --mutants 200 --seed 5 --plans tied,zero

Programs of several plans (pipelines with tied weights, halved backwards, free placements, meshes with scattered gradients)
are changed at random: two instructions swapped, one dropped, repeated, moved; a message sent elsewhere or on another queue;
a micro-batch renumbered; on one rank or wherever the same instruction stands. A mutant that the checker accepts runs on
local processes as ``verify`` runs the plan, with a time limit: what hangs, fails or differs is an escape.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cost_models.cluster import ClusterSpec
from cost_models.errors import InternalError, PartitionerError
from partitioner import Plan, partition
from partitioner.models.as_graph import as_graph
from partitioner.record.rebuild import plan_programs, plan_segments, plan_tied, ranks_in_order
from partitioner.verify import verify
from passes.graph.graph import OpGraph
from runtime.check.check import check
from runtime.program.program import Instruction, OptimizerStep, Program, Recv, ReduceGradients, Send
from runtime.ranks.launch import WorkerPool

LIMIT_SECONDS = 40.0
"""Seconds after which a mutant hangs: a step of these models takes well below one."""


START_SECONDS = 300.0
"""Seconds for the unchanged programs, which run first: processes start meanwhile."""


class Tied(nn.Module):
    """Tokens -> a loss; the embedding is the head, and a value skips a stage."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, width)
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.third, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(ids)
        y = self.second(F.gelu(self.first(x)))
        z = self.norm(self.third(y) + x)
        return F.cross_entropy((z @ self.embedding.weight.t()).flatten(0, 1), labels.flatten())


@dataclass(frozen=True, eq=False)
class Subject:
    """A plan whose programs are changed, and all that running it takes."""

    name: str
    plan: Plan
    model: nn.Module
    batch: dict[str, Tensor]
    graph: OpGraph

    @property
    def programs(self) -> tuple[Program, ...]:
        """The plan's own programs, on the ranks of a launch."""
        return plan_programs(self.plan, ranks_in_order(self.plan))


PLANS = {
    "tied": {"strategy": "layer", "pins": {"embedding": 0, "*first": 1, "norm": 2}, "schedule": "1f1b"},
    "halves": {"strategy": "layer", "pins": {"embedding": 0, "*second": 1, "norm": 2}, "schedule": "zb-h1"},
    "free": {"strategy": "free", "pins": {"embedding": 0, "first": 1, "second": 2, "third": 0, "norm": 1}},
    "data": {"strategy": "feature", "mesh": (2, 2), "pins": {"*": "data column_row"}},
    "zero": {"strategy": "feature", "mesh": (2, 2), "pins": {"*": "zero1 data"}},
}
"""Options of each plan; "zero": parameters' owners are spread, so that gradients are scattered."""


def subject(name: str) -> Subject:
    """Plan the model as ``PLANS`` says."""
    torch.manual_seed(0)
    model = Tied()
    ids = torch.randint(0, 16, (4, 3))
    batch = {"ids": ids, "labels": ids.flip(0)}
    options = dict(PLANS[name])
    cluster = ClusterSpec.local(4 if options["strategy"] == "feature" else 3)
    graph = as_graph(model, example_inputs=batch)
    plan = partition(
        model,
        cluster,
        example_inputs=batch,
        batch_size=8,
        microbatches=2,
        optimizer_memory="sgd",
        time_limit_seconds=3.0,
        **{"strategy": "layer", **options},
    )
    return Subject(name, plan, model, batch, graph)


# --------------------------------------------------------------------------------------------------
# Changes

Edit = Callable[[random.Random, list[list[Instruction]]], bool]
"""Change the instructions of all ranks in place; False if there is nothing to change."""


def _any(draw: random.Random, programs: list[list[Instruction]]) -> tuple[list[Instruction], int]:
    program = draw.choice([p for p in programs if p])
    return program, draw.randrange(len(program))


def _swap(draw: random.Random, programs: list[list[Instruction]]) -> bool:
    program, a = _any(draw, programs)
    b = draw.randrange(len(program))
    program[a], program[b] = program[b], program[a]
    return True


def _swap_neighbours(draw: random.Random, programs: list[list[Instruction]]) -> bool:
    program, a = _any(draw, programs)
    b = (a + 1) % len(program)
    program[a], program[b] = program[b], program[a]
    return True


def _swap_everywhere(draw: random.Random, programs: list[list[Instruction]]) -> bool:
    """Swap the same two instructions on every rank that has both."""
    program, a = _any(draw, programs)
    first, second = program[a], draw.choice(program)
    for other in programs:
        if first in other and second in other:
            i, j = other.index(first), other.index(second)
            other[i], other[j] = other[j], other[i]
    return True


def _swap_places_everywhere(draw: random.Random, programs: list[list[Instruction]]) -> bool:
    """Swap two places that hold sums of gradients on all ranks."""
    changed = False
    pair = draw.sample(range(4), 2)
    for program in programs:
        sums = [n for n, i in enumerate(program) if isinstance(i, ReduceGradients)]
        if len(sums) > max(pair):
            a, b = sums[pair[0]], sums[pair[1]]
            program[a], program[b] = program[b], program[a]
            changed = True
    return changed


def _drop(draw: random.Random, programs: list[list[Instruction]]) -> bool:
    program, a = _any(draw, programs)
    del program[a]
    return True


def _drop_everywhere(draw: random.Random, programs: list[list[Instruction]]) -> bool:
    program, a = _any(draw, programs)
    gone = program[a]
    message = getattr(gone, "message", None)
    for other in programs:
        other[:] = [
            i for i in other if i != gone and (message is None or getattr(i, "message", None) != message)
        ]
    return True


def _repeat(draw: random.Random, programs: list[list[Instruction]]) -> bool:
    program, a = _any(draw, programs)
    program.insert(draw.randrange(len(program) + 1), program[a])
    return True


def _move(draw: random.Random, programs: list[list[Instruction]]) -> bool:
    program, a = _any(draw, programs)
    program.insert(draw.randrange(len(program)), program.pop(a))
    return True


def _changed_everywhere(
    draw: random.Random,
    programs: list[list[Instruction]],
    change: Callable[[Instruction], Instruction | None],
) -> bool:
    """Change one instruction and, half the time, all that are equal to it or its other side."""
    program, a = _any(draw, programs)
    old = program[a]
    new = change(old)
    if new is None or new == old:
        return False
    if draw.random() < 0.5:
        program[a] = new
        return True
    message = getattr(old, "message", None)
    for other in programs:
        for n, i in enumerate(other):
            if i == old or (message is not None and getattr(i, "message", None) == message):
                other[n] = change(i) or i
    return True


def _retarget(draw: random.Random, programs: list[list[Instruction]]) -> bool:
    end, rank = draw.choice(["source", "target"]), draw.randrange(len(programs))
    ranks = tuple(sorted(draw.sample(range(len(programs)), 2)))

    def change(i: Instruction) -> Instruction | None:
        if isinstance(i, Send | Recv):
            return replace(i, message=i.message._replace(**{end: rank}))
        return replace(i, ranks=ranks) if isinstance(i, ReduceGradients) else None

    return _changed_everywhere(draw, programs, change)


def _requeue(draw: random.Random, programs: list[list[Instruction]]) -> bool:
    queues = sorted({i.queue for p in programs for i in p if isinstance(i, Send | Recv | ReduceGradients)})
    if not queues:
        return False
    queue = draw.choice([*queues, "p2p:0-9"])

    def change(i: Instruction) -> Instruction | None:
        return replace(i, queue=queue) if isinstance(i, Send | Recv | ReduceGradients) else None

    return _changed_everywhere(draw, programs, change)


def _renumber(draw: random.Random, programs: list[list[Instruction]]) -> bool:
    number = draw.randrange(2)

    def change(i: Instruction) -> Instruction | None:
        if isinstance(i, Send | Recv):
            return replace(i, message=i.message._replace(microbatch=number))
        if isinstance(i, ReduceGradients):
            return replace(i, scattered=not i.scattered, ranks=i.ranks[::-1] if number else i.ranks)
        if isinstance(i, OptimizerStep):
            return None
        return replace(i, microbatch=number) if draw.random() < 0.7 else replace(i, segment=i.segment ^ 1)

    return _changed_everywhere(draw, programs, change)


def _exchange(draw: random.Random, programs: list[list[Instruction]]) -> bool:
    """Exchange what two messages carry, on both sides: their micro-batches, values or directions."""
    messages = sorted({i.message for p in programs for i in p if isinstance(i, Send | Recv)})
    if len(messages) < 2:
        return False
    a, b = draw.sample(messages, 2)
    names = {a: b, b: a} if draw.random() < 0.5 else {a: b._replace(source=a.source, target=a.target)}
    for program in programs:
        for n, i in enumerate(program):
            if isinstance(i, Send | Recv) and i.message in names:
                program[n] = replace(i, message=names[i.message])
    return True


def _regroup(draw: random.Random, programs: list[list[Instruction]]) -> bool:
    """Sum the parameters of a bucket in another order, or in two buckets, on every rank."""
    sums = sorted({i for p in programs for i in p if isinstance(i, ReduceGradients)}, key=str)
    if not sums:
        return False
    chosen = draw.choice(sums)
    names = list(chosen.parameters)
    draw.shuffle(names)
    cut = draw.randrange(len(names) + 1)
    parts = [tuple(part) for part in (names[:cut], names[cut:]) if part]
    for program in programs:
        if chosen in program:
            at = program.index(chosen)
            program[at : at + 1] = [replace(chosen, parameters=part) for part in parts]
    return True


EDITS: dict[str, Edit] = {
    "swap": _swap,
    "swap neighbours": _swap_neighbours,
    "swap everywhere": _swap_everywhere,
    "swap sums": _swap_places_everywhere,
    "drop": _drop,
    "drop everywhere": _drop_everywhere,
    "duplicate": _repeat,
    "move": _move,
    "retarget": _retarget,
    "requeue": _requeue,
    "renumber": _renumber,
    "exchange": _exchange,
    "regroup": _regroup,
}


def mutant(subject: Subject, edit: str, seed: int) -> tuple[Program, ...] | None:
    """Change the subject's programs; None if nothing changed."""
    before = subject.programs
    instructions = [list(program.instructions) for program in before]
    if not EDITS[edit](random.Random(seed), instructions):
        return None
    found = tuple(replace(p, instructions=tuple(own)) for p, own in zip(before, instructions, strict=True))
    return None if found == before else found


def accepted(subject: Subject, programs: Sequence[Program]) -> bool:
    """Tell whether the checker accepts the programs for the subject's plan."""
    plan, ranks = subject.plan, ranks_in_order(subject.plan)
    try:
        check(
            programs,
            plan_segments(plan, ranks),
            plan.microbatches,
            tied=plan_tied(plan, ranks),
            optimizer=True,
        )
    except InternalError:
        return False
    return True


def wrong(
    subject: Subject, programs: tuple[Program, ...], pool: WorkerPool, seconds: float = LIMIT_SECONDS
) -> str | None:
    """Run the programs as ``verify`` does: what is wrong, or None where every number agrees."""
    plan = subject.plan
    try:
        with mock.patch.object(verify, "plan_programs", return_value=programs):
            found = verify.verify_plan(
                plan, subject.model, example_inputs=subject.batch, pool=pool, timeout_seconds=seconds
            )
    except PartitionerError as error:
        return f"{type(error).__name__}: {error.what} {error.because[:1]}"[:300]
    return None if found.passed else f"differs: {found.differences[0].kind} {found.differences[0].name}"


# --------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """Fates of the mutants."""

    refused: Counter[str] = field(default_factory=Counter)
    harmless: Counter[str] = field(default_factory=Counter)
    escapes: list[str] = field(default_factory=list)


def try_mutants(subject: Subject, count: int, seed: int, tally: Tally) -> None:
    """Make ``count`` mutants of a subject, and judge each."""
    names = list(EDITS)
    pool = None
    seen: set[tuple[Program, ...]] = set()
    try:
        for number in range(count):
            edit = names[number % len(names)]
            programs = mutant(subject, edit, seed + number)
            if programs is None or programs in seen:
                continue
            seen.add(programs)
            if not accepted(subject, programs):
                tally.refused[edit] += 1
                continue
            if pool is None:
                pool = WorkerPool(len(programs))
                fault = wrong(subject, subject.programs, pool, START_SECONDS)
                assert fault is None, f"{subject.name}, unchanged: {fault}"
            fault = wrong(subject, programs, pool)
            if fault is None:
                tally.harmless[edit] += 1
                continue
            tally.escapes.append(f"{subject.name}, {edit}, seed {seed + number}: {fault}")
            pool.close()
            pool = None
    finally:
        if pool is not None:
            pool.close()


def main() -> int:
    """Try the mutants of the command line; 1 if any escapes."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--mutants", type=int, default=40)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--plans", default=",".join(PLANS))
    given = options.parse_args()
    os.environ["PARTITIONER_CALIBRATION"] = "none"
    tally = Tally()
    for name in given.plans.split(","):
        try_mutants(subject(name), given.mutants, given.seed, tally)
        print(f"{name}: {tally.refused.total()} refused, {tally.harmless.total()} compute the same, "
              f"{len(tally.escapes)} escaped", flush=True)  # fmt: skip
    for edit in EDITS:
        print(f"{edit:18} {tally.refused[edit]:5} refused {tally.harmless[edit]:5} the same")
    for text in tally.escapes:
        print(text)
    return 1 if tally.escapes else 0


if __name__ == "__main__":
    sys.exit(main())
