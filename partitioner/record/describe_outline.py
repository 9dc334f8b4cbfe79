"""Records for pictures alone: the outline of a model with what its ops cost, and what devices' state is made of."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import sympy
import torch
from torch import fx

from cost_models.compute import ComputeDevice
from cost_models.memory import StateBytes
from partitioner.record.outline import ModelOutline, OutlineInput, OutlineKind
from partitioner.record.records import StateKind
from passes.costs.costs import GraphCosts
from passes.graph.graph import GraphInput, OpGraph, tensor_specs
from passes.shard.words import operands
from runtime.segment.code import TensorSpec

KeyT = TypeVar("KeyT", bound=Hashable)
OpAmounts = tuple[float, float, float, float, float, float]
"""An op's FLOPs forward and backward, bytes that it makes and keeps, and seconds forward and backward."""


def op_amounts(costs: GraphCosts, samples: int, device: ComputeDevice) -> Iterator[OpAmounts]:
    """Yield the amounts of each op, for micro-batches of ``samples`` on ``device``."""
    work, seconds = costs.at(samples), costs.seconds(samples, device)
    exact, sizes = costs.exact(samples), costs.exact(samples).storage_bytes(samples)
    yield from zip(
        work.forward_flops.tolist(),
        (work.backward_input_flops + work.backward_weight_flops).tolist(),
        work.output_bytes.tolist(),
        (sum(sizes.get(name, 0) for name in names) for names in exact.saved),
        seconds.forward.tolist(),
        (seconds.backward_input + seconds.backward_weight).tolist(),
        strict=True,
    )


def describe_outline(
    graph: OpGraph, samples: int, amounts: Iterable[OpAmounts] | None = None
) -> ModelOutline:
    """Write down ``graph`` for pictures of micro-batches of ``samples``. Without ``amounts``, ops cost nothing."""
    symbols = {**graph.example_sizes, graph.batch.batch_symbol: samples}
    if amounts is None:
        amounts = ((0.0, 0.0, _output_bytes(node, symbols), 0, 0.0, 0.0) for node in graph.ops)
    modules: dict[str, int] = {}
    sources: dict[str, int] = {}
    kinds: dict[tuple[Any, ...], int] = {}
    number = {node.name: index for index, node in enumerate(graph.ops)}
    number |= {given.node: -1 - index for index, given in enumerate(graph.inputs)}
    kind_of, module_of, source_of, reads = [], [], [], []
    for node, own in zip(graph.ops, amounts, strict=True):
        spec = _first_result(node, symbols)
        shape = () if spec is None else spec.concrete(symbols)
        dtype = "" if spec is None else str(spec.dtype).removeprefix("torch.")
        kind_of.append(_number(kinds, (_op_name(node), shape, dtype, *own)))
        module_of.append(_number(modules, str(node.meta.get("module_path", ""))))
        source_of.append(_number(sources, str(node.meta.get("source", ""))))
        tensors = operands(node)  # in the order of the needs of a sharded op; sizes behind them
        others = [source for source in node.all_input_nodes if source not in tensors]
        reads.append([number[source.name] for source in (*tensors, *others)])
    for path in [*modules]:
        for end, letter in enumerate(path):
            if letter == ".":
                _number(modules, path[:end])
    _number(modules, "")
    classes: dict[str, int] = {}
    kinds_of_modules = [graph.module_classes.get(path) for path in modules]
    class_of = [-1 if kind is None else _number(classes, kind) for kind in kinds_of_modules]
    return ModelOutline(
        modules=tuple(modules),
        classes=tuple(classes),
        class_of=tuple(class_of),
        sources=tuple(sources),
        kinds=tuple(
            OutlineKind(op=op, shape=shape, dtype=dtype, forward_flops=forward, backward_flops=backward,
                   output_bytes=int(size), saved_bytes=int(kept), forward_seconds=there, backward_seconds=back)
            for op, shape, dtype, forward, backward, size, kept, there, back in kinds
        ),
        inputs=tuple(_input(graph, given, symbols) for given in graph.inputs),
        names=tuple(node.name for node in graph.ops),
        kind_of=tuple(kind_of),
        module_of=tuple(module_of),
        source_of=tuple(source_of),
        read_counts=tuple(map(len, reads)),
        reads=tuple(read for own in reads for read in own),
    )  # fmt: skip


def _number(known: dict[KeyT, int], key: KeyT) -> int:
    """Return the number of ``key``, a new one where it has none yet."""
    return known.setdefault(key, len(known))


def _first_result(node: fx.Node, symbols: Mapping[sympy.Symbol, int]) -> TensorSpec | None:
    """Return shape and type of the first tensor that a node makes; None if it makes none, or its data decides the size."""
    spec = next(iter(tensor_specs(node)), None)
    dims = () if spec is None else spec.shape
    unknown = {s for dim in dims if not isinstance(dim, int) for s in dim.free_symbols}.difference(symbols)
    return None if unknown else spec


def _op_name(node: fx.Node) -> str:
    """Name an op: aten.linear.default, getitem."""
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target)
    return str(getattr(node.target, "__name__", node.target))


def _output_bytes(node: fx.Node, symbols: Mapping[sympy.Symbol, int]) -> int:
    spec = _first_result(node, symbols)
    return 0 if spec is None else spec.size_bytes(symbols)


def _input(graph: OpGraph, given: GraphInput, symbols: Mapping[sympy.Symbol, int]) -> OutlineInput:
    spec = _first_result(graph.nodes[given.node], symbols) or TensorSpec((), torch.int64)
    return OutlineInput(
        kind=given.kind, name=given.name, shape=spec.concrete(symbols), size_bytes=spec.size_bytes(symbols)
    )


def describe_state(state: Sequence[StateBytes]) -> dict[StateKind, dict[str, int]]:
    """Return the bytes of each kind of state, by rank."""
    return {
        "parameters": {str(rank): own.parameters for rank, own in enumerate(state)},
        "gradients": {str(rank): own.gradients for rank, own in enumerate(state)},
        "optimizer": {str(rank): own.optimizer_state + own.owners for rank, own in enumerate(state)},
        "batch": {str(rank): own.batch for rank, own in enumerate(state)},
    }
