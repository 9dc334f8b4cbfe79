"""Token mean: divide by the whole batch's valid tokens, not by each micro-batch's own.

Before                                                 After
    %ce   = cross_entropy_loss(%logits, %targets)          %sum   = cross_entropy_loss(%logits, %targets, None, SUM)
    %loss = mul(%ce, 0.5)                                  %scale = select(%loss_normalizer, 0, 0)
                                                           %mul_1 = mul(%sum, %scale)
                                                           %loss  = mul(%mul_1, 0.5)

``loss_normalizer`` is one more batch leaf, (samples,), that whoever runs a step fills in (``passes.graph.token_counts``).
Where something else than the loss reads %ce (a metric), it goes on reading the micro-batch's own mean: %sum / valid
targets. Class weights: the denominator is Σ (valid targets of a class) · (its weight), counts from the batch, weights in
the graph. Metrics are multiplied by one more leaf, so that the weights of the losses make them a mean by valid tokens as
well. Losses in 16 bits are summed and divided in 32, where a sum over many tokens does not overflow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from passes.graph.graph import GraphInput, GraphOutput, tensor_specs
from passes.graph.nodes import argument, call, drop_dead_code, fake_call, fake_mode_of, quiet, value_of
from passes.graph.token_counts import Normalizer, TokenCounts
from passes.trace.build import Converted, used_inputs
from passes.trace.loss.terms import CROSS_ENTROPIES, NONE, SUM, LossTerm, LossTerms
from runtime.segment.code import BatchSpec

aten = torch.ops.aten

LEAF = "loss_normalizer"
CLASS_COUNTS = "loss_class_counts"
METRIC_SHARE = "loss_metric_share"


def token_mean(
    traced: Converted, spec: BatchSpec, found: LossTerms
) -> tuple[Converted, BatchSpec, TokenCounts]:
    """Rewrite every term of ``found``, the graph of ``traced`` in place. With the batch's extra leaves, and how these are
    filled.
    """
    graph = traced.module.graph
    leaves = _Leaves(traced, spec)
    normalizers = tuple(leaves.normalizer(term) for term in found.terms)
    module, names, constants = _counting(traced, [term.counted for term in found.terms])
    scaled: dict[fx.Node, fx.Node] = {}
    for term, normalizer in zip(found.terms, normalizers, strict=True):
        own, whole = _scaled(graph, term, normalizer, leaves.nodes)
        scaled[own] = whole
    for node in found.path:  # copied: a metric may go on reading the old one
        with graph.inserting_before(node.next):
            scaled[node] = graph.node_copy(node, lambda source: scaled.get(source, source))
    rest = tuple(node.name for node in (*found.sums, *found.others))
    outputs = _with_loss(traced, scaled)
    share = ""
    if any(entry.kind == "metric" for entry in outputs):
        share = leaves.metric_share()
        outputs = _with_shared_metrics(graph, outputs, leaves.nodes[share])
    drop_dead_code(graph)
    inputs = used_inputs(graph, {i.node: i for i in (*traced.inputs, *leaves.inputs)})
    graph.lint()
    traced.module.recompile()
    kept = {i.name for i in inputs if i.kind == "constant"}
    return (
        Converted(
            traced.module,
            inputs,
            outputs,
            {n: c for n, c in traced.constants.items() if n in kept},
            traced.views,
        ),
        _with_known_symbols(leaves.spec(), inputs, graph),
        TokenCounts(module, names, constants, normalizers, rest, share),
    )


class _Leaves:
    """Makes the placeholders of the extra batch leaves, after all others."""

    def __init__(self, traced: Converted, spec: BatchSpec) -> None:
        self.nodes: dict[str, fx.Node] = {}
        self.inputs: list[GraphInput] = []
        self._graph, self._before = traced.module.graph, spec
        self._dims: dict[str, int | None] = {}
        self._mode = fake_mode_of(self._graph)
        node_of = {i.name: i.node for i in traced.inputs if i.kind == "batch"}
        nodes = {node.name: node for node in self._graph.find_nodes(op="placeholder")}
        self._samples: Any = next(
            nodes[node_of[name]].meta["val"].shape[dim]
            for name, dim in spec.batch_dims.items()
            if dim is not None and name in node_of
        )

    def normalizer(self, term: LossTerm) -> Normalizer:
        """Make the leaf (or two) that ``term`` is scaled by."""
        dtype = _sum_dtype(term.node)
        leaf = self._add(LEAF, self._samples, 0, dtype)
        if term.node.target not in CROSS_ENTROPIES:
            return Normalizer(leaf, None)
        ignored = int(argument(term.node, "ignore_index", -100))
        weight = argument(term.node, "weight")
        if weight is None:
            return Normalizer(leaf, ignored)
        classes = int(weight.meta["val"].shape[0])
        return Normalizer(leaf, ignored, self._add(CLASS_COUNTS, classes, None, dtype), classes)

    def metric_share(self) -> str:
        """Name the leaf that metrics are scaled by."""
        return self._add(METRIC_SHARE, self._samples, 0, torch.float64)

    def spec(self) -> BatchSpec:
        """Return the batch with the new leaves."""
        return replace(
            self._before,
            batch_dims={**self._before.batch_dims, **self._dims},
            leaves={**self._before.leaves, **{n: tensor_specs(self.nodes[n])[0] for n in self._dims}},
        )

    def _add(self, name: str, size: Any, dim: int | None, dtype: torch.dtype) -> str:
        taken, number = {*self._before.batch_dims, *self._dims}, 0
        unique = name
        while unique in taken:
            number += 1
            unique = f"{name}_{number}"
        last = list(self._graph.find_nodes(op="placeholder"))[-1]
        assert self._mode is not None
        with self._graph.inserting_before(last.next):
            node = self._graph.placeholder(unique)
        with quiet(self._mode):
            value = torch.empty((size,), dtype=dtype, device="cpu")
        node.meta.update(val=value, module_path="", source="")
        self._dims[unique] = dim
        self.nodes[unique] = node
        self.inputs.append(GraphInput(node.name, "batch", unique))
        return unique


def _sum_dtype(node: fx.Node) -> torch.dtype:
    """Choose the type that a sum over tokens is computed in."""
    dtype: torch.dtype = node.meta["val"].dtype
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _scaled(
    graph: fx.Graph, term: LossTerm, normalizer: Normalizer, leaves: Mapping[str, fx.Node]
) -> tuple[fx.Node, fx.Node]:
    """Scale a term: (the term as its readers have it, the same as part of the whole batch's mean).

    A cross-entropy becomes a sum in place; its readers get this micro-batch's own mean.
    """
    node, mode = term.node, fake_mode_of(graph)
    dtype, readers = node.meta["val"].dtype, set(node.users)
    with graph.inserting_before(node.next):
        total, own = _sum_over_tokens(graph, node), node
        if node.target in CROSS_ENTROPIES:
            own = _own_mean(graph, term, total, dtype)
            node.replace_all_uses_with(own, delete_user_cb=readers.__contains__)
        scale = call(graph, mode, aten.select.int, (leaves[normalizer.leaf], 0, 0), like=node)
        if normalizer.class_counts:
            weight = argument(node, "weight")
            per_class = call(
                graph, mode, aten.mul.Tensor, (leaves[normalizer.class_counts], weight), like=node
            )
            whole = call(graph, mode, aten.sum.default, (per_class,), like=node)
            scale = call(graph, mode, aten.div.Tensor, (scale, whole), like=node)
        result = call(graph, mode, aten.mul.Tensor, (total, scale), like=node)
        return own, _cast(graph, result, dtype)


def _sum_over_tokens(graph: fx.Graph, node: fx.Node) -> fx.Node:
    mode = fake_mode_of(graph)
    if node.target not in CROSS_ENTROPIES:
        numerator = node.args[0]
        assert isinstance(numerator, fx.Node)
        dtype = _sum_dtype(node)
        if numerator.meta["val"].dtype == dtype:
            return numerator
        return call(graph, mode, aten.to.dtype, (numerator, dtype), like=node)
    dtype = node.meta["val"].dtype
    narrow = _sum_dtype(node) != dtype
    assert isinstance(node.target, torch._ops.OpOverload)
    arguments = {a.name: argument(node, a.name) for a in node.target._schema.arguments}
    arguments["reduction"] = NONE if narrow else SUM
    node.args, node.kwargs = tuple(arguments.values()), {}
    node.meta["val"] = fake_call(mode, node.target, value_of(node.args), {})
    if not narrow:
        return node
    wide = call(graph, mode, aten.to.dtype, (node, _sum_dtype(node)), like=node)
    return call(graph, mode, aten.sum.default, (wide,), like=node)


def _cast(graph: fx.Graph, result: fx.Node, dtype: torch.dtype) -> fx.Node:
    if result.meta["val"].dtype == dtype:
        return result
    return call(graph, fake_mode_of(graph), aten.to.dtype, (result, dtype), like=result)


def _own_mean(graph: fx.Graph, term: LossTerm, total: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Make the micro-batch's own mean from the sum over its tokens."""
    node, mode = term.node, fake_mode_of(graph)
    targets, weight = term.counted, argument(node, "weight")
    valid = call(graph, mode, aten.ne.Scalar, (targets, argument(node, "ignore_index", -100)), like=node)
    if weight is not None:
        classes = call(graph, mode, aten.mul.Tensor, (targets, valid), like=node)
        flat = call(graph, mode, aten.reshape.default, (classes, [-1]), like=node)
        mask = call(graph, mode, aten.reshape.default, (valid, [-1]), like=node)
        own = call(graph, mode, aten.index_select.default, (weight, 0, flat), like=node)
        valid = call(graph, mode, aten.mul.Tensor, (own, mask), like=node)
    count = call(graph, mode, aten.sum.default, (valid,), like=node)
    mean = call(graph, mode, aten.div.Tensor, (total, count), like=node)
    return _cast(graph, mean, dtype)


def _with_loss(traced: Converted, scaled: Mapping[fx.Node, fx.Node]) -> tuple[GraphOutput, ...]:
    """Return the outputs with the loss's new node; the graph's output op is changed."""
    output = traced.module.graph.output_node()
    values: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    outputs = list(traced.outputs)
    for index, entry in enumerate(outputs):
        if entry.kind == "loss":
            values[index] = scaled[values[index]]
        outputs[index] = replace(entry, node=values[index].name)
    output.args = (tuple(values),)
    return tuple(outputs)


def _with_shared_metrics(
    graph: fx.Graph, outputs: tuple[GraphOutput, ...], leaf: fx.Node
) -> tuple[GraphOutput, ...]:
    """Weigh metrics by valid tokens: times (micro-batch's share of the tokens / its share of the samples).

    A micro-batch without any counts 0, whatever its own value (0/0, often).
    """
    output, mode = graph.output_node(), fake_mode_of(graph)
    values: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    result = list(outputs)
    for index, entry in enumerate(outputs):
        if entry.kind != "metric":
            continue
        node = values[index]
        with graph.inserting_before(output):
            share = call(graph, mode, aten.select.int, (leaf, 0, 0), like=node)
            scaled = call(graph, mode, aten.mul.Tensor, (node, share), like=node)
            empty = call(graph, mode, aten.eq.Scalar, (share, 0), like=node)
            values[index] = call(graph, mode, aten.masked_fill.Scalar, (scaled, empty, 0), like=node)
        result[index] = replace(entry, node=values[index].name)
    output.args = (tuple(values),)
    return tuple(result)


def _with_known_symbols(spec: BatchSpec, inputs: tuple[GraphInput, ...], graph: fx.Graph) -> BatchSpec:
    """Read sizes from leaves that the graph still has."""
    used = {i.name for i in inputs if i.kind == "batch"}
    symbols = {symbol: place for symbol, place in spec.symbols.items() if place[0] in used}
    for name in used:
        for dim, size in enumerate(spec.leaves[name].shape):
            if size in spec.symbols or size == spec.batch_symbol:
                symbols.setdefault(size, (name, dim))
    return replace(spec, symbols=symbols)


def _counting(
    traced: Converted, wanted: list[fx.Node]
) -> tuple[fx.GraphModule, tuple[str, ...], dict[str, torch.Tensor]]:
    """Cut out the part of the graph that makes ``wanted`` out of batch leaves and constants; their names."""
    needed: set[fx.Node] = set()
    waiting = list(wanted)
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += node.all_input_nodes
    what = {i.node: i for i in traced.inputs}
    order = [node for node in traced.module.graph.nodes if node in needed]
    placeholders = [node for node in order if node.op == "placeholder"]
    placeholders.sort(key=lambda node: what[node.name].kind != "batch")
    new = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {node: new.placeholder(node.name) for node in placeholders}
    for node in order:
        if node.op != "placeholder":
            copies[node] = new.node_copy(node, copies.__getitem__)
            copies[node].meta = {}
    new.output(tuple(copies[node] for node in wanted))
    leaves = tuple(what[n.name].name for n in placeholders if what[n.name].kind == "batch")
    constants = {
        what[n.name].name: traced.constants[what[n.name].name]
        for n in placeholders
        if what[n.name].kind == "constant"
    }
    return fx.GraphModule(torch.nn.Module(), new), leaves, constants
