"""Pipelines whose stages are sharded, on real processes: the loss and every gradient are one process's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cost_models.cluster import ClusterSpec
from cost_models.layout import Shard
from cost_models.precision import ParameterPrecision, Precision
from passes.copies.float64 import float64_by_default
from passes.costs.costs import costs_of
from passes.graph.blocks import block_of
from passes.graph.graph import OpGraph
from passes.lower.candidate import Candidate
from passes.lower.job import Job
from passes.lower.placed_graph import on_meshes
from passes.lower.realize import realize
from passes.trace.trace import trace
from runtime.check.check import check
from runtime.execute.context import RankProgram
from runtime.execute.execute import Executor
from runtime.mesh.sharding import Sharding
from runtime.program.program import Program, SegmentGraph
from runtime.ranks.launch import WorkerPool
from runtime.segment.code import BatchSpec, SegmentCode
from runtime.state.rank_state import RankState
from runtime.state.sharded_owners import sharded_leaf_and_owner
from runtime.state.step_precision import StepPrecision
from tests.distributed.sharded_models import BATCH, COLUMN_ROW, SEQUENCE, ZERO1, ZERO3, Gpt, gpt_batch
from tests.distributed.stages import Group, staged
from tests.support.matrix import thinned

SAMPLES, MICROBATCHES, STEPS = 12, 2, 2


@dataclass(frozen=True)
class Task:
    """The work of the ranks."""

    programs: tuple[Program, ...]
    codes: Mapping[int, SegmentCode]
    segments: SegmentGraph
    specs: tuple[BatchSpec, ...]
    shardings: Mapping[str, Sharding]
    state: Mapping[str, Tensor]
    trained: frozenset[str]
    batch: Mapping[str, Tensor]


@cache
def graph() -> OpGraph:
    with float64_by_default():
        return trace(Gpt(tied=False).double(), gpt_batch(SAMPLES), loss_reduction="mean")


def model() -> Gpt:
    torch.manual_seed(0)
    return Gpt(tied=False).double()


def executor_of(task: Task, timeout_seconds: float) -> tuple[Executor, RankState]:
    """In a worker: this rank's executor, and what it holds."""
    rank = dist.get_rank()
    held = {
        name
        for index, code in task.codes.items()
        if rank in task.segments.segments[index].ranks
        for name in code.held
    }
    leaves: dict[str, Tensor] = {}
    owners = {}
    for name in sorted(held):
        value = task.shardings[name].leaf_block(task.state[name].shape, rank).of(task.state[name]).clone()
        types = ParameterPrecision.plain(value.dtype)
        leaves[name], owners[name] = sharded_leaf_and_owner(value, types, True, task.shardings[name], rank)
    shardings = {name: task.shardings[name] for name in held}
    holders = {name: sharding.mesh.ranks for name, sharding in shardings.items()}
    state = RankState(rank, leaves, owners, {}, holders, shardings)
    executor = Executor(
        RankProgram(
            task.programs,
            rank,
            task.codes,
            task.segments,
            state.leaves,
            task.specs[rank],
            shardings=shardings,
        ),
        timeout_seconds=timeout_seconds,
    )
    return executor, state


def run_task(task: Task) -> tuple[Tensor | None, dict[str, Tensor]]:
    """In a worker: a step, twice; the part of the loss, and the gradients that this rank trains with."""
    executor, state = executor_of(task, timeout_seconds=20)
    precision = StepPrecision(state, Precision(), executor.collectives, executor.sharded_owners(state))
    with float64_by_default():
        for _ in range(STEPS):
            loss = executor.train_step(task.batch, MICROBATCHES)
            precision.after_backward()
    left = [tensor for binder, _ in executor._training._bound.values() for tensor in binder.leaves]
    assert not any(tensor is not None for tensor in left), "values outlive their step"
    executor.close()
    return loss, {name: parameter.grad for name, parameter in state.parameters.items()}  # type: ignore[misc]


H1 = ("h.1",)
THREE = ("h.1", "norm")
FOUR = ("h.0.up", "h.1", "h.1.up")
CASES: dict[str, tuple[tuple[str, ...], tuple[Group, ...], str]] = {
    "2+2 by samples": (H1, (Group(2, BATCH, Shard(0)), Group(2, BATCH, Shard(0))), "1f1b"),
    "2+2 columns and rows, whole": (H1, (Group(2, COLUMN_ROW), Group(2, COLUMN_ROW)), "gpipe"),
    "2+2 split along other dimensions": (
        H1,
        (Group(2, COLUMN_ROW, Shard(2)), Group(2, COLUMN_ROW, Shard(1))),
        "zb-h1",
    ),
    "1+3": (H1, (Group(1, BATCH), Group(3, BATCH, Shard(0))), "1f1b"),
    "3+1": (H1, (Group(3, BATCH, Shard(0)), Group(1, BATCH)), "gpipe"),
    "2+1+1": (THREE, (Group(2, COLUMN_ROW, Shard(0)), Group(1, BATCH), Group(1, BATCH)), "1f1b"),
    "1+2 whole, of which one sends the gradient": (H1, (Group(1, BATCH), Group(2, COLUMN_ROW)), "1f1b"),
    "2+2 from parts that are no stretch": (
        H1,
        (Group(2, COLUMN_ROW, Shard(2)), Group(2, COLUMN_ROW)),
        "gpipe",
    ),
    "2+2 interleaved": (FOUR, (Group(2, BATCH, Shard(0)), Group(2, COLUMN_ROW)), "interleaved"),
    "2+2 zero": (H1, (Group(2, ZERO3, Shard(0)), Group(2, ZERO1, Shard(0))), "1f1b"),
}


