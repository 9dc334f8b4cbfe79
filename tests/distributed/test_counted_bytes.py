"""What workers of a plan send, counted while they train, is what the plan says: in all, per pair of ranks, per link."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cost_models.cluster import ClusterSpec
from partitioner import Plan, partition
from partitioner.record.rebuild import plan_code, plan_programs, plan_segments
from passes.copies.float64 import float64_by_default
from passes.costs.costs import costs_of
from passes.graph.blocks import regions_of
from passes.graph.graph import OpGraph
from passes.lower.job import Job
from passes.search.feature.evaluate import evaluate
from passes.search.feature.setting import Setting
from passes.trace.trace import trace
from runtime.execute.reduce import GradientReduction
from runtime.mesh.axis import Axis
from runtime.ranks.launch import WorkerPool
from tests.distributed.sharded_models import Gpt, Mlp, gpt_batch, mlp_batch
from tests.distributed.test_sharded import MICROBATCHES, SAMPLES, STEPS, Task, run_task
from tests.support.matrix import thinned

Pairs = dict[tuple[int, int], float]

CASES: dict[str, tuple[str, tuple[int, ...], dict[str, str]]] = {
    "gpt data": ("gpt", (2,), {"*": "data"}),
    "gpt zero 1": ("gpt", (2,), {"*": "zero1"}),
    "gpt zero 3": ("gpt", (2,), {"*": "zero3"}),
    "gpt vocabulary": ("gpt", (2,), {"*": "vocabulary"}),
    "gpt data and column row": ("gpt", (2, 2), {"*": "data column_row"}),
    "mlp zero 1 and column row": ("mlp", (2, 2), {"*": "zero1 column_row"}),
    "gpt as searched": ("gpt", (2, 2), {}),
    "gpt zero 3, blocks again": ("gpt", (2,), {"*": "zero3"}),
    "gpt zero 3, gathered again": ("gpt", (2,), {"*": "zero3"}),
    "gpt zero 3 and column row, gathered again": ("gpt", (2, 2), {"*": "zero3 column_row"}),
    "gpt sequence, gathered again": ("gpt", (2,), {"*": "sequence"}),
    "gpt sequence, blocks again": ("gpt", (2,), {"*": "sequence"}),
    "gpt data and column row, blocks again": ("gpt", (2, 2), {"*": "data column_row"}),
    "gpt as searched, blocks again": ("gpt", (2, 2), {}),
}


def cluster(devices: int) -> ClusterSpec:
    """CPUs that compute slowly and send fast."""
    device = {"kind": "cpu", "memory": "1GiB", "memory_bandwidth": 1e9, "flops": {"float64": 1e9}}
    links = {"default": {"bandwidth": "10GB/s", "latency": 0.0}}
    return ClusterSpec.from_dict(
        {"nodes": [{"name": "n", "count": devices, "device": device, "links": links}]}
    )


def count_sent(task: Task) -> Pairs:
    """In a worker: bytes to each next rank of a ring, by what the ring algorithm of each collective sends."""
    sent: Pairs = defaultdict(float)
    here = dist.get_rank()
    own = {
        (kind, name): getattr(kind, name)
        for kind, names in (
            (Axis, ("start_sum", "all_reduce", "start_gather", "start_sum_part", "exchange")),
            (GradientReduction, ("start",)),
        )
        for name in names
    }

    def note(ranks: list[int], factor: float, whole_bytes: float) -> None:
        following = ranks[(ranks.index(here) + 1) % len(ranks)]
        sent[here, following] += factor * (len(ranks) - 1) / len(ranks) * whole_bytes

    def ranks_of(axis: Axis) -> list[int]:
        members = sorted(dist.get_process_group_ranks(axis.group))
        return members if axis.order is None else [members[place] for place in axis.order]

    def counted(name: str, whole_bytes: Callable[..., float | None], factor: float) -> None:
        def run(self: Axis, *args: Any, **options: Any) -> Any:
            size = whole_bytes(self, *args)
            if size is not None:
                note(ranks_of(self), factor, size)
            return own[Axis, name](self, *args, **options)

        setattr(Axis, name, run)

    counted("start_sum", lambda axis, x: x.nbytes, 2.0)
    # A sum among these is made by start_sum.
    counted("all_reduce", lambda axis, x, op="sum", *_: None if op == "sum" else x.nbytes, 2.0)
    counted("start_gather", lambda axis, parts, x: parts.nbytes, 1.0)
    counted("start_sum_part", lambda axis, part, parts: parts.nbytes, 1.0)
    counted("exchange", lambda axis, x, *_: x.nbytes, 1.0)

    def start(self: GradientReduction, all_reduce: Callable[[Tensor], Any]) -> Any:
        ranks = list(task.programs[here].instructions[self.position].ranks)  # type: ignore[union-attr]

        def noted(flat: Tensor) -> Any:
            note(ranks, 2.0, flat.nbytes)
            return all_reduce(flat)

        return own[GradientReduction, "start"](self, noted)

    GradientReduction.start = start  # type: ignore[method-assign]
    try:
        run_task(task)
    finally:
        for (kind, name), method in own.items():
            setattr(kind, name, method)
    return dict(sent)


def task_of(plan: Plan, graph: OpGraph, model: nn.Module, batch: dict[str, Tensor]) -> Task:
    code = plan_code(plan, graph)
    return Task(
        plan_programs(plan),
        code.lowered(),
        plan_segments(plan),
        code.batch_of(0),
        code.shardings,
        {n: model.state_dict()[n].clone() for n in (*code.graph.parameters, *code.graph.buffers)},
        code.graph.trained,
        batch,
    )


SHOWN = [
    "gpt zero 3",
    "gpt vocabulary",
    "mlp zero 1 and column row",
    "gpt as searched",
    "gpt zero 3, gathered again",
    "gpt data and column row, blocks again",
]


@pytest.mark.parametrize("case", thinned(CASES, SHOWN))
def test_workers_send_what_the_plan_counts(pool: WorkerPool, case: str) -> None:
    kind, mesh, pins = CASES[case]
    torch.manual_seed(0)
    model, batch = (
        (Gpt().double(), gpt_batch(SAMPLES)) if kind == "gpt" else (Mlp().double(), mlp_batch(SAMPLES))
    )
    with float64_by_default():
        graph = trace(model, dict(batch), loss_reduction="mean")
    ranks = 2 ** len(mesh)
    machine = cluster(ranks)
    plan = partition(
        graph,
        machine,
        batch_size=SAMPLES,
        microbatches=MICROBATCHES,
        strategy="feature",
        pins=pins,
        mesh=mesh,
        recompute="gathers" if "gathered again" in case else "full" if "again" in case else None,
    )
    assert len(plan.stages[0].recomputed_blocks) == (
        1 if "gathered again" in case else 2 if "again" in case else 0
    )
    results = pool.run(count_sent, task_of(plan, graph, model, batch), world_size=ranks, timeout_seconds=60)
    sent = {pair: size / STEPS for result in results for pair, size in result.items()}
    simulation = plan.simulate()
    assert sent == pytest.approx(simulation.pair_bytes, rel=1e-12)
    assert per_link(sent, machine) == pytest.approx(simulation.link_bytes, rel=1e-12)
    assert sum(sent.values()) == pytest.approx(plan.prediction.communication_bytes, abs=1.0)
    assert sum(sent.values()) > 0
    assert sum(sent.values()) / ranks == pytest.approx(searched_bytes(plan, graph), rel=1e-12)
    assert sum(sent.values()) / ranks == pytest.approx(recorded_bytes(plan), rel=1e-12)


def per_link(sent: Pairs, machine: ClusterSpec) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for (source, target), size in sent.items():
        for link in machine.path(source, target).links:
            found[link] += size
    return dict(found)


def searched_bytes(plan: Plan, graph: OpGraph) -> float:
    """By each rank in a step, as the search counts its placement."""
    (stage,) = plan.stages
    assert stage.sharding is not None
    placement = stage.sharding.placement(stage.devices, plan.microbatches)
    job = Job(plan.batch_size, plan.optimizer_memory, plan.precision)
    setting = Setting(plan.cluster, job, again=regions_of(graph, stage.recomputed_blocks))
    return evaluate(graph, costs_of(graph, plan.cluster), placement, setting).communication_bytes


def recorded_bytes(plan: Plan) -> float:
    """By each rank in a step: collectives inside, sums of gradients, gathers after the update, as the plan lists them."""
    (stage,) = plan.stages
    assert stage.sharding is not None
    axes = stage.sharding.axes
    total = sum(item.sent_bytes for item in stage.sharding.collectives) * plan.microbatches
    for item in stage.sharding.sums:
        ranks = 1
        for name in item.axes:
            ranks *= axes[name]
        total += (1 if item.scattered else 2) * (ranks - 1) / ranks * sum(item.size_bytes)
    for gather in stage.sharding.gathers:
        total += (axes[gather.axis] - 1) / axes[gather.axis] * gather.size_bytes
    return total
