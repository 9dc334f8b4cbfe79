"""Token mean: each term of the loss is the whole batch's, whatever its micro-batches.

Before                                                 After
    %ce   = cross_entropy_loss(%logits, %targets)          %sum   = cross_entropy_loss(%logits, %targets, None, SUM)
    %loss = mul(%ce, 0.5)                                  %scale = select(%loss_normalizer, 0, 0)
                                                           %mul_1 = mul(%sum, %scale)
                                                           %loss  = mul(%mul_1, 0.5)

``loss_normalizer`` is one more batch leaf, (samples,), that whoever runs a step fills in (``passes.graph.token_counts``).
Where something else than the loss reads %ce (a metric), it goes on reading the micro-batch's own mean: %sum / valid
targets. Class weights: the denominator is Σ (valid targets of a class) · (its weight), counts from the batch, weights in
the graph. A sum over samples beside means is multiplied by ``loss_inverse_share``, as micro-batches are weighed by their
samples. Metrics are multiplied by one more leaf, so that the weights of the losses make them a mean by valid tokens as
well. Losses in 16 bits are summed and divided in 32, where a sum over many tokens does not overflow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from passes.graph.graph import GraphOutput
from passes.graph.nodes import (
    argument,
    call,
    drop_dead_code,
    fake_call,
    fake_mode_of,
    nodes_in,
    op_name,
    value_of,
)
from passes.graph.token_counts import Normalizer, TokenCounts
from passes.trace.build import Converted
from passes.trace.loss.leaves import MadeLeaves
from passes.trace.loss.terms import NONE, SUM, LabelMean, LossTerms
from runtime.segment.code import BatchSpec

aten = torch.ops.aten

LEAF = "loss_normalizer"
CLASS_COUNTS = "loss_class_counts"
METRIC_SHARE = "loss_metric_share"
INVERSE_SHARE = "loss_inverse_share"


def token_mean(
    traced: Converted, leaves: MadeLeaves, totals: Mapping[str, fx.Node], found: LossTerms
) -> tuple[Converted, BatchSpec, TokenCounts]:
    """Rewrite every mean and every sum of ``found``, the graph of ``traced`` in place. With the batch's further leaves, and
    how these are filled. ``totals``: the node of the micro-batch's own, by leaf (``passes.trace.loss.totals``).
    """
    graph = traced.module.graph
    normalizers = tuple(_normalizer(mean, leaves) for mean in found.means)
    instead = {leaves.nodes[leaf]: node for leaf, node in totals.items()}
    module, names, constants = _counting(traced, found.means, totals, instead)
    scaled: dict[fx.Node, fx.Node] = {}
    for mean, normalizer in zip(found.means, normalizers, strict=True):
        own, whole = _scaled(graph, mean, normalizer, leaves.nodes)
        scaled[own] = whole
    shares: dict[torch.dtype, str] = {}
    for node in found.sums:
        dtype = _sum_dtype(node)
        if dtype not in shares:
            shares[dtype] = leaves.per_sample(INVERSE_SHARE, dtype)
        scaled[node] = _as_part(graph, node, leaves.nodes[shares[dtype]])
    for node in found.path:  # copied: a metric may go on reading the old one
        with graph.inserting_before(node.next):
            scaled[node] = graph.node_copy(node, lambda source: scaled.get(source, source))
    outputs = _with_loss(traced, scaled)
    share, by = "", _shared_by(found, totals)
    if by is not None and any(entry.kind == "metric" for entry in outputs):
        share = leaves.per_sample(METRIC_SHARE, torch.float64)
        outputs = _with_shared_metrics(graph, outputs, leaves.nodes[share])
    drop_dead_code(graph)
    inputs, spec = leaves.used()
    graph.lint()
    traced.module.recompile()
    kept = {i.name for i in inputs if i.kind == "constant"}
    used = {n: c for n, c in traced.constants.items() if n in kept}
    counts = TokenCounts(
        module, names, constants, normalizers, tuple(totals), tuple(shares.values()), share, by
    )
    return Converted(traced.module, inputs, outputs, used, traced.views), spec, counts


def _normalizer(mean: LabelMean, leaves: MadeLeaves) -> Normalizer:
    """Make the leaf (or two) that a mean is scaled by."""
    dtype, weight = _sum_dtype(mean.node), argument(mean.node, "weight")
    leaf = leaves.per_sample(LEAF, dtype)
    ignored = argument(mean.node, "ignore_index")
    if weight is None:
        return Normalizer(leaf, None if isinstance(ignored, fx.Node) else int(ignored))
    classes = int(weight.meta["val"].shape[0])
    return Normalizer(leaf, int(ignored), leaves.whole(CLASS_COUNTS, (classes,), dtype), classes)


def _shared_by(found: LossTerms, totals: Mapping[str, fx.Node]) -> int | None:
    """Number, among what is counted, that by which metrics are weighed; None: by samples."""
    if found.means:
        return 0
    sums = (
        n for n, node in enumerate(totals.values()) if op_name(node) == "sum" and not node.meta["val"].dim()
    )
    return next(sums, None)


def _as_part(graph: fx.Graph, node: fx.Node, leaf: fx.Node) -> fx.Node:
    """Multiply a sum over samples by the inverse of its micro-batch's share."""
    mode, dtype, wide = fake_mode_of(graph), node.meta["val"].dtype, leaf.meta["val"].dtype
    with graph.inserting_before(node.next):
        total = _cast(graph, node, wide)
        scale = call(graph, mode, aten.select.int, (leaf, 0, 0), like=node)
        return _cast(graph, call(graph, mode, aten.mul.Tensor, (total, scale), like=node), dtype)


