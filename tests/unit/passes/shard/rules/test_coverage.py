"""Every op of the bundled models and the examples has a rule, and the rules let the plans through that matter."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import fx

from cost_models.layout import Partial, Placement, Replicate, Shard
from partitioner.models.bundled import bundled
from passes.graph.graph import OpGraph
from passes.shard.rules import choices, has_rule, makes_tensors
from passes.shard.words import Choice, operands
from passes.trace.trace import trace
from tests.support.matrix import thinned
from tests.support.traced_models import small

EXAMPLES: dict[str, dict[str, int]] = {
    "alexnet": {},
    "unet": {},
    "lstm_seq2seq": {"source_steps": 2, "target_steps": 2},
}
MODELS = ("gpt2", "llama-1b", "bert", "t5", "vit", "whisper", "mixtral", "resnet50", *EXAMPLES)
SHOWN = ("t5", "vit", "whisper", "mixtral", "resnet50", "unet", "lstm_seq2seq")
"""The others have no op that none of these has, or are run all over the tests, as gpt2 is."""

REPLICATE_ONLY = {"aten.arange.default"}
"""Deliberately: a slice of the whole costs nothing."""


@pytest.fixture(scope="module", params=thinned(MODELS, SHOWN))
def graph(request: pytest.FixtureRequest) -> OpGraph:
    """One trace a model: pytest runs all tests of a model before those of the next."""
    name = request.param
    if name in EXAMPLES:
        workload = getattr(importlib.import_module(f"examples.{name}"), name)(**EXAMPLES[name])
    elif name == "resnet50":
        workload = bundled(name, size="tiny", batch=2)
    else:
        workload = small(name)
    return trace(workload.model, workload.example_inputs, loss_fn=workload.loss_fn)


def test_every_op_has_a_rule(graph: OpGraph) -> None:
    assert {str(node.target) for node in graph.ops if not has_rule(node)} == set()
    whole = {
        str(node.target)
        for node in graph.ops
        if makes_tensors(node)
        and len(choices(node)) == 1
        and any(size != 1 for size in node.meta["val"].shape)
        and node.meta["val"].dtype.is_floating_point
    }
    assert whole <= REPLICATE_ONLY


@pytest.mark.parametrize(
    "graph",
    thinned([m for m in MODELS if m != "lstm_seq2seq"], [m for m in SHOWN if m != "lstm_seq2seq"]),
    indirect=True,
    scope="module",
)
def test_samples_may_be_sharded_without_traffic(graph: OpGraph) -> None:
    """With samples sharded, every op that gets a gradient can run on what its producers made; slices are free."""
    made: dict[str, Placement] = {i.node: Shard(0) for i in graph.inputs if i.kind == "batch"}
    for node in graph.ops:
        if not makes_tensors(node):
            made.update((node.name, made[s.name]) for s in node.all_input_nodes if s.name in made)
            continue
        fitting = [choice for choice in choices(node) if reachable(graph, node, choice, made)]
        assert fitting or node.name not in graph.needs_grad, f"{node.format_node()}"
        if fitting:
            made[node.name] = next((c for c in fitting if by_sample(node, c)), fitting[0]).outputs[0]
    (loss,) = (output.node for output in graph.outputs if output.kind == "loss")
    assert made[loss] == Partial()


def reachable(graph: OpGraph, node: fx.Node, choice: Choice, made: dict[str, Placement]) -> bool:
    """Whether what is needed is what there is, or a slice of a whole tensor that gets no gradient."""
    return all(
        need.placement == made.get(source.name, Replicate())
        or (
            isinstance(need.placement, Shard)
            and source.name not in made
            and source.name not in graph.needs_grad
        )
        or (isinstance(made.get(source.name), Replicate) and source.name not in graph.needs_grad)
        for need, source in zip(choice.inputs, operands(node), strict=True)
    )


def by_sample(node: fx.Node, choice: Choice) -> bool:
    """Whether the output is sharded along an open dimension, or a sum over it."""
    (output, *_), value = choice.outputs, node.meta["val"]
    tensor = value[0] if isinstance(value, list | tuple) else value
    return (isinstance(output, Partial) and not tensor.dim()) or (
        isinstance(output, Shard) and isinstance(tensor.shape[output.dim], torch.SymInt)
    )
