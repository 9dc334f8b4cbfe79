"""Models on meshes, with forced placements, against the same models in one process: float64."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_

from cost_models.cluster import ClusterSpec
from cost_models.errors import InternalError
from cost_models.layout import Mesh, Shard
from cost_models.precision import ParameterPrecision, Precision
from passes.copies.float64 import float64_by_default
from passes.costs.costs import costs_of
from passes.graph.graph import OpGraph
from passes.graph.verify import verify_graph
from passes.lower.job import Job
from passes.lower.lower import lower
from passes.lower.segment import on_mesh
from passes.search.feature.place import FeatureRequest, place_features
from passes.shard.beside import gathers_ahead
from passes.shard.shard import ShardedGraph, shard_graph
from passes.shard.state import gradient_sums, shardings
from passes.shard.traffic import traffic
from passes.trace.trace import trace
from runtime.check.check import check
from runtime.execute.context import RankProgram
from runtime.execute.execute import Executor
from runtime.execute.gradient_norm import global_norm, gradients_of
from runtime.execute.reduce import GradientReduction
from runtime.mesh.axis import Axis
from runtime.mesh.sharding import Sharding
from runtime.ops.bridges import is_bridge
from runtime.program.program import Program, ReduceGradients, SegmentCost, SegmentGraph
from runtime.ranks.launch import WorkerPool
from runtime.ranks.side_group import SideGroup
from runtime.segment.code import BatchSpec, SegmentCode
from runtime.segment.runner import SegmentRunner
from runtime.state import sharded_owners
from runtime.state.gather import StateEntry, gather_state
from runtime.state.rank_state import RankState
from runtime.state.sharded_owners import sharded_leaf_and_owner
from runtime.state.step_precision import StepPrecision
from tests.distributed.sharded_models import (
    BATCH,
    CHANNELS,
    COLUMN_ROW,
    HEADS,
    SEQUENCE,
    SPLIT,
    VOCABULARY,
    ZERO1,
    ZERO3,
    Conv,
    Forced,
    FusedGpt,
    Gpt,
    Mlp,
    R,
    Sizes,
    conv_batch,
    fused_batch,
    gpt_batch,
    mlp_batch,
    place,
)
from tests.support.batch_norms import count_batches
from tests.support.matrix import thinned
from tests.support.sharded_programs import sharded_programs, sharded_segments

SAMPLES, MICROBATCHES, STEPS = 8, 2, 2
MAX_NORM = 0.05
"""Gradients are clipped by it: each element must count once."""


@dataclass(frozen=True)
class Task:
    """What a worker runs."""

    programs: tuple[Program, ...]
    codes: Mapping[int, SegmentCode]
    segments: SegmentGraph
    spec: BatchSpec
    shardings: Mapping[str, Sharding]
    state: Mapping[str, Tensor]
    trained: frozenset[str]
    batch: Mapping[str, Tensor]


def run_task(task: Task) -> dict[str, Any]:
    """Some steps in a worker: losses and norms, and at the end what this rank holds; on rank 0 the whole state too."""
    rank = dist.get_rank()
    state = rank_state(task, rank)
    executor = Executor(
        RankProgram(
            task.programs, rank, task.codes, task.segments, state.leaves, task.spec, shardings=task.shardings
        ),
        timeout_seconds=20,
    )
    precision = StepPrecision(state, Precision(), executor.collectives, executor.sharded_owners(state))
    optimizer = torch.optim.AdamW(state.parameters.values(), lr=1e-2)
    precision.attach(optimizer)
    losses, norms = [], []
    with float64_by_default():
        for _ in range(STEPS):
            losses.append(executor.train_step(task.batch, MICROBATCHES))
            precision.after_backward()
            own = gradients_of(p for _, p in state.spoken_for())
            norm = global_norm(own, 2.0, executor.collectives)
            clip_grads_with_norm_(state.parameters.values(), MAX_NORM, norm)
            norms.append(norm)
            optimizer.step()
    executor.close()
    entries = {n: StateEntry(n, n, tuple(t.shape), t.dtype) for n, t in task.state.items()}
    side = SideGroup(20.0)
    gathered = gather_state(list(entries), entries, {}, state, side)
    side.close()
    return {
        "losses": losses,
        "norms": norms,
        "gradients": {n: t.grad for n, t in state.parameters.items()},
        "leaves": {n: t.detach() for n, t in state.leaves.items()},
        "gathered": gathered,
    }


def rank_state(task: Task, rank: int) -> RankState:
    leaves: dict[str, Tensor] = {}
    owners: dict[str, nn.Parameter] = {}
    for name, whole in task.state.items():
        sharding = task.shardings[name]
        value = sharding.leaf_block(whole.shape, rank).of(whole).clone()
        leaves[name] = value
        if name in task.trained:
            types = ParameterPrecision.plain(value.dtype)
            leaves[name], owners[name] = sharded_leaf_and_owner(value, types, True, sharding, rank)
    buffers = {n: t for n, t in leaves.items() if n not in owners}
    holders = {name: sharding.mesh.ranks for name, sharding in task.shardings.items()}
    return RankState(rank, leaves, owners, buffers, holders, task.shardings)


def reference(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """The same steps in one process."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for pieces in zip(*(batch[n].chunk(MICROBATCHES) for n in batch), strict=True):
            loss = model(*pieces) / MICROBATCHES
            loss.backward()
            total += loss.detach()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
        optimizer.step()
        losses.append(total)
    count_batches(model, STEPS)
    return {
        "losses": losses,
        "norms": norms,
        "gradients": {n: p.grad for n, p in model.named_parameters()},
        "state": {n: t.detach() for n, t in model.state_dict().items()},
    }


