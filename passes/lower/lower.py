"""Lower: one ``fx.GraphModule`` per segment, with tables of where inputs come from and outputs go.

segment 1 of a two-stage MLP, before and after
    %relu = relu(%addmm)            # segment 0        def forward(self, relu, fc2_weight, batch_y):
    %linear = linear(%relu, %w2)    # segment 1            linear = aten.linear(relu, fc2_weight)
    %loss = mse_loss(%linear, %y)   # segment 1            return (aten.mse_loss(linear, batch_y),)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import fx

from cost_models.errors import InternalError
from passes.graph.graph import OpGraph, tensor_specs
from passes.graph.nodes import relocated
from passes.graph.recomputed import draws_random_numbers
from passes.lower.segment import Segmentation
from runtime.segment.code import SegmentCode, SegmentInput, SegmentOutput, TensorSpec


def lower(
    graph: OpGraph, segmentation: Segmentation, *, device: str = "cpu", only: frozenset[int] | None = None
) -> dict[int, SegmentCode]:
    """Code of every segment (or of those in ``only``), for ``device``.

    ``device=`` arguments that the trace baked into factory ops are rewritten to ``device``.
    """
    crossing = crossing_values(graph, segmentation)
    members: dict[int, list[fx.Node]] = defaultdict(list)
    for node in graph.ops:
        if node.name in segmentation.segment_of:
            members[segmentation.segment_of[node.name]].append(node)
    wanted = range(len(segmentation)) if only is None else sorted(only)
    return {
        index: _lower_segment(graph, segmentation, crossing, index, members[index], device)
        for index in wanted
    }


def crossing_values(graph: OpGraph, segmentation: Segmentation) -> dict[str, tuple[int, ...]]:
    """Consumer segments of each value that leaves its segment, by value name, in the order of production."""
    segment_of = segmentation.segment_of
    crossing: dict[str, tuple[int, ...]] = {}
    for node in graph.ops:
        if node.name not in segment_of:
            continue
        consumers = {segment_of[u.name] for u in node.users if u.name in segment_of} - {segment_of[node.name]}
        if consumers:
            crossing[node.name] = tuple(sorted(consumers))
    return crossing


def _lower_segment(
    graph: OpGraph,
    segmentation: Segmentation,
    crossing: Mapping[str, tuple[int, ...]],
    index: int,
    members: list[fx.Node],
    device: str,
) -> SegmentCode:
    body = _with_recomputed(members, segmentation.recomputed, graph)
    own = {node.name for node in body}
    order = {name: position for position, name in enumerate(graph.nodes)}
    outside = {source.name for node in body for source in node.all_input_nodes if source.name not in own}

    new = fx.Graph()
    environment: dict[str, fx.Node] = {}
    inputs: list[SegmentInput] = []
    for name in sorted(outside, key=order.__getitem__):
        environment[name] = new.placeholder(name)
        environment[name].meta = dict(graph.nodes[name].meta)
        inputs.append(_input(graph, name))
    for node in body:
        copy = new.node_copy(node, lambda source: environment[source.name])
        environment[node.name] = relocated(copy, torch.device(device))

    outputs: list[SegmentOutput] = []
    returned: list[fx.Node] = []
    produced: dict[str, TensorSpec] = {}
    for node in body:
        if node.name in crossing and segmentation.segment_of.get(node.name) == index:
            outputs.append(SegmentOutput("value", node.name, node.name in graph.needs_grad))
            returned.append(environment[node.name])
            produced[node.name] = value_spec(graph, node.name)
    for output in graph.outputs:
        if segmentation.segment_of.get(output.node) == index:
            needs_grad = output.node in graph.needs_grad
            outputs.append(SegmentOutput(output.kind, output.name, needs_grad, output.once))
            returned.append(environment[output.node])
            if output.kind == "value":
                produced[output.name] = value_spec(graph, output.node)
    new.output(tuple(returned))
    module = fx.GraphModule(torch.nn.Module(), new, class_name=f"Segment{index}")

    received = {i.name: value_spec(graph, i.name) for i in inputs if i.kind == "value"}
    return SegmentCode(
        index=index,
        module=module,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        values=received | produced,
        random=any(map(draws_random_numbers, body)),
        mesh=segmentation.mesh_of(index),
        recomputed=segmentation.regions_of(index),
    )


def value_spec(graph: OpGraph, name: str) -> TensorSpec:
    """Shape and dtype of a value that crosses segments; only tensors can."""
    specs = tensor_specs(graph.nodes[name])
    if len(specs) != 1 or isinstance(graph.nodes[name].meta["val"], list | tuple):
        raise InternalError(f"lower: {name} crosses segments but is not one tensor")
    return specs[0]


def _with_recomputed(members: list[fx.Node], recomputed: frozenset[str], graph: OpGraph) -> list[fx.Node]:
    """``members`` and the recomputed ops they need, in graph order."""
    wanted = {node.name for node in members}
    pending = list(members)
    while pending:
        for source in pending.pop().all_input_nodes:
            if source.name in recomputed and source.name not in wanted:
                wanted.add(source.name)
                pending.append(source)
    return [node for node in graph.ops if node.name in wanted]


def _input(graph: OpGraph, name: str) -> SegmentInput:
    placeholder = graph.input_of.get(name)
    if placeholder is None:
        return SegmentInput("value", name, name in graph.needs_grad)
    return SegmentInput(placeholder.kind, placeholder.name, placeholder.needs_grad)
