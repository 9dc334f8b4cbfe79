"""Blocks of sharded models computed again in backward, on real processes: the step is that of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from benchmarks.feature_matrix import Mesh
from cost_models.cluster import ClusterSpec
from partitioner import Plan, partition
from partitioner.models.as_graph import as_graph
from partitioner.models.workload import Workload
from partitioner.verify.verify import verify_plan
from passes.graph.graph import OpGraph
from passes.search.words import RecomputeMode
from runtime.ranks.launch import WorkerPool
from tests.distributed.test_recompute import made
from tests.support.matrix import thinned
from tests.support.traced_models import loaded, without_dropout

CASES: tuple[tuple[str, Mesh, str, RecomputeMode], ...] = (
    ("gpt2", (2,), "data", "full"),
    ("gpt2", (2,), "zero3", "full"),
    ("gpt2", (2,), "zero3", "gathers"),
    ("gpt2", (2,), "column_row", "full"),
    ("gpt2", (2, 2), "zero3 sequence", "full"),
    ("gpt2", (2, 2), "zero3 sequence", "gathers"),
    ("bert", (2,), "vocabulary", "full"),
    ("resnet50", (2,), "data", "full"),
    ("resnet50", (2,), "zero3", "gathers"),
)


@pytest.mark.parametrize(("model", "mesh", "pattern", "recompute"), thinned(CASES, [CASES[5]]))
def test_a_real_model_computes_what_it_computed(
    model: str, mesh: Mesh, pattern: str, recompute: RecomputeMode, pool: WorkerPool
) -> None:
    workload, graph = loaded(model)
    plan = sharded(graph, mesh, pattern, recompute)
    assert plan.stages[0].recomputed_blocks
    saved = Plan.from_json(plan.model_dump_json())
    report = verify_plan(saved, workload, pool=pool, graph=graph)
    report.raise_if_different()
    assert report.compared["gradient"] > 10


def test_stages_gather_again(pool: WorkerPool) -> None:
    workload, graph = loaded("gpt2")
    fix = "pipeline=2 data=2 zero=3 microbatch=1 recompute=gathers"
    plan = partition(graph, ClusterSpec.local(4), batch_size=8, strategy="hybrid", fix=fix)
    assert [stage.recomputed_blocks for stage in plan.stages] == [("gathers",)] * 2
    verify_plan(plan, workload, pool=pool, graph=graph).raise_if_different()


def test_what_several_products_read_is_gathered_again(pool: WorkerPool) -> None:
    """Query, key and value read one gather of sequence parallelism: kept in parts, it is gathered once more for all."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape, use_cache=False)).double()
    ids = torch.randint(64, (8, 32), generator=torch.Generator().manual_seed(0))
    workload = Workload(model, {"input_ids": ids, "labels": ids.clone()})
    graph = as_graph(workload)
    kept, again = (
        partition(
            graph, ClusterSpec.local(4), batch_size=8, strategy="hybrid", microbatches=2,
            fix="data=1 pipeline=2 sequence=2", recompute=kind,
        )
        for kind in ("none", "gathers")
    )  # fmt: skip
    least = 4 * 32 * 64 * 8 // 2  # of a micro-batch, what one gather adds to a part
    assert kept.simulate().peak_bytes[0] - again.simulate().peak_bytes[0] >= 2 * least
    verify_plan(Plan.from_json(again.to_json()), workload, pool=pool, graph=graph).raise_if_different()


@pytest.mark.parametrize("fix", ["pipeline=2 tensor=2", "data=2 pipeline=2 zero=3"])
def test_attentions_alone_are_computed_again(fix: str, pool: WorkerPool) -> None:
    config = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**config, attn_implementation="eager", use_cache=False)).double()
    ids = torch.randint(64, (8, 32), generator=torch.Generator().manual_seed(0))
    workload = Workload(without_dropout(model), {"input_ids": ids, "labels": ids.clone()})
    graph = as_graph(workload)
    kept, again = (
        partition(
            graph,
            ClusterSpec.local(4),
            batch_size=8,
            strategy="hybrid",
            microbatches=2,
            fix=fix,
            recompute=kind,
        )
        for kind in ("none", "selective")
    )
    assert [stage.recomputed_blocks for stage in again.stages] == [("selective",)] * 2
    assert max(again.simulate().peak_bytes) < max(kept.simulate().peak_bytes)
    assert again.prediction.step_seconds > kept.prediction.step_seconds
    verify_plan(Plan.from_json(again.to_json()), workload, pool=pool, graph=graph).raise_if_different()


def sharded(graph: OpGraph, mesh: Mesh, pattern: str, recompute: Any) -> Plan:
    return partition(
        graph,
        ClusterSpec.local(4 if len(mesh) > 1 else 2),
        batch_size=8,
        microbatches=2,
        strategy="feature",
        mesh=mesh,
        pins={"*": pattern},
        recompute=recompute,
    )


def train(plan_json: str) -> tuple[list[float], dict[str, Tensor]]:
    """In a worker: three steps; their losses, and the whole state on rank 0."""
    workload, plan = made(), Plan.from_json(plan_json)
    with plan.deploy(workload, optimizer=torch.optim.SGD, optimizer_kwargs={"lr": 0.1}) as engine:
        losses = [float(engine.train_step(workload.example_inputs)) for _ in range(3)]
        return losses, {name: tensor.clone() for name, tensor in engine.state_dict().items()}


@pytest.mark.parametrize("pattern", ["data", "zero3"])
def test_masks_and_statistics_are_those_of_a_plan_without(pattern: str, pool: WorkerPool) -> None:
    """Dropout on shards and whole, batch norm over the samples of both ranks, a parameter that two layers share."""
    graph = as_graph(made())
    plans = [sharded(graph, (2,), pattern, recompute) for recompute in ("none", "full")]
    assert [len(plan.stages[0].recomputed_blocks) for plan in plans] == [0, 4]
    (kept, *_), (again, *_) = (pool.run(train, p.model_dump_json(), world_size=2) for p in plans)
    assert again[0] == pytest.approx(kept[0], rel=1e-12)
    assert len(set(kept[0])) == 3
    assert again[1].keys() == kept[1].keys()
    for name, tensor in kept[1].items():
        torch.testing.assert_close(again[1][name], tensor, rtol=1e-12, atol=1e-15, msg=name)
    tracked = [int(t) for name, t in again[1].items() if name.endswith("num_batches_tracked")]
    assert tracked == [3] * 4, "once per batch"
