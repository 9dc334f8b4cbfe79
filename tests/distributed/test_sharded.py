"""Models on meshes, with forced placements, against the same models in one process: float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cost_models.layout import Mesh, Placement
from passes.double import float64_by_default
from passes.graph import OpGraph
from passes.lower import lower
from passes.segment import on_mesh
from passes.shard_graph import Sharded, shard_graph
from passes.shard_program import gradient_sums, sharded_programs, sharded_segments
from passes.trace import trace
from passes.verify_graph import verify_graph
from runtime.check import check
from runtime.execute import Executor
from runtime.launch import WorkerPool
from runtime.mesh_axes import part_of
from runtime.program import Program, SegmentCost, SegmentGraph
from runtime.segment_code import BatchSpec, SegmentCode
from tests.distributed.sharded_models import (
    BATCH,
    COLUMN_ROW,
    SEQUENCE,
    VOCABULARY,
    ZERO3,
    Forced,
    Gpt,
    Mlp,
    gpt_batch,
    mlp_batch,
    place,
)

SAMPLES, MICROBATCHES, STEPS = 8, 2, 2


@dataclass(frozen=True)
class Task:
    """What a worker runs."""

    programs: tuple[Program, ...]
    codes: Mapping[int, SegmentCode]
    segments: SegmentGraph
    spec: BatchSpec
    mesh: Mesh
    stored: Mapping[str, tuple[Placement, ...]]
    state: Mapping[str, Tensor]
    trained: frozenset[str]
    batch: Mapping[str, Tensor]


def run_task(task: Task) -> dict[str, Any]:
    """Some steps in a worker: losses, and local gradients and parameters at the end."""
    rank = dist.get_rank()
    state: dict[str, Tensor] = {}
    for name, whole in task.state.items():
        part = part_of(whole, task.stored[name], task.mesh, rank).contiguous().clone()
        state[name] = nn.Parameter(part) if name in task.trained else part
    executor = Executor(task.programs[rank], task.codes, task.segments, state, task.spec, timeout_seconds=20)
    optimizer = torch.optim.AdamW([t for t in state.values() if t.requires_grad], lr=1e-2)
    losses = []
    with float64_by_default():
        for _ in range(STEPS):
            sums = executor.run_step(task.batch, MICROBATCHES, optimizer)
            losses.append(sums.loss)
    executor.close()
    return {
        "losses": losses,
        "gradients": {n: t.grad for n, t in state.items() if n in task.trained},
        "state": {n: t.detach() for n, t in state.items()},
    }


def reference(model: nn.Module, batch: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for pieces in zip(*(batch[n].chunk(MICROBATCHES) for n in batch), strict=True):
            loss = model(*pieces) / MICROBATCHES
            loss.backward()
            total += loss.detach()
        optimizer.step()
        losses.append(total)
    return {
        "losses": losses,
        "gradients": {n: p.grad for n, p in model.named_parameters()},
        "state": {n: t.detach() for n, t in model.state_dict().items()},
    }


def sharded_of(
    model: nn.Module, batch: Mapping[str, Tensor], mesh: Mesh, forced: tuple[Forced, ...]
) -> Sharded:
    with float64_by_default():
        graph: OpGraph = trace(model, dict(batch), loss_reduction="mean")
    sharded = shard_graph(graph, place(graph, mesh, forced, MICROBATCHES))
    verify_graph(sharded.graph, "shard")
    return sharded


def run_sharded(pool: WorkerPool, model: nn.Module, batch: Mapping[str, Tensor], sharded: Sharded) -> None:
    mesh, graph = sharded.mesh, sharded.graph
    programs = sharded_programs(sharded, MICROBATCHES, len(mesh.ranks))
    segments = sharded_segments(sharded, SegmentCost(1.0, 1.0, 1.0), len(mesh.ranks))
    check(programs, segments, MICROBATCHES, tied=gradient_sums(sharded))
    names = (*graph.parameters, *graph.buffers)
    state = {name: model.state_dict()[name].clone() for name in names}
    whole = (*sharded.placement.stored.values(),)[0]
    task = Task(
        programs,
        lower(graph, on_mesh(graph, mesh)),
        segments,
        graph.batch,
        mesh,
        {name: sharded.placement.stored.get(name, whole) for name in names},
        state,
        graph.trained,
        batch,
    )
    results = pool.run(run_task, task, world_size=len(mesh.ranks), timeout_seconds=60)
    expected = reference(model, batch, graph.aliases)
    for step in range(STEPS):
        total = sum(result["losses"][step] for result in results)
        torch.testing.assert_close(total, expected["losses"][step], rtol=1e-10, atol=1e-12)
    for rank, result in enumerate(results):
        for kind in ("gradients", "state"):
            for name, found in result[kind].items():
                part = part_of(expected[kind][name], task.stored[name], mesh, rank)
                torch.testing.assert_close(found, part, rtol=1e-8, atol=1e-10, msg=f"{kind} of {name}")


TWO, FOUR = Mesh((0, 1), (2,), ("tensor",)), Mesh((0, 1, 2, 3), (2, 2), ("data", "tensor"))

CASES: dict[str, tuple[str, Mesh, tuple[Forced, ...]]] = {
    "mlp batch": ("mlp", TWO, (BATCH,)),
    "mlp column row": ("mlp", TWO, (COLUMN_ROW,)),
    "mlp zero 3": ("mlp", TWO, (ZERO3,)),
    "mlp batch and column row": ("mlp", FOUR, (BATCH, COLUMN_ROW)),
    "mlp zero 3 and column row": ("mlp", FOUR, (ZERO3, COLUMN_ROW)),
    "gpt batch": ("gpt", TWO, (BATCH,)),
    "gpt column row": ("gpt", TWO, (COLUMN_ROW,)),
    "gpt sequence": ("gpt", TWO, (SEQUENCE,)),
    "gpt vocabulary": ("gpt", TWO, (VOCABULARY,)),
    "gpt zero 3": ("gpt", TWO, (ZERO3,)),
    "gpt batch and column row": ("gpt", FOUR, (BATCH, COLUMN_ROW)),
    "gpt zero 3 and sequence": ("gpt", FOUR, (ZERO3, SEQUENCE)),
    "gpt batch and vocabulary": ("gpt", FOUR, (BATCH, VOCABULARY)),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_one_process(pool: WorkerPool, case: str) -> None:
    kind, mesh, forced = CASES[case]
    torch.manual_seed(0)
    model = (Mlp() if kind == "mlp" else Gpt()).double()
    batch = mlp_batch(SAMPLES) if kind == "mlp" else gpt_batch(SAMPLES)
    run_sharded(pool, model, batch, sharded_of(model, batch, mesh, forced))