def sharded_of(
    model: nn.Module, batch: Mapping[str, Tensor], mesh: Mesh, forced: tuple[Forced, ...]
) -> ShardedGraph:
    with float64_by_default():
        graph: OpGraph = trace(model, dict(batch), loss_reduction="mean")
    sharded = shard_graph(graph, place(graph, mesh, forced, MICROBATCHES))
    verify_graph(sharded.graph, "shard")
    return sharded


def run_sharded(
    pool: WorkerPool, model: nn.Module, batch: Mapping[str, Tensor], sharded: ShardedGraph
) -> None:
    """Run it on its mesh, and compare everything with one process."""
    task = task_of(model, batch, sharded)
    results = pool.run(run_task, task, world_size=len(sharded.mesh.ranks), timeout_seconds=60)
    compare(results, task, reference(model, batch))


def task_of(model: nn.Module, batch: Mapping[str, Tensor], sharded: ShardedGraph) -> Task:
    mesh, graph = sharded.mesh, sharded.graph
    programs = sharded_programs(sharded, MICROBATCHES, len(mesh.ranks))
    segments = sharded_segments(sharded, SegmentCost(1.0, 1.0, 1.0), len(mesh.ranks))
    check(programs, segments, MICROBATCHES, tied=gradient_sums(sharded))
    names = (*graph.parameters, *graph.buffers)
    return Task(
        programs,
        lower(graph, on_mesh(graph, mesh)),
        segments,
        graph.batch,
        shardings(sharded),
        {name: model.state_dict()[name].clone() for name in names},
        graph.trained,
        batch,
    )


def compare(results: list[dict[str, Any]], task: Task, expected: dict[str, Any]) -> None:
    for step in range(STEPS):
        total = sum(result["losses"][step] for result in results)
        torch.testing.assert_close(total, expected["losses"][step], rtol=1e-10, atol=1e-12)
        for result in results:
            torch.testing.assert_close(result["norms"][step], expected["norms"][step], rtol=1e-10, atol=0.0)
    for rank, result in enumerate(results):
        assert result["gradients"].keys() == task.trained
        for name, sharding in task.shardings.items():
            whole = expected["state"][name]
            part = sharding.leaf_block(whole.shape, rank).of(whole)
            assert_close(result["leaves"][name], part, name)
            if name in task.trained:
                part = sharding.owner_block(whole.shape, rank).of(expected["gradients"][name])
                assert_close(result["gradients"][name], part, f"gradient of {name}")
    for name in task.state:
        assert_close(results[0]["gathered"][name], expected["state"][name], f"{name}, gathered")


def assert_close(found: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10, msg=lambda text: f"{what}: {text}")


TWO, FOUR = Mesh((0, 1), (2,), ("tensor",)), Mesh((0, 1, 2, 3), (2, 2), ("data", "tensor"))

MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], dict[str, Tensor]]]] = {
    "mlp": (Mlp, mlp_batch),
    "gpt": (Gpt, gpt_batch),
    "conv": (Conv, conv_batch),
    "sizes": (Sizes, mlp_batch),
    "fused": (FusedGpt, fused_batch),
}

