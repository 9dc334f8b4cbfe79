"""Blocks computed again in backward, on real processes: the same training step, to the last bit where it is comparable."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from benchmarks.verify_matrix import Case, load, verify_case
from cost_models.cluster import ClusterSpec
from partitioner import Plan, Workload, partition
from partitioner.models.as_graph import as_graph
from partitioner.record.rebuild import plan_code, plan_programs, plan_segments, ranks_in_order
from partitioner.verify.rank import VerificationTask, run_rank
from partitioner.verify.verify import model_state
from passes.graph.graph import OpGraph
from passes.lower.lower import lower
from passes.trace.batch import flatten_batch, forward_names
from runtime.ranks.launch import WorkerPool
from tests.support.matrix import thinned

CASES = (
    Case("gpt2", 2, "zb-h1", "auto"),
    Case("t5", 3, "interleaved", "full"),
)


@pytest.mark.parametrize(
    "case", thinned(CASES, CASES[:1]), ids=lambda case: f"{case.model}-{case.schedule}-{case.recompute}"
)
def test_a_real_model_computes_what_it_computed(
    case: Case, pool: WorkerPool, capsys: pytest.CaptureFixture[str]
) -> None:
    workload, graph = load(case.model)
    report = verify_case(case, workload, graph, pool)
    counts = capsys.readouterr().err.partition("computed again: ")[2].split()
    assert any(int(count) for count in counts)
    report.raise_if_different()
    assert report.compared["gradient"] > 10


class Layer(nn.Module):
    """Dropout, batch norm, and a parameter that two layers share."""

    def __init__(self, shared: nn.Linear) -> None:
        super().__init__()
        self.shared, self.own = shared, nn.Linear(8, 8)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.drop(torch.tanh(self.own(self.norm(self.drop(self.shared(x))))))
        return result


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Layer(shared) for _ in range(4))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.head(x)
        return result


def squares(output: Tensor, batch: Tensor) -> Tensor:
    return output.square().mean()


def made() -> Workload:
    torch.manual_seed(0)
    return Workload(Net().double(), torch.randn(8, 8, dtype=torch.float64), squares, "net")


@pytest.fixture(scope="module")
def net() -> tuple[Workload, OpGraph]:
    workload = made()
    return workload, as_graph(workload)


def planned(graph: OpGraph, schedule: str) -> Plan:
    pins = {"layers.0": 0, "layers.1": 0, "layers.2": 1, "layers.3": 1}
    made = partition(
        graph,
        ClusterSpec.local(2),
        batch_size=8,
        microbatches=4,
        schedule=schedule,
        pins=pins,
        strategy="layer",
    )
    assert not any(stage.recomputed_blocks for stage in made.stages)  # everything fits
    return made


def with_blocks(plan: Plan) -> Plan:
    """The same plan, with three of four layers computed again."""
    blocks = (("layers.0", "layers.1"), ("layers.3",))
    stages = (s.model_copy(update={"recomputed_blocks": b}) for s, b in zip(plan.stages, blocks, strict=True))
    return plan.model_copy(update={"stages": tuple(stages)})


def train(plan_json: str) -> list[float]:
    workload = made()
    plan = Plan.from_json(plan_json)
    with plan.deploy(workload, optimizer=torch.optim.SGD, optimizer_kwargs={"lr": 0.1}) as engine:
        return [float(engine.train_step(workload.example_inputs)) for _ in range(3)]


def test_an_engine_trains_the_same_way(net: tuple[Workload, OpGraph], pool: WorkerPool) -> None:
    plan = planned(net[1], "1f1b")
    kept, again = (pool.run(train, p.model_dump_json(), world_size=2) for p in (plan, with_blocks(plan)))
    assert again[0] == pytest.approx(kept[0], rel=1e-12)
    assert again[0] == again[1]
    assert len(set(kept[0])) == 3


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_masks_and_statistics_are_those_of_a_plan_without(
    schedule: str, net: tuple[Workload, OpGraph], pool: WorkerPool
) -> None:
    workload, graph = net
    plan = planned(graph, schedule)
    kept, again = (
        pool.run(run_rank, task(made, workload, graph), world_size=2) for made in (plan, with_blocks(plan))
    )
    for mine, theirs in zip(kept, again, strict=True):
        assert replace(mine, gradients={}, parameters={}, buffers={}).loss == pytest.approx(
            theirs.loss, nan_ok=True
        )
        for kind in ("gradients", "parameters", "buffers"):
            expected, actual = getattr(mine, kind), getattr(theirs, kind)
            assert expected.keys() == actual.keys()
            for name, tensor in expected.items():
                torch.testing.assert_close(actual[name], tensor, rtol=1e-12, atol=1e-15, msg=f"{kind} {name}")
    tracked = [b for result in again for n, b in result.buffers.items() if n.endswith("num_batches_tracked")]
    assert len(tracked) == 4
    assert all(int(count) == 1 for count in tracked)  # once per batch


def task(plan: Plan, workload: Workload, graph: OpGraph) -> VerificationTask:
    ranks = ranks_in_order(plan)
    codes = lower(graph, plan_code(plan, graph, ranks).segmentation)
    assert sum(len(code.recomputed) for code in codes.values()) == sum(
        len(stage.recomputed_blocks) for stage in plan.stages
    )
    leaves = flatten_batch(workload.example_inputs, forward_names(workload.model))
    return VerificationTask(
        programs=plan_programs(plan, ranks),
        codes=codes,
        segments=plan_segments(plan, ranks),
        batch_specs=(graph.batch,) * plan.world_size,
        batch={name: leaves[name] for name in graph.batch.batch_dims},
        state=model_state(workload.model, graph),
        trainable=frozenset(graph.parameters),
        microbatches=plan.microbatches,
        weights=(0.25,) * 4,
        optimizer="adamw",
        learning_rate=1e-2,
        timeout_seconds=60.0,
    )
