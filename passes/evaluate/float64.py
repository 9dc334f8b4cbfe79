"""A model in float64, in the graph and in eager code: verification compares at 1e-9, below what 32 bits can hold.

Models cast inside (a norm in float32, a softmax with ``dtype=``). Both sides have every narrower floating type replaced
by float64, so no cast rounds, and the graph keeps the very ops that were planned.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode

from cost_models.precision import Precision
from passes.evaluate.copied_module import convert_module
from passes.graph.graph import OpGraph
from passes.graph.nodes import copy_graph
from runtime.ops.opaque import Opaque

WIDE = {
    torch.float32: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float16: torch.float64,
    torch.complex64: torch.complex128,
    torch.complex32: torch.complex128,
}


def widened(argument: Any) -> Any:
    """Return float64 (complex128) for a narrower floating (complex) type; anything else as it is."""
    return WIDE.get(argument, argument) if isinstance(argument, torch.dtype) else argument


def wide(tensor: Tensor) -> Tensor:
    """Cast a tensor to the wide type of its kind; itself if it has that or is of integers."""
    return tensor.to(widened(tensor.dtype))


def widen_module(model: nn.Module, device: torch.device | str | None = None) -> nn.Module:
    """Make parameters, buffers and tensors kept as plain attributes wide, in place. What is shared stays shared.

    ``device``: where they go, if not given where they are.
    """
    return convert_module(model, wide if device is None else lambda tensor: wide(tensor).to(device))


def in_float64(graph: OpGraph) -> OpGraph:
    """Let the same ops run in float64: casts to narrower floating types and the types of all values are widened."""
    module = fx.GraphModule(graph.module, copy_graph(graph.graph))
    for node in module.graph.nodes:
        node.meta = {**node.meta, "val": _wide_value(node.meta.get("val"))}
        if node.op == "call_function":
            if isinstance(node.target, Opaque):
                node.target = _wide_part(node.target)
            node.args = map_aggregate(node.args, widened)
            node.kwargs = map_aggregate(node.kwargs, widened)
    module.recompile()
    leaves = {n: replace(spec, dtype=widened(spec.dtype)) for n, spec in graph.batch.leaves.items()}
    constants = {name: wide(c) for name, c in graph.constants.items()}
    return replace(
        graph,
        module=module,
        precision=Precision(),
        constants=constants,
        batch=replace(graph.batch, leaves=leaves),
        parameters={n: replace(s, dtype=widened(s.dtype)) for n, s in graph.parameters.items()},
        buffers={n: replace(s, dtype=widened(s.dtype)) for n, s in graph.buffers.items()},
    )


def _wide_part(opaque: Opaque) -> Opaque:
    """Let the user's own code compute in float64, as the eager reference does."""
    target = opaque.code.target
    if isinstance(target, nn.Module):
        target = widen_module(copy.deepcopy(target))
    results = tuple(replace(result, dtype=widened(result.dtype)) for result in opaque.results)
    wide = replace(opaque, code=replace(opaque.code, target=target), results=results)
    return wide.within(float64_by_default, "wide").within(Float64, "float64")


def _wide_value(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_wide_value(item) for item in value)
    return wide(value) if isinstance(value, Tensor) else value


class Float64(TorchFunctionMode):
    """Within it, eager code that asks for a narrower floating type gets float64."""

    _CASTS = frozenset({Tensor.float, Tensor.half, Tensor.bfloat16})

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in self._CASTS:
            return args[0].double()
        options = {name: widened(value) for name, value in (kwargs or {}).items()}
        return func(*(widened(argument) for argument in args), **options)


def float64_by_default() -> AbstractContextManager[None]:
    """Make new tensors float64 unless code says otherwise."""
    return default_dtype(torch.float64)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make new tensors in ``dtype`` unless code says otherwise."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