SHOWN = [
    "2+2 split along other dimensions",
    "1+3",
    "2+1+1",
    "2+2 from parts that are no stretch",
    "2+2 interleaved",
]


@pytest.mark.parametrize("case", thinned(CASES, SHOWN))
def test_a_step_equals_one_process(pool: WorkerPool, case: str) -> None:
    borders, groups, schedule = CASES[case]
    equals_one_process(pool, staged(graph(), borders, groups, schedule, MICROBATCHES))


AGAIN: dict[str, tuple[tuple[str, ...], tuple[Group, ...], str]] = {
    "columns and rows": (H1, (Group(2, COLUMN_ROW), Group(2, COLUMN_ROW)), "1f1b"),
    "zero 3, and its halves apart": (H1, (Group(2, ZERO3, Shard(0)), Group(2, ZERO3, Shard(0))), "zb-h1"),
    "sequences, 3 ranks beside 1": (H1, (Group(3, BATCH, Shard(0)), Group(1, BATCH)), "1f1b"),
    "blocks of two stages": (FOUR, (Group(2, BATCH, Shard(0)), Group(2, SEQUENCE)), "interleaved"),
}


@pytest.mark.parametrize("case", thinned(AGAIN, ["zero 3, and its halves apart", "blocks of two stages"]))
def test_blocks_computed_again_on_meshes(pool: WorkerPool, case: str) -> None:
    """Each stage computes its blocks a second time, all ranks of its mesh together."""
    borders, groups, schedule = AGAIN[case]
    kept = staged(graph(), borders, groups, schedule, MICROBATCHES)
    equals_one_process(pool, again_everywhere(kept))


def again_everywhere(kept: Candidate) -> Candidate:
    """Return a candidate whose stages compute their blocks a second time."""
    blocks = [
        tuple(sorted({block for op, block in block_of(graph()).items() if kept.stage_of.get(op) == stage}))
        for stage in range(len(kept.groups))
    ]
    assert {block for own in blocks for block in own} == {"h.0", "h.1"}
    return replace(kept, recomputed_blocks=tuple(blocks))


def task_of(candidate: Candidate) -> Task:
    """Make the work of a candidate's ranks, its programs proved."""
    world = len({rank for group in candidate.groups for rank in group})
    cluster = ClusterSpec.local(world)
    realized = realize(graph(), costs_of(graph(), cluster), cluster, Job(SAMPLES), candidate)
    proof = check(realized.programs, realized.segments, MICROBATCHES, tied=realized.tied)
    assert proof.messages == realized.simulation.message_count > 0
    placed = on_meshes(graph(), realized.segmentation, candidate.shardings)
    codes = placed.lowered()
    for stage, blocks in enumerate(candidate.recomputed_blocks):
        assert len(codes[stage].recomputed) == len(blocks)
    return Task(
        realized.programs,
        codes,
        realized.segments,
        tuple(placed.batch_of(rank) for rank in range(world)),
        placed.shardings,
        {name: tensor.clone() for name, tensor in model().state_dict().items()},
        graph().trained,
        gpt_batch(SAMPLES),
    )


def equals_one_process(pool: WorkerPool, candidate: Candidate) -> None:
    """Run a candidate, and compare with one process."""
    task, reference = task_of(candidate), model()
    results: list[Any] = pool.run(run_task, task, world_size=len(task.programs), timeout_seconds=90)
    expected = torch.zeros((), dtype=torch.float64)
    for parts in zip(*(leaf.chunk(MICROBATCHES) for leaf in task.batch.values()), strict=True):
        loss = reference(**dict(zip(task.batch, parts, strict=True))) / MICROBATCHES
        loss.backward()
        expected += loss.detach()
    torch.testing.assert_close(
        sum(loss for loss, _ in results if loss is not None), expected, rtol=1e-10, atol=0
    )
    whole = {name: parameter.grad for name, parameter in reference.named_parameters()}
    found = set()
    for rank, (_, gradients) in enumerate(results):
        for name, gradient in gradients.items():
            found.add(name)
            part = task.shardings[name].owner_block(whole[name].shape, rank).of(whole[name])  # type: ignore[union-attr]
            torch.testing.assert_close(
                gradient, part, rtol=1e-9, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}"
            )
    assert found == whole.keys()
