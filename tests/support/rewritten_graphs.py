"""What the pass tests share: export a model, run its rewritten graph in any order that its data edges allow."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from passes.trace.normal.functional import functionalize
from passes.trace.normal.simplify import simplify


@dataclass
class Exported:
    """An exported model. ``graph`` takes parameters, buffers, constants and inputs as placeholders."""

    model: nn.Module
    program: torch.export.ExportedProgram
    buffers: dict[str, str]

    @property
    def graph(self) -> fx.GraphModule:
        return self.program.graph_module


def export(
    model: nn.Module, inputs: Mapping[str, torch.Tensor], dims: Mapping[str, int | None] | None = None
) -> Exported:
    """Export with a symbolic batch dimension (0 of every input unless ``dims`` says otherwise)."""
    batch = torch.export.Dim("batch")
    shapes = {name: None if dims and dims.get(name, 0) is None else {0: batch} for name in inputs}
    dynamic: Any = shapes
    program = torch.export.export(model, (), dict(inputs), strict=False, dynamic_shapes=dynamic)
    buffers = {
        spec.arg.name: spec.target
        for spec in program.graph_signature.input_specs
        if spec.kind is torch.export.graph_signature.InputKind.BUFFER and spec.target is not None
    }
    return Exported(model, program, buffers)  # type: ignore[arg-type]


def lowered(exported: Exported) -> tuple[fx.GraphModule, dict[str, str]]:
    return functionalize(simplify(exported.graph), exported.buffers)


def shuffled_order(graph: fx.Graph, seed: int) -> list[fx.Node]:
    """A random order of the nodes that respects data edges and nothing else."""
    chance = random.Random(seed)
    missing = {node: len(node.all_input_nodes) for node in graph.nodes}
    ready = [node for node, count in missing.items() if count == 0]
    order = []
    while ready:
        node = ready.pop(chance.randrange(len(ready)))
        order.append(node)
        for user in node.users:
            missing[user] -= 1
            if missing[user] == 0:
                ready.append(user)
    assert len(order) == len(missing)
    return order


@dataclass
class Run:
    outputs: Any
    values: dict[str, Any]
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]


def run(
    exported: Exported,
    gm: fx.GraphModule,
    inputs: Mapping[str, torch.Tensor],
    order: Sequence[fx.Node] | None = None,
    buffer_nodes: Mapping[str, str] | None = None,
) -> Run:
    """Run ``gm`` node by node with fresh copies of the model's state; differentiate its first output."""
    model = exported.model
    state = {
        n: p.detach().clone().requires_grad_(p.requires_grad)
        for n, p in model.named_parameters(remove_duplicate=False)
    }
    for name, parameter in model.named_parameters(remove_duplicate=False):  # tied parameters stay one tensor
        first = next(n for n, p in model.named_parameters(remove_duplicate=False) if p is parameter)
        state[name] = state[first]
    state |= {n: b.detach().clone() for n, b in model.named_buffers()}
    specs = {spec.arg.name: spec for spec in exported.program.graph_signature.input_specs}
    values: dict[fx.Node, Any] = {}
    named = iter(inputs)
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            target = specs[node.name].target
            if target is None:
                values[node] = inputs[next(named)].clone()
            else:
                values[node] = (
                    state[target] if target in state else exported.program.constants[target].clone()
                )
    result: Any = None
    for node in order or list(gm.graph.nodes):
        if node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values[n])
            values[node] = node.target(*args, **kwargs)
        elif node.op == "get_attr":
            values[node] = getattr(gm, node.target)
        elif node.op == "output":
            result = fx.map_arg(node.args[0], lambda n: values[n])
    loss = result[0]
    if loss.requires_grad:
        loss.backward()
    by_name = {node.name: value for node, value in values.items()}
    for fqn, node_name in (buffer_nodes or {}).items():
        state[fqn] = by_name[node_name]
    gradients = {n: state[n].grad for n, _ in model.named_parameters()}
    return Run(result, by_name, gradients, {n: state[n] for n, _ in model.named_buffers()})


def eager(
    model: nn.Module, inputs: Mapping[str, torch.Tensor], loss_of: Callable[[Any], torch.Tensor]
) -> Run:
    """The model itself, its state left as it was."""
    saved = {n: b.detach().clone() for n, b in model.named_buffers()}
    model.zero_grad(set_to_none=True)
    result = model(**{n: v.clone() for n, v in inputs.items()})
    loss = loss_of(result)
    loss.backward()
    gradients = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    buffers = {n: b.detach().clone() for n, b in model.named_buffers()}
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(saved[name])
    return Run((loss.detach(),), {}, gradients, buffers)


def difference(a: Run, b: Run) -> float:
    """Largest difference of loss, gradients and buffers; each tensor relative to its own largest number, if over 1."""
    pairs = [(a.outputs[0], b.outputs[0])]
    for name in a.gradients:
        left, right = a.gradients[name], b.gradients[name]
        if left is None and right is not None:
            left = torch.zeros_like(right)
        if left is not None:
            pairs.append((left, torch.zeros_like(left) if right is None else right))
    pairs += [(a.buffers[name], b.buffers[name]) for name in a.buffers]
    return max(_difference(left.detach().double(), right.detach().double()) for left, right in pairs)


def _difference(left: torch.Tensor, right: torch.Tensor) -> float:
    if not left.numel():
        return 0.0
    scale = max(1.0, float(right.abs().max()))
    return float((left - right).abs().max()) / scale