CASES: dict[str, tuple[str, Mesh, tuple[Forced, ...]]] = {
    "mlp batch": ("mlp", TWO, (BATCH,)),
    "mlp column row": ("mlp", TWO, (COLUMN_ROW,)),
    "mlp zero 1": ("mlp", TWO, (ZERO1,)),
    "mlp zero 3": ("mlp", TWO, (ZERO3,)),
    "mlp batch and column row": ("mlp", FOUR, (BATCH, COLUMN_ROW)),
    "mlp zero 1 and column row": ("mlp", FOUR, (ZERO1, COLUMN_ROW)),
    "mlp zero 1 twice": ("mlp", FOUR, (ZERO1, ZERO1)),
    "mlp zero 3 and column row": ("mlp", FOUR, (ZERO3, COLUMN_ROW)),
    "sizes batch": ("sizes", TWO, (BATCH,)),
    "sizes split": ("sizes", FOUR, (SPLIT, ZERO3)),
    "conv batch": ("conv", TWO, (BATCH,)),
    "conv batch and channels": ("conv", FOUR, (BATCH, CHANNELS)),
    "fused heads": ("fused", TWO, (HEADS,)),
    "gpt batch": ("gpt", TWO, (BATCH,)),
    "gpt column row": ("gpt", TWO, (COLUMN_ROW,)),
    "gpt sequence": ("gpt", TWO, (SEQUENCE,)),
    "gpt vocabulary": ("gpt", TWO, (VOCABULARY,)),
    "gpt zero 1": ("gpt", TWO, (ZERO1,)),
    "gpt zero 3": ("gpt", TWO, (ZERO3,)),
    "gpt batch and column row": ("gpt", FOUR, (BATCH, COLUMN_ROW)),
    "gpt zero 1 and sequence": ("gpt", FOUR, (ZERO1, SEQUENCE)),
    "gpt zero 3 and sequence": ("gpt", FOUR, (ZERO3, SEQUENCE)),
    "gpt batch and vocabulary": ("gpt", FOUR, (BATCH, VOCABULARY)),
}


SHOWN = [
    "mlp zero 1 twice",
    "mlp zero 3 and column row",
    "sizes batch",
    "sizes split",
    "conv batch and channels",
    "fused heads",
    "gpt zero 3 and sequence",
    "gpt batch and vocabulary",
]
"""Every way to shard, every model."""


@pytest.mark.parametrize("case", thinned(CASES, SHOWN))
def test_equals_one_process(pool: WorkerPool, case: str) -> None:
    kind, mesh, forced = CASES[case]
    torch.manual_seed(0)
    make, batch_of = MODELS[kind]
    model, batch = make().double(), batch_of(SAMPLES)
    run_sharded(pool, model, batch, sharded_of(model, batch, mesh, forced))


@pytest.mark.parametrize(("kind", "bandwidth"), [("gpt", "10GB/s"), ("conv", "1GB/s")])
def test_what_the_search_chooses_runs(pool: WorkerPool, kind: str, bandwidth: str) -> None:
    torch.manual_seed(0)
    make, batch_of = MODELS[kind]
    model, batch = make().double(), batch_of(SAMPLES)
    with float64_by_default():
        graph = trace(model, dict(batch), loss_reduction="mean")
    device = {"kind": "cpu", "memory": "1GiB", "memory_bandwidth": 1e9, "flops": {"float64": 1e9}}
    links = {"default": {"bandwidth": bandwidth, "latency": 0.0}}
    machine = ClusterSpec.from_dict({"nodes": [{"name": "n", "count": 4, "device": device, "links": links}]})
    request = FeatureRequest(Job(SAMPLES), microbatches=MICROBATCHES)
    placement = place_features(graph, costs_of(graph, machine), machine, request).placement
    run_sharded(pool, model, batch, shard_graph(graph, placement))


def count_bytes(task: Task) -> list[tuple[str, str, int]]:
    """In a worker: (kind, axis, bytes of the tensor whole along the axis) of each collective of a step."""
    found: list[tuple[str, str, int]] = []
    kinds = {
        "start_sum": "all_reduce",
        "start_gather": "all_gather",
        "start_sum_part": "reduce_scatter",
        "exchange": "all_to_all",
    }
    own = {name: getattr(Axis, name) for name in (*kinds, "all_reduce")}

    def counted(name: str) -> Any:
        def run(self: Axis, *args: Any, **options: Any) -> Any:
            if name != "all_reduce" or args[1:2] == ("max",):  # other sums are counted as such
                whole = args[name == "start_sum_part"]
                parts = self.size if name == "exchange" else 1
                found.append((kinds.get(name, name), self.name, whole.numel() * whole.itemsize * parts))
            return own[name](self, *args, **options)

        return run

    for name in own:
        setattr(Axis, name, counted(name))
    try:
        run_task(task)
    finally:
        for name, method in own.items():
            setattr(Axis, name, method)
    return found


