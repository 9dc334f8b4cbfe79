"""Helpers of the trace tests: small models, and running a traced graph beside the model it came from."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

from torch import Tensor, nn

from benchmarks.feature_matrix import load
from partitioner.models.bundled import bundled
from partitioner.models.workload import Workload
from passes.graph.graph import OpGraph
from passes.trace.batch import flatten_batch, forward_arguments, forward_names, map_tensors
from passes.trace.loss.reduction import with_normalizers
from passes.trace.trace import trace

loaded = cache(load)
"""A model of the matrices and its trace, made once in a process: for tests that change neither."""


def run(graph: OpGraph, model: nn.Module, batch: Any) -> tuple[Tensor, ...]:
    """The graph's outputs on the model's own state and ``batch``, taken as one micro-batch."""
    sources = {
        "parameter": dict(model.named_parameters(remove_duplicate=False)),
        "buffer": dict(model.named_buffers(remove_duplicate=False)),
        "constant": graph.constants,
        "batch": with_normalizers(graph, flatten_batch(batch, forward_names(model)), 1),
    }
    return graph.module(*[sources[i.kind][i.name] for i in graph.inputs])


def eager_loss(workload: Workload, batch: Any) -> Tensor:
    args, kwargs = forward_arguments(workload.model, batch, workload.loss_fn is not None)
    output = workload.model(*args, **kwargs)
    return (
        workload.loss_fn(output, batch)
        if workload.loss_fn
        else output
        if isinstance(output, Tensor)
        else output.loss
    )


def to_double(batch: Any) -> Any:
    return map_tensors(batch, lambda path, leaf: leaf.double() if leaf.is_floating_point() else leaf)


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "attention_dropout", "activation_dropout", "dropout_rate"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def small(name: str, batch: int = 2, seed: int = 0) -> Workload:
    """A bundled model with two layers in float64."""
    workload = bundled(name, size="tiny", dtype="float64", layers=2, seq=8, batch=batch, seed=seed)
    without_dropout(workload.model)
    return workload


@lru_cache(maxsize=1)
def small_gpt2() -> tuple[Workload, OpGraph]:
    workload = small("gpt2")
    return workload, trace(workload.model, workload.example_inputs)
