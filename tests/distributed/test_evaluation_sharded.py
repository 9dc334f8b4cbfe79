"""Evaluation of plans that shard: any number of samples, outputs of every kind, the model as it was."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from cost_models.cluster import ClusterSpec
from partitioner import Plan, Workload, partition
from partitioner.batches.step import BatchCuts
from partitioner.models.as_graph import as_graph
from passes.graph.graph import OpGraph
from passes.trace.batch import flatten_batch
from runtime.ranks.launch import WorkerPool
from tests.distributed import test_evaluation as layers
from tests.distributed.test_evaluation import MICROBATCHES, SAMPLES, batch, loss_fn, workload
from tests.support.matrix import thinned

PLACED = {
    "by samples": ((2,), "data"),
    "stored in parts": ((2,), "zero3"),
    "columns and rows": ((2,), "column_row"),
}
FIXED = {"stages of zero 3": "pipeline=2 data=2 zero=3 queues=one", "one, then three": "groups=1,3"}
"""Pipelines on four ranks: what is fixed of them."""
SIZES = (8, 1, 21)


def plan_called(name: str) -> Plan:
    """One of ``PLACED`` or ``FIXED``, for ``graph``."""
    if name in PLACED:
        return Plan.from_json(made_plan(graph(), *PLACED[name]))
    given: dict[str, Any] = {"fix": FIXED[name], "batch_size": SAMPLES, "microbatches": MICROBATCHES // 2}
    return partition(graph(), ClusterSpec.local(4), strategy="hybrid", **given)


def made_plan(made: Workload | OpGraph, mesh: tuple[int, ...], patterns: str) -> str:
    return partition(
        made,
        ClusterSpec.local(math.prod(mesh)),
        strategy="feature",
        mesh=mesh,
        pins={"*": patterns},
        batch_size=SAMPLES,
        microbatches=MICROBATCHES if "data" not in patterns else MICROBATCHES // 2,
    ).model_dump_json()


# ------------------------------------------------------------------------------------------------------
# A model with every kind of output


@functools.cache
def graph() -> OpGraph:
    """The training trace, made once in every process."""
    return as_graph(workload())


def run(plan_json: str) -> Any:
    """In a worker: evaluations of several sizes, after a training step that moved the running statistics."""
    found = []
    options = {"optimizer": torch.optim.SGD, "optimizer_kwargs": {"lr": 0.0}}
    plan = Plan.from_json(plan_json)
    with plan.deploy(
        workload(), graph=graph(), timeout_seconds=30.0, check_memory=False, **options
    ) as engine:
        engine.train_step(batch())
        before = [tensor.detach().clone() for tensor in engine.state.leaves.values()]
        for samples in SIZES:
            data = batch(samples, seed=samples)
            on_all, on_first = engine.eval_step(data, gather="all"), engine.eval_step(data, gather="rank0")
            without = engine.eval_step(data)
            assert without.outputs is None
            torch.testing.assert_close(without.loss, on_all.loss, rtol=1e-13, atol=0.0)
            found.append(
                {
                    "loss": on_all.loss,
                    "metrics": on_all.metrics,
                    "all": on_all.outputs,
                    "rank0": on_first.outputs,
                    "forward": engine.forward({"x": data["x"]}),
                }
            )
        after = engine.state.leaves.values()
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert engine.step == 1
        outputs: Any = found[0]["all"]
        memory = {t.untyped_storage().data_ptr() for t in after}
        assert all(t.untyped_storage().data_ptr() not in memory for t in outputs.values() if t.numel())
        return found, engine.executor.batch_spec.multiple


def statistics(microbatches: int) -> torch.nn.Module:
    """The model after one training step."""
    made = workload()
    for piece in batch()["x"].tensor_split(microbatches):
        made.model.train()(piece)
    return made.model.eval()


@pytest.mark.parametrize("name", thinned([*PLACED, *FIXED], ["columns and rows", *FIXED]))
def test_equals_the_model_in_evaluation_mode(pool: WorkerPool, name: str) -> None:
    plan = plan_called(name)
    results = pool.run(run, plan.model_dump_json(), world_size=plan.world_size, timeout_seconds=120.0)
    reference = statistics(plan.microbatches)
    for number, samples in enumerate(SIZES):
        data = batch(samples, seed=samples)
        with torch.no_grad():
            output = reference(data["x"])
            loss, metrics = loss_fn(output, data)
        for rank, (found, multiple) in enumerate((result[0][number], result[1]) for result in results):
            torch.testing.assert_close(found["loss"], loss, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(found["metrics"], metrics, rtol=1e-12, atol=1e-12)
            shared, rest = BatchCuts(SAMPLES, plan.microbatches, multiple=multiple).shared_and_rest(samples)
            assert sum(shared) + sum(rest) == samples
            assert sum(rest) == samples % multiple
            assert_outputs(found["all"], flatten_batch(output), (*shared, *rest))
            for gathered in ("rank0", "forward"):
                if rank == 0:
                    assert_outputs(found[gathered], flatten_batch(output), (*shared, *rest))
                else:
                    assert found[gathered] is None


def assert_outputs(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], sizes: tuple[int, ...]
) -> None:
    assert list(found) == list(expected)
    assert found["again"] is found["logits"]
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        if name == "mean":  # it has no batch dimension: one per micro-batch
            pieces = torch.split(expected["hidden.1.second"], list(sizes))
            tensor = torch.stack([piece.mean(0) for piece in pieces])
        torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------------------------------------------------
# Evaluating is not noticed by training


@pytest.mark.parametrize("name", thinned(["by samples", "columns and rows"], ["by samples"]))
def test_training_goes_on_bit_for_bit(pool: WorkerPool, name: str) -> None:
    """With batch norm, dropout in training mode, and dropout in evaluation mode too."""
    made = Workload(layers.model(layers.Dropped), {"x": batch()["x"]}, None, "dropped")
    mesh, patterns = PLACED[name]
    text = made_plan(made, mesh, patterns)
    plain, evaluating = (
        pool.run(layers.training_with_evaluations, text, evaluates, world_size=2, timeout_seconds=90.0)
        for evaluates in (False, True)
    )
    for without, with_ in zip(plain, evaluating, strict=True):
        assert without[0] == with_[0]
        assert all(torch.equal(without[1][name], with_[1][name]) for name in without[1])
        assert torch.equal(without[2], with_[2])


# ------------------------------------------------------------------------------------------------------
# A model of transformers, on lengths that were not planned


def run_hf(plan_json: str) -> Any:
    made = layers.hf_workload("gpt2")
    data = made.example_inputs
    shorter = {name: tensor[:, 2:] for name, tensor in data.items()}
    plan = Plan.from_json(plan_json)
    with plan.deploy(made, timeout_seconds=30.0, check_memory=False) as engine:
        evaluated = [engine.eval_step(layers.part_of(data, n), gather="all") for n in (layers.LARGE, 3)]
        return [*evaluated, engine.eval_step(shorter, gather="all")]


def test_a_model_of_transformers(pool: WorkerPool) -> None:
    """Uneven labels: every loss is the mean over all that count."""
    made = layers.hf_workload("gpt2")
    text = made_plan(made, *PLACED["by samples"])
    data, reference = made.example_inputs, made.model.eval()
    shorter = {name: tensor[:, 2:].clone() for name, tensor in data.items()}
    batches = [layers.part_of(data, layers.LARGE), layers.part_of(data, 3), shorter]
    for results in pool.run(run_hf, text, world_size=2, timeout_seconds=200.0):
        for found, given in zip(results, batches, strict=True):
            with torch.no_grad():
                want = reference(**given)
            assert found.tokens == (given["labels"][:, 1:] != -100).sum()
            torch.testing.assert_close(found.loss, want.loss.double(), rtol=1e-6, atol=0.0)
            torch.testing.assert_close(found.outputs["logits"], want.logits, rtol=1e-10, atol=1e-12)
