"""Real models in blocks: by their families, unevenly, and any ops along any dimensions in random blocks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import lru_cache

import pytest
import torch

from cost_models.errors import UsageError
from examples.alexnet import alexnet
from examples.locally_connected import locally_connected
from examples.lstm_seq2seq import lstm_seq2seq
from partitioner.models.bundled import bundled
from partitioner.models.workload import Workload
from passes.graph.graph import OpGraph
from passes.split.families import Family, families
from passes.split.split import Split
from tests.support.matrix import thinned
from tests.support.random_graphs import random_model
from tests.support.traced_models import without_dropout
from tests.unit.passes.split.harness import check, ops, traced

aten = torch.ops.aten


def _workload(name: str) -> Workload:
    if name == "alexnet":
        return alexnet(classes=5, width=0.06, size=63, dropout=0.0)
    if name == "lstm":
        return lstm_seq2seq(vocabulary=12, hidden=5, layers=2, source_steps=2, target_steps=2, batch=2)
    if name == "locally connected":
        return locally_connected(channels=2, size=15, classes=3)
    if name == "resnet50":
        return bundled(name, size="tiny", dtype="float64", batch=2)
    return bundled(name, size="tiny", dtype="float64", layers=1, seq=6, batch=2)


@lru_cache(maxsize=16)
def _traced(name: str) -> tuple[OpGraph, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    workload = _workload(name)
    return traced(without_dropout(workload.model), workload.example_inputs, workload.loss_fn)


def _found(name: str) -> dict[str, Family]:
    return {family.name: family for family in families(_traced(name)[0])}


MODELS = {
    "gpt2": {("transformer.h.0.attn", "heads", 4), ("transformer.h.0.mlp", "neurons", 128), ("lm_head", "neurons", 64)},
    "bert": {("bert.encoder.layer.0.attention", "heads", 4), ("cls.predictions.decoder", "neurons", 64)},
    "llama-8b": {("model.layers.0.self_attn", "heads", 2), ("model.layers.0.mlp", "neurons", 64)},
    "resnet50": {("resnet.encoder.stages.0.layers.0.layer.0.convolution", "channels", 4)},
    "alexnet": {("features.3", "channels", 15), ("classifier.4", "neurons", 245), ("classifier.6", "neurons", 5)},
    "lstm": {("encoder.cells.0", "units", 5), ("project", "neurons", 12)},
}  # fmt: skip


@pytest.mark.parametrize("name", thinned(MODELS, ["gpt2", "resnet50", "alexnet", "lstm"]))
def test_all_families_at_once_in_uneven_blocks(name: str) -> None:
    graph, state, leaves = _traced(name)
    found = families(graph)
    assert MODELS[name] <= {(family.name, family.kind, family.units) for family in found}
    assert len({op for family in found for op in family.ops}) == sum(len(family.ops) for family in found)
    sizes = {f.units: (f.units - f.units // 3, f.units // 3) if f.units > 2 else (1, 1) for f in found}
    made = check(graph, [split for f in found for split in f.splits(sizes[f.units])], state, leaves)
    assert all(op not in made.nodes for family in found for op in family.ops)
    assert all(family.flops > 0 for family in found)


def test_a_family_tells_what_it_can_be_split_into() -> None:
    attention = _found("gpt2")["transformer.h.0.attn"]
    assert attention.splits((1, 3)) == (Split("addmm", 1, (8, 24) * 3),)
    for wrong in ((1, 2), (4, 0), ()):
        with pytest.raises(UsageError, match="4 heads"):
            attention.splits(wrong)


def test_gates_stay_together() -> None:
    """All steps of a cell, in encoder and decoder; its weights are cut into the same parts by each of them."""
    graph, state, leaves = _traced("lstm")
    cell = _found("lstm")["encoder.cells.0"]
    assert len(cell.ops) == 8
    made = check(graph, cell.splits((3, 2)), state, leaves)
    parts = {name for name in made.parts if name.startswith("encoder.cells.0.")}
    assert len(parts) == 3 * 8
    sliced = {
        str(made.nodes[name].args[0]) for name in ops(made, aten.slice.Tensor) if name not in graph.nodes
    }
    assert sliced == {"new_zeros"}  # the first state
    state_size = {
        tuple(made.nodes[n].meta["val"].shape)[1] for n in ops(made, aten.sigmoid.default) if "_b" in n
    }
    assert state_size == {3, 2}


def test_heads_of_grouped_attention_go_with_their_keys() -> None:
    graph, state, leaves = _traced("llama-8b")
    attention = _found("llama-8b")["model.layers.0.self_attn"]
    made = check(graph, attention.splits((1, 1)), state, leaves)
    assert not any(name.endswith("_whole") for name in made.nodes)


def test_stripes_of_the_locally_connected_example() -> None:
    graph, state, leaves = _traced("locally connected")
    unfolded = next(n for n in graph.ops if n.target is aten.unfold.default)
    dim = unfolded.args[1]
    assert isinstance(dim, int)
    made = check(graph, [Split(unfolded.name, dim, (4, 3, 3, 3))], state, leaves)
    assert {n.split("#")[0] for n in made.parts} >= {f"layers.{k}.weight" for k in range(3)}
    assert sum(name.endswith("_whole") for name in made.nodes) == 1  # before the classifier


# ----------------------------------------------------------------------------------------------------------
# Anything, anywhere


def _cuttable(graph: OpGraph) -> Iterator[tuple[str, int, int]]:
    for node in graph.ops:
        if isinstance(value := node.meta["val"], torch.Tensor):
            for dim, size in enumerate(value.shape):
                if isinstance(size, int) and size > 1:
                    yield node.name, dim, size


def _random_splits(graph: OpGraph, seed: int) -> list[Split]:
    draw = random.Random(seed)
    found = list(_cuttable(graph))
    splits: dict[str, Split] = {}
    for op, dim, size in draw.sample(found, min(len(found), draw.choice((1, 2, 3, 6)))):
        cuts = sorted(draw.sample(range(1, size), draw.randint(1, min(3, size - 1))))
        sizes = tuple(b - a for a, b in zip([0, *cuts], [*cuts, size], strict=True))
        splits[op] = Split(op, dim - draw.choice((0, graph.nodes[op].meta["val"].dim())), sizes)
    return list(splits.values())


@pytest.mark.parametrize(
    "name", thinned(["gpt2", "llama-8b", "alexnet", "lstm"], ["llama-8b", "alexnet", "lstm"])
)
def test_random_ops_of_real_models(name: str) -> None:
    graph, state, leaves = _traced(name)
    for seed in range(2):
        splits = _random_splits(graph, seed)
        check(graph, splits, state, leaves)


@pytest.mark.parametrize("start", range(0, 12, 6))
def test_random_graphs(start: int) -> None:
    for seed in range(start, start + 6):
        model = random_model(seed, ops=8 + seed % 12)
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(3, 4, generator=generator, dtype=torch.float64)
        check(model.graph, _random_splits(model.graph, seed), model.state, {"x": x})
