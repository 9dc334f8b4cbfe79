"""Evaluation graphs on the mesh of training: the same choices, for any number of samples, parameters as they are stored."""

from __future__ import annotations

import functools

import pytest

from cost_models.layout import Mesh, Replicate, Shard
from partitioner.evaluation.placement import keyed_ops, with_computed_outputs, without_outputs, without_writes
from partitioner.evaluation.sharding import reuse_sharding
from passes.copies.float64 import float64_by_default
from passes.graph.graph import OpGraph
from passes.graph.verify import verify_graph
from passes.shard.rules import choices
from passes.shard.shard import shard_graph
from passes.shard.words import FeaturePlacement
from passes.trace.trace import trace
from tests.distributed.sharded_models import BATCH, COLUMN_ROW, ZERO3, Forced, Gpt, gpt_batch, place

MESHES = {
    "by samples": (Mesh((0, 1), (2,), ("data",)), (BATCH,)),
    "columns and rows": (Mesh((0, 1), (2,), ("tensor",)), (COLUMN_ROW,)),
    "both": (Mesh((0, 1, 2, 3), (2, 2), ("data", "tensor")), (BATCH, COLUMN_ROW)),
    "stored in parts": (Mesh((0, 1), (2,), ("data",)), (ZERO3,)),
}


@functools.cache
def graphs() -> tuple[OpGraph, OpGraph]:
    """Of training and of evaluation."""
    with float64_by_default():
        training = trace(Gpt().double(), gpt_batch(4), loss_reduction="mean")
        evaluation = trace(Gpt().double(), gpt_batch(4), loss_reduction="mean", training=False)
    return training, with_computed_outputs(without_writes(evaluation))


def placed(mesh: Mesh, forced: tuple[Forced, ...], unit: int) -> tuple[FeaturePlacement, FeaturePlacement]:
    training, evaluation = graphs()
    before = place(training, mesh, forced, 2)
    batch = before.batch if unit > 1 else {}
    return before, reuse_sharding(training, before, evaluation, before.stored, batch, unit)


@pytest.mark.parametrize("name", MESHES)
def test_ops_run_as_in_training_and_parameters_stay(name: str) -> None:
    training, evaluation = graphs()
    unit = shard_graph(training, place(training, *MESHES[name], 2)).graph.batch.multiple
    before, after = placed(*MESHES[name], unit)
    twins = {key: node.name for key, node in keyed_ops(training)}
    chosen = {node.name: key for key, node in keyed_ops(evaluation) if node.name in after.choices}
    assert all(
        after.choices[name] == before.choices[twins[key]] for name, key in chosen.items() if key in twins
    )
    sharded = shard_graph(evaluation, after, unit)
    verify_graph(sharded.graph, after="reuse_sharding")
    assert sharded.graph.batch.multiple == unit
    assert sharded.placement.stored == before.stored


@pytest.mark.parametrize("name", MESHES)
def test_any_number_of_samples_has_a_placement(name: str) -> None:
    """Nothing is split by samples, and everything is what a rule allows."""
    _, evaluation = graphs()
    before, after = placed(*MESHES[name], 1)
    sharded = shard_graph(without_outputs(evaluation), after)
    verify_graph(sharded.graph, after="reuse_sharding")
    assert sharded.graph.batch.multiple == 1
    assert sharded.placement.stored == before.stored
    for node in evaluation.ops:
        if node.name in after.choices:
            assert set(after.choices[node.name]) <= set(choices(node)), node.name
    if "by samples" in name:
        assert not any(
            isinstance(o, Shard) and o.dim == 0 for c in after.choices["linear"] for o in c.outputs
        )
        assert after.batch == {}
        assert all(p == (Replicate(),) for p in after.stored.values())


def test_sizes_that_do_not_divide_are_placed_anew() -> None:
    """Trained on 8 positions split in two; 7 of them cannot be."""
    mesh = Mesh((0, 1), (2,), ("tensor",))
    training, _ = graphs()
    before = place(training, mesh, (Forced(values={"*": Shard(1)}),), 2)
    assert any(o == Shard(1) for c in before.choices.values() for o in c[0].outputs)
    shorter = {name: leaf[:, :7] for name, leaf in gpt_batch(4).items()}
    with float64_by_default():
        evaluation = without_writes(trace(Gpt().double(), shorter, loss_reduction="mean", training=False))
    after = reuse_sharding(training, before, evaluation, before.stored, before.batch, 1)
    sharded = shard_graph(evaluation, after)
    verify_graph(sharded.graph, after="reuse_sharding")
