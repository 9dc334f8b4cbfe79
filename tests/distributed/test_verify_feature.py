"""``verify`` of sharded plans on real processes: patterns forced by pins on real models, and planted faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import fx, nn

from benchmarks.feature_matrix import Mesh, load, make_plan, verify_sharded
from cost_models.cluster import ClusterSpec
from cost_models.errors import PlanError
from partitioner import Plan, Workload, partition
from passes.graph import OpGraph
from passes.lower import lower
from passes.segment import Segmentation
from runtime import bridges
from runtime.launch import WorkerPool
from runtime.segment_code import SegmentCode
from tests.distributed import test_odd_models as odd
from tests.distributed.sharded_models import Gpt, gpt_batch

loaded = cache(load)

SMOKE: tuple[tuple[str, Mesh, str], ...] = (
    ("train_gpt", (2,), "vocabulary"),
    ("train_gpt", (2, 2), "sequence"),
    ("bert", (2,), "batch"),
    ("bert", (2, 2), "zero1"),
    ("vit", (4,), "zero3"),
    ("vit", (2, 2), "search"),
    ("alexnet", (2, 2), "column/row"),
)
"""Every pattern once; dropout in two of the models."""


@pytest.mark.parametrize(("model", "mesh", "pattern"), SMOKE)
def test_a_real_model_computes_what_it_computed(
    model: str, mesh: Mesh, pattern: str, pool: WorkerPool
) -> None:
    workload, graph = loaded(model)
    report = verify_sharded(mesh, pattern, workload, graph, pool)
    report.raise_if_different()
    assert report.mesh == mesh
    assert report.compared["gradient"] > 10


@pytest.mark.parametrize(
    ("make", "pattern"),
    [
        (odd.sparse_embedding_everywhere, "zero1"),
        (odd.sparse_embedding_everywhere, "zero3"),
        (odd.shared_batch_norm, "data"),
        (odd.weight_norm_of_old, "zero3"),
        (odd.complex_parameter_everywhere, "data"),
        (odd.a_queue_a_pointer_and_an_average, "column_row"),
        (odd.one_buffer_in_two_modules, "zero1"),
    ],
)
def test_an_odd_model_computes_what_it_computed(
    make: Callable[[], Workload], pattern: str, pool: WorkerPool
) -> None:
    torch.manual_seed(0)
    workload = make()
    plan = partition(
        workload,
        ClusterSpec.local(2),
        batch_size=8,
        microbatches=2,
        strategy="feature",
        mesh=(2,),
        pins={"*": pattern},
        optimizer_memory="sgd",
    )
    plan.verify(workload, pool=pool).raise_if_different()


@cache
def gpt() -> tuple[Workload, Plan]:
    """Two blocks, column and row."""
    torch.manual_seed(0)
    workload = Workload(Gpt().float(), {k: v[:2] for k, v in gpt_batch(2).items()}, name="gpt")
    plan = partition(
        workload,
        ClusterSpec.local(2),
        batch_size=4,
        microbatches=2,
        strategy="feature",
        mesh=(2,),
        pins={"*": "column_row"},
    )
    return workload, plan


def without(monkeypatch: pytest.MonkeyPatch, bridge: Callable[..., object], of: str) -> None:
    """Ranks run without the bridge of a value."""

    def tampered(graph: OpGraph, segmentation: Segmentation) -> dict[int, SegmentCode]:
        codes = lower(graph, segmentation)
        module = fx.GraphModule(nn.Module(), codes[0].module.graph)
        (node,) = [n for n in module.graph.nodes if n.target is bridge and n.name.startswith(of)]
        node.replace_all_uses_with(node.args[0])
        module.graph.erase_node(node)
        module.recompile()
        return {**codes, 0: replace(codes[0], module=module)}

    monkeypatch.setattr("partitioner.verify.lower", tampered)


def test_the_op_after_a_forgotten_sum_is_named(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    workload, plan = gpt()
    without(monkeypatch, bridges.all_reduce, "linear_3__")  # of the first block's attention
    report = plan.verify(workload, pool=pool)
    assert not report.passed
    assert report.first_difference is not None
    assert report.first_difference.startswith("add_1 (stage 0 on rank 0, micro-batch 0; module h.0")


def test_a_forgotten_sum_of_gradients_is_said_to_be_in_backward(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload, plan = gpt()
    without(monkeypatch, bridges.sum_gradient, "layer_norm_1__")
    report = plan.verify(workload, pool=pool)
    assert "h.0.norm2.weight" in {d.name for d in report.differences}
    assert report.first_difference is not None
    assert "the difference is in backward" in report.first_difference


def test_a_gradient_that_one_rank_lacks_is_found(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """State in parts: ranks have fewer gradients than parameters, and still every part must be there."""
    workload, graph = loaded("bert")
    plan = make_plan(graph, (2,), "zero1")
    sharding = plan.stages[0].sharding
    assert sharding is not None
    assert set(sharding.state.values()) == {"S0"}
    forgotten = sharding.model_copy(update={"sums": sharding.sums[1:]})
    stages = (plan.stages[0].model_copy(update={"sharding": forgotten}),)
    monkeypatch.setattr("partitioner.rebuild.check", lambda *_, **__: None)  # the checker would refuse it
    report = plan.model_copy(update={"stages": stages}).verify(workload, pool=pool)
    lost = {name for name in sharding.sums[0].parameters if "key.bias" not in name}  # whose gradient is zero
    assert {d.name for d in report.differences} == lost


def test_a_choice_that_no_rule_allows_is_refused(pool: WorkerPool) -> None:
    workload, plan = gpt()
    sharding = plan.stages[0].sharding
    assert sharding is not None
    edited = sharding.model_copy(update={"choices": {**sharding.choices, "gelu": ("S2 -> R",)}})
    stages = (plan.stages[0].model_copy(update={"sharding": edited}),)
    with pytest.raises(PlanError, match="1 ops in ways that would give other numbers"):
        plan.model_copy(update={"stages": stages}).verify(workload, pool=pool)
