"""Random models as OpGraphs, made directly (no export), for tests of placements, segments and execution.

A model is a random DAG of tensor ops over [batch, WIDTH] values: linear layers (some sharing a parameter), elementwise
ops, products of two values, a frozen branch, a boolean mask used late, a value with several consumers.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import sympy
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from passes.graph.graph import GraphInput, GraphOutput, OpGraph, StateSpec
from runtime.segment.code import BatchSpec

aten = torch.ops.aten
WIDTH = 4


@dataclass(frozen=True)
class RandomModel:
    """The graph, and real float64 state for it by name."""

    graph: OpGraph
    state: dict[str, torch.Tensor]

    def loss_and_gradients(self, sizes: list[int], x: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
        """The unpartitioned graph on micro-batches of ``sizes``, gradients accumulated."""
        parameters = {
            n: nn.Parameter(t.clone(), self.graph.parameters[n].requires_grad) for n, t in self.state.items()
        }
        total = 0.0
        for piece in torch.split(x, sizes):
            arguments = [piece if i.kind == "batch" else parameters[i.name] for i in self.graph.inputs]
            (loss,) = self.graph.module(*arguments)
            if loss.requires_grad:  # not where everything is detached on its way
                (loss * (piece.shape[0] / x.shape[0])).backward()
            total += float(loss.detach()) * piece.shape[0] / x.shape[0]
        return total, {n: p.grad for n, p in parameters.items() if p.grad is not None}


def random_model(seed: int, ops: int = 14) -> RandomModel:
    """A random DAG of about ``ops`` ops, the same for the same seed."""
    draw = random.Random(seed)
    graph = fx.Graph()
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    x_value = mode.from_tensor(torch.zeros(3, WIDTH, dtype=torch.float64), symbolic_context=context)
    count = draw.randint(2, 4)
    specs = {
        f"w{k}": StateSpec(f"w{k}", (WIDTH, WIDTH), torch.float64, draw.random() > 0.2) for k in range(count)
    }
    specs["w0"] = StateSpec("w0", (WIDTH, WIDTH), torch.float64, True)
    with mode:
        weight_value = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
    weights = [_placeholder(graph, name, weight_value) for name in specs]
    x = _placeholder(graph, "x", x_value)
    values = [_call(graph, mode, aten.linear.default, x, weights[0])]
    masks: list[fx.Node] = []
    for _ in range(ops):
        a, b = draw.choice([x, *values]), draw.choice(values)
        kind = draw.choice(["linear", "linear", "tanh", "add", "mul", "detach", "mask", "use_mask"])
        if kind == "linear":
            values.append(_call(graph, mode, aten.linear.default, a, draw.choice(weights)))
        elif kind == "tanh":
            values.append(_call(graph, mode, aten.tanh.default, b))
        elif kind == "detach":
            values.append(_call(graph, mode, aten.detach.default, b))
        elif kind == "mask":
            masks.append(_call(graph, mode, aten.gt.Scalar, b, 0.0))
        elif kind == "use_mask" and masks:
            values.append(_call(graph, mode, aten.where.self, draw.choice(masks), a, b))
        else:
            target = aten.add.Tensor if kind == "add" else aten.mul.Tensor
            values.append(_call(graph, mode, target, a, b))
    used = [v for v in values if not v.users] or [values[-1]]
    total = used[0]
    for value in used[1:]:
        total = _call(graph, mode, aten.add.Tensor, total, value)
    for mask in [m for m in masks if not m.users]:
        graph.erase_node(mask)
    loss = _call(graph, mode, aten.mean.default, total)
    graph.output((loss,))
    generator = torch.Generator().manual_seed(seed)
    state = {n: torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64) / 2 for n in specs}
    symbol = x_value.shape[0].node.expr  # type: ignore[attr-defined]
    assert isinstance(symbol, sympy.Symbol)
    inputs = (*(GraphInput(n, "parameter", n) for n in specs), GraphInput("x", "batch", "x"))
    made = OpGraph(
        module=fx.GraphModule(nn.Module(), graph),
        inputs=inputs,
        outputs=(GraphOutput(loss.name, "loss", "loss"),),
        parameters=specs,
        buffers={},
        aliases={},
        constants={},
        batch=BatchSpec({"x": 0}, symbol, {symbol: ("x", 0)}),
        example_batch_size=3,
        example_shapes={"x": (3, WIDTH)},
        training=True,
        model_name=f"random{seed}",
        fingerprint=str(seed),
    )
    return RandomModel(made, state)


def forest(models: Sequence[RandomModel]) -> RandomModel:
    """Models side by side in one graph, on the same batch; its loss is the sum of theirs.

    Names get the model's number: ``m3_w0``, ``m3_tanh_1``.
    """
    graph = fx.Graph()
    copies: list[dict[fx.Node, fx.Node]] = [{} for _ in models]
    x: fx.Node | None = None
    for number, model in enumerate(models):
        for node in (node for node in model.graph.graph.nodes if node.op == "placeholder"):
            if node.name != "x":
                copies[number][node] = _placeholder(graph, f"m{number}_{node.name}", node.meta["val"])
    for copied, model in zip(copies, models, strict=True):
        old = model.graph.nodes["x"]
        x = x or _placeholder(graph, "x", old.meta["val"])
        copied[old] = x
    losses = []
    for number, (copied, model) in enumerate(zip(copies, models, strict=True)):
        for node in model.graph.ops:
            arguments = fx.map_arg(node.args, copied.__getitem__)
            copy = graph.create_node("call_function", node.target, arguments, name=f"m{number}_{node.name}")
            copy.meta = dict(node.meta)
            copied[node] = copy
        losses.append(copied[model.graph.nodes[model.graph.loss or ""]])
    total = losses[0]
    for loss in losses[1:]:
        value = total.meta
        total = graph.call_function(aten.add.Tensor, (total, loss))
        total.meta = dict(value)
    graph.output((total,))
    first = models[0].graph
    specs = {
        f"m{number}_{name}": replace(spec, name=f"m{number}_{name}")
        for number, model in enumerate(models)
        for name, spec in model.graph.parameters.items()
    }
    made = replace(
        first,
        module=fx.GraphModule(nn.Module(), graph),
        inputs=(*(GraphInput(n, "parameter", n) for n in specs), GraphInput("x", "batch", "x")),
        outputs=(GraphOutput(total.name, "loss", "loss"),),
        parameters=specs,
        model_name="forest",
    )
    state = {f"m{k}_{n}": t for k, model in enumerate(models) for n, t in model.state.items()}
    return RandomModel(made, state)


def random_placement(
    graph: OpGraph, recomputed: frozenset[str], ranks: int, seed: int
) -> dict[str, tuple[int, ...]]:
    """Any op on any rank."""
    draw = random.Random(seed)
    return {node.name: (draw.randrange(ranks),) for node in graph.ops if node.name not in recomputed}


def _placeholder(graph: fx.Graph, name: str, value: torch.Tensor) -> fx.Node:
    node = graph.placeholder(name)
    node.meta = {"val": value, "module_path": "", "source": "random_graphs.py:1"}
    return node


def _call(graph: fx.Graph, mode: FakeTensorMode, target: object, *arguments: object) -> fx.Node:
    node = graph.call_function(target, arguments)  # type: ignore[arg-type]
    with mode:
        value = target(*(a.meta["val"] if isinstance(a, fx.Node) else a for a in arguments))  # type: ignore[operator]
    node.meta = {"val": value, "module_path": "", "source": "random_graphs.py:1"}
    return node