@pytest.mark.parametrize(
    "case",
    thinned(
        ["gpt column row", "gpt sequence", "gpt batch and vocabulary", "gpt zero 3 and sequence"],
        ["gpt batch and vocabulary", "gpt zero 3 and sequence"],
    ),
)
def test_executed_bytes_are_the_counted_ones(pool: WorkerPool, case: str) -> None:
    _, mesh, forced = CASES[case]
    model, batch = Gpt().double(), gpt_batch(SAMPLES)
    sharded = sharded_of(model, batch, mesh, forced)
    steps = gathers_ahead(sharded.graph, ()).steps
    step_of = {name: f"step {number}" for number, names in enumerate(steps) for name in names}
    sizes: Counter[tuple[str, str, str]] = Counter()
    for number, item in enumerate(traffic(sharded, SAMPLES // MICROBATCHES)):
        sizes[item.kind, item.axis, step_of.get(item.node, str(number))] += item.whole_bytes
    expected = Counter((kind, axis, size) for (kind, axis, _), size in sizes.items())
    for found in pool.run(count_bytes, task_of(model, batch, sharded), world_size=len(mesh.ranks)):
        assert Counter(found) == Counter({key: n * MICROBATCHES * STEPS for key, n in expected.items()})


def when_sums_start(task: Task) -> tuple[list[str], int]:
    """In a worker: what happens in which order, in one step; and how many sums there are."""
    happened: list[str] = []
    backward, start = SegmentRunner.backward, GradientReduction.start

    def noted_backward(self: SegmentRunner, *args: Any) -> None:
        happened.append("backward")
        backward(self, *args)
        happened.append("end")

    def noted_start(self: GradientReduction, *args: Any) -> Any:
        happened.append("sum")
        return start(self, *args)

    SegmentRunner.backward, GradientReduction.start = noted_backward, noted_start  # type: ignore[assignment,method-assign]
    try:
        run_task(task)
    finally:
        SegmentRunner.backward, GradientReduction.start = backward, start  # type: ignore[method-assign]
    rank = dist.get_rank()
    return happened, sum(isinstance(i, ReduceGradients) for i in task.programs[rank].instructions)


def test_gradients_are_summed_while_backward_runs(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("passes.shard.state.FIRST_BUCKET_BYTES", 1024)
    monkeypatch.setattr("passes.shard.state.BUCKET_BYTES", 4096)
    model, batch = Gpt().double(), gpt_batch(SAMPLES)
    task = task_of(model, batch, sharded_of(model, batch, TWO, (BATCH,)))
    results = pool.run(when_sums_start, task, world_size=2, timeout_seconds=60)
    assert results[0] == results[1]
    happened, sums = results[0]
    assert sums > 4
    micro, last = ["backward", "end"] * (MICROBATCHES - 1), ["backward", *["sum"] * sums, "end"]
    assert happened == (micro + last) * STEPS
    compare(pool.run(run_task, task, world_size=2, timeout_seconds=60), task, reference(model, batch))


def test_gradients_that_are_summed_alone(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("passes.shard.state.ALONE_BYTES", 1)
    torch.manual_seed(0)
    model, batch = Gpt().double(), gpt_batch(SAMPLES)
    sharded = sharded_of(model, batch, TWO, (BATCH,))
    assert all(len(parameters) == 1 for parameters, _, _ in gradient_sums(sharded))
    run_sharded(pool, model, batch, sharded)


def run_with_small_buckets(task: Task, alone_bytes: int, bucket_bytes: int) -> dict[str, Any]:
    """In a worker: ``run_task`` with leaves gathered in many small buckets."""
    before = sharded_owners._ALONE_BYTES, sharded_owners._BUCKET_BYTES
    sharded_owners._ALONE_BYTES, sharded_owners._BUCKET_BYTES = alone_bytes, bucket_bytes
    try:
        return run_task(task)
    finally:
        sharded_owners._ALONE_BYTES, sharded_owners._BUCKET_BYTES = before


@pytest.mark.parametrize(
    ("case", "alone_bytes", "bucket_bytes"),
    [
        ("gpt zero 1", 1 << 20, 300),
        ("mlp zero 1 twice", 1, 1),
        ("mlp zero 1 and column row", 1 << 20, 300),
    ],
)
def test_leaves_are_gathered_in_buckets(
    pool: WorkerPool, case: str, alone_bytes: int, bucket_bytes: int
) -> None:
    kind, mesh, forced = CASES[case]
    torch.manual_seed(0)
    make, batch_of = MODELS[kind]
    model, batch = make().double(), batch_of(SAMPLES)
    task = task_of(model, batch, sharded_of(model, batch, mesh, forced))
    size = len(mesh.ranks)
    results = pool.run(
        run_with_small_buckets, task, alone_bytes, bucket_bytes, world_size=size, timeout_seconds=60
    )
    compare(results, task, reference(model, batch))


def bridges_of(case: str) -> Counter[str]:
    kind, mesh, forced = CASES[case]
    model = (Mlp() if kind == "mlp" else Gpt()).double()
    batch = mlp_batch(SAMPLES) if kind == "mlp" else gpt_batch(SAMPLES)
    graph = sharded_of(model, batch, mesh, forced).graph
    return Counter(node.target.__name__ for node in graph.ops if is_bridge(node))  # type: ignore[union-attr]


def test_column_row_has_the_bridges_of_its_authors() -> None:
    """Shoeybi et al. 2019: per block two all-reduces forward, two backward."""
    found = bridges_of("gpt column row")
    assert (found["all_reduce"], found["sum_gradient"]) == (4, 4)
    assert not {"all_gather", "reduce_scatter", "all_to_all"} & found.keys()


def test_sequence_has_the_bridges_of_its_authors() -> None:
    """Korthikanti et al. 2022: per block two all-gathers and two reduce-scatters; here one more around the embeddings."""
    found = bridges_of("gpt sequence")
    assert found["reduce_scatter"] == 4
    assert 4 <= found["all_gather"] <= 5
    assert not {"all_reduce", "sum_gradient"} & found.keys()


def test_a_forgotten_sum_is_found() -> None:
    """The checker knows which gradients are parts of sums."""
    model = Mlp().double()
    sharded = sharded_of(model, mlp_batch(SAMPLES), TWO, (BATCH,))
    programs = sharded_programs(sharded, MICROBATCHES, 2)
    segments = sharded_segments(sharded, SegmentCost(1.0, 1.0, 1.0), 2)
    without = [
        replace(p, instructions=tuple(i for i in p.instructions if not isinstance(i, ReduceGradients)))
        for p in programs
    ]
    with pytest.raises(InternalError, match="never summed"):
        check(without, segments, MICROBATCHES, tied=gradient_sums(sharded))


class Drops(nn.Module):
    """x [b, 64], of ones: the gradient of w tells which elements were dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(64, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.dropout(self.w * x, 0.5, True).sum()


def drop(task: Task) -> list[Tensor | None]:
    """In a worker: the gradients of some steps."""
    state = rank_state(task, dist.get_rank())
    executor = Executor(
        RankProgram(task.programs, state.rank, task.codes, task.segments, state.leaves, task.spec),
        timeout_seconds=20,
        seed=7,
    )
    gradients = []
    for _ in range(2):
        executor.train_step(task.batch, 1)
        gradients.append(state.leaves["w"].grad)
    executor.close()
    return gradients


@pytest.mark.parametrize("dim", [None, 1])
def test_random_numbers(pool: WorkerPool, dim: int | None) -> None:
    """What all ranks compute, they drop alike; shards drop apart."""
    model, batch = Drops(), {"x": torch.ones(2, 64, dtype=torch.float64)}
    wanted = R if dim is None else Shard(dim)
    sharded = sharded_of(model, batch, TWO, (Forced(values={"mul*": wanted, "dropout*": wanted}),))
    task = Task(
        sharded_programs(sharded, 1, 2),
        lower(sharded.graph, on_mesh(sharded.graph, TWO)),
        sharded_segments(sharded, SegmentCost(1.0, 1.0, 1.0), 2),
        sharded.graph.batch,
        shardings(sharded),
        {"w": model.w.detach()},
        frozenset({"w"}),
        batch,
    )
    mine, theirs = pool.run(drop, task, world_size=2, timeout_seconds=60)
    for own, other in zip(mine, theirs, strict=True):
        assert torch.equal(own, other)  # whole on both
        assert set(own.unique().tolist()) == {0.0, 2.0, 4.0}
    assert not torch.equal(mine[0], mine[1]), "steps drop alike"
    if dim is not None:
        left, right = mine[0].chunk(2)
        assert not torch.equal(left, right), "shards drop alike"