def _sum_dtype(node: fx.Node) -> torch.dtype:
    """Choose the type that a sum over tokens is computed in."""
    dtype: torch.dtype = node.meta["val"].dtype
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _scaled(
    graph: fx.Graph, mean: LabelMean, normalizer: Normalizer, leaves: Mapping[str, fx.Node]
) -> tuple[fx.Node, fx.Node]:
    """Scale a mean: (the mean as its readers have it, the same as part of the whole batch's).

    The cross-entropy becomes a sum in place; its readers get this micro-batch's own mean.
    """
    node, mode = mean.node, fake_mode_of(graph)
    dtype, readers = node.meta["val"].dtype, set(node.users)
    with graph.inserting_before(node.next):
        total = _sum_over_tokens(graph, node)
        own = _own_mean(graph, mean, total, dtype)
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


def _own_mean(graph: fx.Graph, mean: LabelMean, total: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Make the micro-batch's own mean from the sum over its tokens."""
    node, mode = mean.node, fake_mode_of(graph)
    targets, weight = mean.targets, argument(node, "weight")
    valid = call(graph, mode, aten.ne.Scalar, (targets, argument(node, "ignore_index", -100)), like=node)
    if weight is not None:
        classes = call(graph, mode, aten.mul.Tensor, (targets, valid), like=node)
        flat = call(graph, mode, aten.reshape.default, (classes, [-1]), like=node)
        mask = call(graph, mode, aten.reshape.default, (valid, [-1]), like=node)
        own = call(graph, mode, aten.index_select.default, (weight, 0, flat), like=node)
        valid = call(graph, mode, aten.mul.Tensor, (own, mask), like=node)
    count = call(graph, mode, aten.sum.default, (valid,), like=node)
    result = call(graph, mode, aten.div.Tensor, (total, count), like=node)
    return _cast(graph, result, dtype)


def _with_loss(traced: Converted, scaled: Mapping[fx.Node, fx.Node]) -> tuple[GraphOutput, ...]:
    """Return the outputs with the loss's new node; the graph's output op is changed."""
    output = traced.module.graph.output_node()
    values: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    outputs = list(traced.outputs)
    for index, entry in enumerate(outputs):
        if entry.kind == "loss":
            values[index] = scaled.get(values[index], values[index])
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


def _counting(
    traced: Converted,
    means: Sequence[LabelMean],
    totals: Mapping[str, fx.Node],
    instead: Mapping[fx.Node, fx.Node],
) -> tuple[fx.GraphModule, tuple[str, ...], dict[str, torch.Tensor]]:
    """Cut out the part of the graph that makes targets and totals out of batch leaves and constants; their names.

    ``instead``: what totals are made by, where targets read their leaves.
    """
    ignored = [argument(mean.node, "ignore_index") for mean in means]
    needed: set[fx.Node] = set()
    waiting = [*(mean.targets for mean in means), *nodes_in(ignored), *totals.values()]
    while waiting:
        node = waiting.pop()
        node = instead.get(node, node)
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
            copies[node] = new.node_copy(node, lambda source: copies[instead.get(source, source)])
            copies[node].meta = {}
    results = [copies[mean.targets] for mean in means]
    for place, index in enumerate(ignored):
        if isinstance(
            index, fx.Node
        ):  # a size, such as the length of the sequence: the valid targets are told here
            results[place] = new.call_function(aten.ne.Scalar, (results[place], copies[index]))
    new.output((*results, *(copies[node] for node in totals.values())))
    leaves = tuple(what[n.name].name for n in placeholders if what[n.name].kind == "batch")
    constants = {
        what[n.name].name: traced.constants[what[n.name].name]
        for n in placeholders
        if what[n.name].kind == "constant"
    }
    return fx.GraphModule(torch.nn.Module(), new), leaves, constants
