"""Runs a graph and its split form on the same numbers, and compares everything that comes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from passes.copies.float64 import in_float64, widen_module
from passes.graph.graph import OpGraph
from passes.graph.verify import verify_graph
from passes.split.split import Split, split_neurons
from passes.trace.batch import flatten_batch, forward_names
from passes.trace.loss.reduction import with_normalizers
from passes.trace.trace import trace
from tests.support.traced_models import to_double

RELATIVE = 1e-12
ABSOLUTE = 1e-15
"""Of the norm of all gradients: some are zero but for rounding (the biases of attention's keys)."""


@dataclass(frozen=True)
class Outcome:
    """``gradients`` and ``buffers`` by the model's own names, parts put together."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def outcome(graph: OpGraph, state: Mapping[str, Tensor], leaves: Mapping[str, Tensor]) -> Outcome:
    """Run ``graph`` on whole tensors ``state``, of which it takes its parts, and differentiate its loss."""
    held: dict[str, Tensor] = {}
    for name, spec in {**graph.parameters, **graph.buffers}.items():
        part = graph.parts.get(name)
        value = state[name] if part is None else part.block.of(state[part.whole])
        assert tuple(value.shape) == spec.shape, name
        held[name] = value.detach().clone().requires_grad_(spec.requires_grad)
    sources = {"parameter": held, "buffer": held, "constant": graph.constants, "batch": leaves}
    torch.manual_seed(0)
    results = graph.module(*[sources[i.kind][i.name] for i in graph.inputs])
    kinds = [output.kind for output in graph.outputs]
    if "loss" in kinds and (loss := results[kinds.index("loss")]).requires_grad:
        loss.backward()
    outputs: dict[str, Tensor] = {}
    for output, result in zip(graph.outputs, results, strict=True):
        if output.kind == "buffer":
            held[output.name] = result
        else:
            outputs[f"{output.kind} {output.name}"] = result
    trained = {n: held[n].grad for n, spec in graph.parameters.items() if spec.requires_grad}
    gradients = {n: torch.zeros_like(held[n]) if g is None else g for n, g in trained.items()}
    return Outcome(
        outputs,
        _put_together(graph, state, gradients),
        _put_together(graph, state, {n: held[n] for n in graph.buffers}),
    )


def _put_together(
    graph: OpGraph, state: Mapping[str, Tensor], found: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    wholes: dict[str, Tensor] = {}
    for name, value in found.items():
        part = graph.parts.get(name)
        if part is None:
            wholes[name] = value
        else:
            whole = wholes.setdefault(part.whole, torch.full_like(state[part.whole], float("nan")))
            part.block.of(whole).copy_(value.detach())
    return wholes


def check(
    graph: OpGraph, splits: Sequence[Split], state: Mapping[str, Tensor], leaves: Mapping[str, Tensor]
) -> OpGraph:
    """The split graph, which was found to compute the same."""
    before = str(graph.graph)
    made = split_neurons(graph, splits)
    assert str(graph.graph) == before
    verify_graph(made, after="split")
    assert_same(outcome(graph, state, leaves), outcome(made, state, leaves))
    kept = {name: getattr(graph, name) for name in ("aliases", "batch", "fingerprint", "notes", "constants")}
    assert all(getattr(made, name) is value for name, value in kept.items())
    return made


def assert_same(expected: Outcome, found: Outcome) -> None:
    assert expected.outputs.keys() == found.outputs.keys()
    assert expected.gradients.keys() == found.gradients.keys()
    assert expected.buffers.keys() == found.buffers.keys()
    everything = sum(float(g.norm()) ** 2 for g in expected.gradients.values()) ** 0.5
    for table, other, floor in (
        (expected.outputs, found.outputs, 0.0),
        (expected.gradients, found.gradients, ABSOLUTE * everything),
        (expected.buffers, found.buffers, 0.0),
    ):
        for name, value in table.items():
            assert value.dtype == other[name].dtype, name
            difference = float((value.detach().double() - other[name].detach().double()).norm())
            allowed = max(RELATIVE * float(value.detach().double().norm()), floor)
            assert difference <= allowed, f"{name}: {difference} > {allowed}"


def traced(
    model: nn.Module, batch: Any, loss_fn: Any = None, training: bool = True
) -> tuple[OpGraph, dict[str, Tensor], dict[str, Tensor]]:
    """A model's graph in float64 throughout, its state by name, and the leaves of a batch."""
    widen_module(model)
    batch = to_double(batch)
    graph = in_float64(trace(model, batch, loss_fn=loss_fn, training=training))
    state = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    leaves = with_normalizers(graph, flatten_batch(batch, forward_names(model)), 1)
    return graph, state, dict(leaves)


def ops(graph: OpGraph, target: Any) -> list[str]:
    """Names of the ops that call ``target``."""
    return [node.name for node in graph.ops if node.target is target]
