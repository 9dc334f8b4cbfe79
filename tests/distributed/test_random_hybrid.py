"""Two hundred random pipelines of sharded stages: planned and proved, and fifty of them run on real processes in float64.

Models (``benchmarks.fuzz_models``) with skips, tied weights, experts, running statistics and frozen blocks are cut before
any ops; groups of one to four ranks run each op, and send each value, in any way that divides (``benchmarks.fuzz_hybrid``).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.fuzz_hybrid import random_layouts, random_pipeline
from benchmarks.fuzz_models import random_workload
from benchmarks.plan_tasks import plan_task
from partitioner import Plan, partition
from partitioner.models.as_graph import as_graph
from partitioner.models.workload import Workload
from partitioner.record.rebuild import plan_code, plan_segments, simulate_plan
from partitioner.verify.grow_batch import grow_batch
from partitioner.verify.verify import verify_plan
from passes.graph.graph import OpGraph
from passes.lower.lower import value_spec
from runtime.program.crossings import crossings
from runtime.ranks.launch import WorkerPool
from tests.distributed.free_tasks import count_sent

MODELS, PLANS, EXECUTED = 25, 8, 2
TOGETHER = 5
"""Models of one case."""
SEEN = (
    "boolean",
    "integer",
    "without gradient",
    "read by several",
    "past a stage",
    "two axes",
    "tied",
    "buffer",
    "sent back in parts of a sum",
)
"""What must cross, or be there, in some of the plans of one model."""


class Everything(nn.Module):
    """ids [b, 3] -> scores [b, 3, 12]: what is chosen, compared and averaged at the beginning is used at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(12, 12), nn.LayerNorm(12)
        self.up, self.down, self.last = nn.Linear(12, 24), nn.Linear(24, 12), nn.Linear(12, 12)
        self.running: Tensor
        self.register_buffer("running", torch.zeros(12))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        y = self.norm(x)
        order, mask, kept = y.argsort(-1), y > 0, y.detach().square()
        y = self.down(F.gelu(self.up(y))) + x
        self.running.lerp_(y.detach().mean((0, 1)), 0.25)
        y = torch.where(mask, y.gather(-1, order), y - self.running) + kept
        y = self.last(y.tanh()) + x + y.gather(-1, order) * mask
        return y @ self.embedding.weight.t()  # type: ignore[no-any-return]


def everything() -> Workload:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Workload(
            Everything(), torch.randint(12, (4, 3)), lambda y, ids: (y.softmax(-1) ** 2).mean(), "everything"
        )


def test_values_of_every_kind_cross_between_groups(pool: WorkerPool) -> None:
    assert set(SEEN) <= compared(everything(), 1, pool, plans=12, executed=4)


@pytest.mark.matrix
@pytest.mark.parametrize("first", range(0, MODELS, TOGETHER))
def test_any_pipeline_computes_what_the_model_computes(first: int, pool: WorkerPool) -> None:
    for number in range(first, first + TOGETHER):
        compared(random_workload(number), 100 * number, pool, plans=PLANS, executed=EXECUTED)


def compared(workload: Workload, seed: int, pool: WorkerPool, *, plans: int, executed: int) -> set[str]:
    """Plan and prove; rebuild, simulate; run some, and count what they send. Name what was in the plans."""
    graph, seen = as_graph(workload), set[str]()
    for number in range(plans):
        plan = planned(graph, seed + number)
        again = Plan.from_json(plan.model_dump_json())
        assert again == plan
        seen.update(kinds(again, graph))
        sends_what_it_simulates(again)
        if number < executed:
            verify_plan(again, workload, pool=pool, graph=graph).raise_if_different()
            sends_what_it_says(again, workload, graph, pool)
    return seen


def planned(graph: OpGraph, seed: int) -> Plan:
    """Plan a pipeline of a seed. Planning proves the programs (``runtime.check``)."""
    draw = random.Random(seed)
    cluster, options = random_pipeline(draw, graph)
    with random_layouts(draw):
        return partition(graph, cluster, **{"strategy": "layer", **options})


def sends_what_it_simulates(plan: Plan) -> None:
    """The step that is rebuilt from the file is the one that was planned, and sends every piece once a micro-batch."""
    simulated = simulate_plan(plan)
    assert simulated.step_seconds == pytest.approx(plan.prediction.step_seconds, rel=1e-12)
    segments, expected = plan_segments(plan), Counter[tuple[int, int]]()
    for value in segments.values:
        for way in crossings(segments, value):
            for piece in (*way.there, *way.back):
                if piece.source != piece.target:
                    expected[piece.source, piece.target] += piece.size_bytes * plan.microbatches
    assert simulated.message_bytes == pytest.approx(dict(expected))


def sends_what_it_says(plan: Plan, workload: Workload, graph: OpGraph, pool: WorkerPool) -> None:
    """The bytes that process groups are given to send, of a batch of as many samples as the plan has."""
    samples = plan.batch_size
    batch = grow_batch(workload.example_inputs, graph.batch.batch_dims, workload.model, samples)
    full = Workload(workload.model, batch, workload.loss_fn, workload.name)
    task = plan_task(plan, full, graph)
    sent = Counter[tuple[int, int]]()
    for part in pool.run(count_sent, task, world_size=plan.world_size, timeout_seconds=60):
        sent.update(part)
    assert dict(sent) == pytest.approx(dict(simulate_plan(plan).message_bytes))


def kinds(plan: Plan, graph: OpGraph) -> Iterator[str]:
    """Name what is in a plan."""
    segments, code = plan_segments(plan), plan_code(plan, graph)
    groups = [segment.ranks for segment in segments.segments]
    for value in segments.values:
        spec = value_spec(graph, value.name)
        yield {torch.bool: "boolean", torch.int64: "integer"}.get(spec.dtype, "real")
        if spec.dtype.is_floating_point and not value.needs_grad:
            yield "without gradient"
        if len({groups[consumer] for consumer in value.consumers}) > 1:
            yield "read by several"
        if max(value.consumers) > value.producer + 1:
            yield "past a stage"
    for own in code.sharded.values():
        if len(own.mesh.shape) > 1:
            yield "two axes"
        if own.placement.returned:
            yield "sent back in parts of a sum"
        if own.graph.buffers:
            yield "buffer"
        if own.shared:
            yield "tied"
