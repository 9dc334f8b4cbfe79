"""``verify`` of sharded plans on real processes: patterns forced by pins on real models, and planted faults."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import fx, nn

from benchmarks.feature_matrix import Mesh, make_plan, verify_sharded
from cost_models.cluster import ClusterSpec
from cost_models.errors import PlanError
from partitioner import Plan, Workload, partition
from passes.lower.placed_graph import PlacedGraph
from passes.search.feature.options import Options
from passes.search.feature.place import MeshSurvey, survey_meshes
from passes.search.feature.result import assemble
from runtime.ops import bridges
from runtime.ranks.launch import WorkerPool
from runtime.segment.code import SegmentCode
from tests.distributed import test_odd_models as odd
from tests.distributed.sharded_models import Conv, Gpt, conv_batch, gpt_batch
from tests.support.matrix import thinned
from tests.support.traced_models import loaded

SMOKE: tuple[tuple[str, Mesh, str], ...] = (
    ("bert", (2,), "vocabulary"),
    ("bert", (2, 2), "sequence"),
    ("vit", (2,), "batch"),
    ("vit", (2, 2), "zero1"),
    ("vit", (4,), "zero3"),
    ("alexnet", (2,), "search"),
    ("alexnet", (2, 2), "column/row"),
)
"""Every pattern once; dropout in two of the models."""


SHOWN = [case for case in SMOKE if case[2] in ("vocabulary", "column/row")]
"""``test_sharded`` and the odd models below show the other patterns on smaller models."""


@pytest.mark.parametrize(("model", "mesh", "pattern"), thinned(SMOKE, SHOWN))
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
        pytest.param(odd.sparse_embedding_everywhere, "zero1", marks=pytest.mark.matrix),
        (odd.sparse_embedding_everywhere, "zero3"),
        pytest.param(odd.shared_batch_norm, "data", marks=pytest.mark.matrix),
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


def gpt() -> Workload:
    torch.manual_seed(0)
    return Workload(Gpt().float(), gpt_batch(2), name="gpt")


def conv() -> Workload:
    torch.manual_seed(0)
    example = {name: leaf[:2] for name, leaf in conv_batch(2).items()}
    return Workload(Conv().float(), {"x": example["x"].float(), "y": example["y"]}, name="conv")


ANY = {"gpt": gpt, "conv": conv, "norm": odd.shared_batch_norm}
MESHES: dict[str, tuple[Mesh, int]] = {"2": ((2,), 0), "2x2": ((2, 2), 3)}


@pytest.mark.parametrize(
    ("name", "ranks"),
    thinned(itertools.product(ANY, MESHES), [("gpt", "2x2"), ("conv", "2"), ("norm", "2x2")]),
)
def test_any_placement_computes_what_the_model_computes(
    name: str,
    ranks: str,
    pool: WorkerPool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every op, parameter and leaf in some way that divides, drawn at random: every kind of bridge between them."""
    make, (mesh, seed) = ANY[name], MESHES[ranks]
    chance = random.Random(seed)

    def placed(*arguments: Any, **more: Any) -> MeshSurvey:
        survey = survey_meshes(*arguments, **more)
        found = survey.best
        assert found is not None
        ways = [
            unit.detail.count if isinstance(unit.detail, Options) else len(unit.detail)
            for unit in found.problem.units
        ]
        drawn = [chance.randrange(count) if count else 0 for count in ways]
        return replace(survey, best=replace(found, placement=assemble(found.problem, drawn)))

    monkeypatch.setattr("passes.search.feature.provider.survey_meshes", placed)
    workload = make()
    plan = partition(
        workload,
        ClusterSpec.local(math.prod(mesh)),
        batch_size=8,
        microbatches=2,
        strategy="feature",
        mesh=mesh,
    )
    plan.verify(workload, pool=pool).raise_if_different()


@cache
def column_row() -> tuple[Workload, Plan]:
    """Two blocks, column and row."""
    workload = gpt()
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


def without(monkeypatch: pytest.MonkeyPatch, bridge: Callable[..., object]) -> list[str]:
    """Ranks run without the first such bridge. The list will have the name of the op that then reads what is wrong."""
    reads: list[str] = []

    lowered = PlacedGraph.lowered

    def tampered(placed: PlacedGraph) -> dict[int, SegmentCode]:
        codes = lowered(placed)
        module = fx.GraphModule(nn.Module(), codes[0].module.graph)
        node = next(n for n in module.graph.nodes if n.target is bridge)
        users = list(node.users)
        while users and bridges.is_bridge(users[0]):
            users = list(users[0].users)
        reads.append(users[0].name)
        node.replace_all_uses_with(node.args[0])
        module.graph.erase_node(node)
        module.recompile()
        return {**codes, 0: replace(codes[0], module=module)}

    monkeypatch.setattr(PlacedGraph, "lowered", tampered)
    return reads


def test_the_op_after_a_forgotten_sum_is_named(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    workload, plan = column_row()
    reads = without(monkeypatch, bridges.all_reduce)
    report = plan.verify(workload, pool=pool)
    assert not report.passed
    assert report.first_difference is not None
    assert report.first_difference.startswith(f"{reads[0]} (stage 0 on rank 0, micro-batch 0; module h.0")


def test_a_forgotten_sum_of_gradients_is_said_to_be_in_backward(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload, plan = column_row()
    without(monkeypatch, bridges.sum_gradient)
    report = plan.verify(workload, pool=pool)
    assert "wpe.weight" in {d.name for d in report.differences}
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
    monkeypatch.setattr(
        "partitioner.record.rebuild.check", lambda *_, **__: None
    )  # the checker would refuse it
    report = plan.model_copy(update={"stages": stages}).verify(workload, pool=pool)
    lost = {name for name in sharding.sums[0].parameters if "key.bias" not in name}  # whose gradient is zero
    assert {d.name for d in report.differences} == lost


def test_a_choice_that_no_rule_allows_is_refused(pool: WorkerPool) -> None:
    workload, plan = column_row()
    sharding = plan.stages[0].sharding
    assert sharding is not None
    edited = sharding.model_copy(update={"choices": {**sharding.choices, "gelu": ("S2 -> R",)}})
    stages = (plan.stages[0].model_copy(update={"sharding": edited}),)
    with pytest.raises(PlanError, match="1 ops in ways that would give other numbers"):
        plan.model_copy(update={"stages": stages}).verify(workload, pool=pool)
