"""The graph verifier: a sound graph passes; each rule finds the violation planted for it, and no other rule does."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import fx, nn

from cost_models.errors import InternalError
from passes.graph.graph import GraphInput, GraphOutput, OpGraph, StateSpec
from passes.graph.sizes import canonical_sizes
from passes.graph.verify import RULES, verify_graph
from runtime.segment.code import BatchSpec
from tests.support.rewritten_graphs import export, lowered

aten = torch.ops.aten


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, _ = self.linear(x).max(1)
        self.mean.add_(1)
        return (h * self.mean.sum()).sum() / x.shape[0]


def sound() -> OpGraph:
    """A valid graph, made anew so that a test may break it."""
    program = export(Model(), {"x": torch.randn(3, 4)})
    gm, buffers = lowered(program)
    gm = canonical_sizes(gm, ["x"])
    for node in gm.graph.nodes:
        node.meta |= {"module_path": "", "source": "model.py:1"}
    output = gm.graph.output_node()
    outputs = [GraphOutput(output.args[0][0].name, "loss", "loss")]
    outputs += [GraphOutput(node, "buffer", name) for name, node in buffers.items()]
    output.args = (tuple(next(n for n in gm.graph.nodes if n.name == o.node) for o in outputs),)
    model = program.model
    symbol = next(n for n in gm.graph.nodes if n.name == "x").meta["val"].shape[0].node.expr
    names = {"p_linear_weight": "linear.weight", "p_linear_bias": "linear.bias", "b_mean": "mean", "x": "x"}
    kinds = {"p": "parameter", "b": "buffer", "x": "batch"}
    return OpGraph(
        module=gm,
        inputs=tuple(GraphInput(node, kinds[node[0]], name) for node, name in names.items()),  # type: ignore[arg-type]
        outputs=tuple(outputs),
        parameters={n: StateSpec(n, tuple(p.shape), p.dtype, True) for n, p in model.named_parameters()},
        buffers={n: StateSpec(n, tuple(b.shape), b.dtype, False) for n, b in model.named_buffers()},
        aliases={"tied.weight": "linear.weight"},
        constants={},
        batch=BatchSpec({"x": 0}, symbol, {symbol: ("x", 0)}),
        example_batch_size=3,
        example_shapes={"x": (3, 4)},
        training=True,
        model_name="model",
        fingerprint="",
    )


def node(graph: OpGraph, target: object) -> fx.Node:
    return next(n for n in graph.graph.nodes if n.target == target)


def insert(graph: OpGraph, target: object, *args: object) -> fx.Node:
    """An op after all others, with an origin; its value is that of the loss."""
    with graph.graph.inserting_before(graph.graph.output_node()):
        made = graph.graph.call_function(target, args)  # type: ignore[arg-type]
    made.meta = {**node(graph, aten.div.Tensor).meta}
    return made


def get_attr(graph: OpGraph) -> OpGraph:
    graph.module.register_buffer("hidden", torch.zeros(1))
    with graph.graph.inserting_before(graph.graph.output_node()):
        made = graph.graph.get_attr("hidden")
    made.meta = {**node(graph, aten.div.Tensor).meta}
    return graph


def out_of_order(graph: OpGraph) -> OpGraph:
    node(graph, aten.linear.default).append(node(graph, aten.max.dim))
    node(graph, aten.max.dim).append(node(graph, aten.linear.default))
    return graph


def late_placeholder(graph: OpGraph) -> OpGraph:
    graph.graph.output_node().prepend(node(graph, "b_mean"))
    last = node(graph, aten.add.Tensor)
    readers = [last]
    for reader in readers:
        graph.graph.output_node().prepend(reader)
        readers += [user for user in reader.users if user.op != "output" and user not in readers]
    inputs = [entry for entry in graph.inputs if entry.node != "b_mean"]
    moved = next(entry for entry in graph.inputs if entry.node == "b_mean")
    return replace(graph, inputs=(*inputs, moved))


def no_output(graph: OpGraph) -> OpGraph:
    graph.graph.erase_node(graph.graph.output_node())
    return graph


def no_value(graph: OpGraph) -> OpGraph:
    del node(graph, aten.linear.default).meta["val"]
    return graph


def no_origin(graph: OpGraph) -> OpGraph:
    del node(graph, aten.linear.default).meta["source"]
    return graph


def python_function(graph: OpGraph) -> OpGraph:
    insert(graph, torch.relu, node(graph, aten.linear.default))
    return graph


def higher_order(graph: OpGraph) -> OpGraph:
    insert(graph, torch.ops.higher_order.cond, node(graph, aten.linear.default))
    return graph


def in_place(graph: OpGraph) -> OpGraph:
    insert(graph, aten.relu_.default, node(graph, aten.linear.default))
    return graph


def projection_of_a_tensor(graph: OpGraph) -> OpGraph:
    insert(graph, operator.getitem, node(graph, aten.linear.default), 0)
    return graph


def input_missing(graph: OpGraph) -> OpGraph:
    return replace(graph, inputs=tuple(entry for entry in graph.inputs if entry.node != "p_linear_bias"))


def output_missing(graph: OpGraph) -> OpGraph:
    return replace(graph, outputs=graph.outputs[:1])


def name_twice(graph: OpGraph) -> OpGraph:
    inputs = [
        GraphInput(i.node, i.kind, "linear.weight") if i.node == "p_linear_bias" else i for i in graph.inputs
    ]
    specs = graph.parameters | {"linear.weight": replace(graph.parameters["linear.weight"], shape=(4,))}
    value = node(graph, "p_linear_bias").meta["val"]
    node(graph, "p_linear_weight").meta["val"] = value
    return replace(graph, inputs=tuple(inputs), parameters=specs)


def parameter_unknown(graph: OpGraph) -> OpGraph:
    return replace(graph, parameters={"linear.weight": graph.parameters["linear.weight"]})


def parameter_and_buffer(graph: OpGraph) -> OpGraph:
    return replace(graph, buffers=graph.buffers | {"linear.bias": graph.parameters["linear.bias"]})


def shape_differs(graph: OpGraph) -> OpGraph:
    spec = replace(graph.parameters["linear.bias"], shape=(5,))
    return replace(graph, parameters=graph.parameters | {"linear.bias": spec})


def dtype_differs(graph: OpGraph) -> OpGraph:
    return replace(graph, buffers={"mean": replace(graph.buffers["mean"], dtype=torch.float16)})


def alias_of_nothing(graph: OpGraph) -> OpGraph:
    return replace(graph, aliases={"tied.weight": "nowhere"})


def alias_is_canonical(graph: OpGraph) -> OpGraph:
    return replace(graph, aliases={"linear.bias": "linear.weight"})


def buffer_unknown(graph: OpGraph) -> OpGraph:
    loss, buffer = graph.outputs
    return replace(graph, outputs=(loss, replace(buffer, name="nowhere")))


def size_of_an_activation(graph: OpGraph) -> OpGraph:
    made = insert(graph, aten.sym_size.int, node(graph, aten.linear.default), 0)
    made.meta["val"] = node(graph, aten.sym_size.int).meta["val"]
    return graph


def batch_unknown(graph: OpGraph) -> OpGraph:
    return replace(graph, batch=replace(graph.batch, batch_dims={}))


def symbol_unknown(graph: OpGraph) -> OpGraph:
    return replace(graph, batch=replace(graph.batch, symbols={graph.batch.batch_symbol: ("y", 0)}))


def loss_is_a_vector(graph: OpGraph) -> OpGraph:
    node(graph, aten.div.Tensor).meta["val"] = torch.zeros(2)
    return graph


def loss_is_an_integer(graph: OpGraph) -> OpGraph:
    node(graph, aten.div.Tensor).meta["val"] = torch.zeros((), dtype=torch.long)
    return graph


VIOLATIONS: list[tuple[str, Callable[[OpGraph], OpGraph]]] = [
    ("node-kinds", get_attr),
    ("topological", out_of_order),
    ("placeholders-first", late_placeholder),
    ("one-output", no_output),
    ("values", no_value),
    ("origin", no_origin),
    ("known-ops", python_function),
    ("known-ops", higher_order),
    ("functional", in_place),
    ("projections", projection_of_a_tensor),
    ("inputs", input_missing),
    ("outputs", output_missing),
    ("one-per-name", name_twice),
    ("state", parameter_unknown),
    ("state", parameter_and_buffer),
    ("state-shapes", shape_differs),
    ("state-shapes", dtype_differs),
    ("aliases", alias_of_nothing),
    ("aliases", alias_is_canonical),
    ("buffers", buffer_unknown),
    ("sizes", size_of_an_activation),
    ("batch", batch_unknown),
    ("batch", symbol_unknown),
    ("loss", loss_is_a_vector),
    ("loss", loss_is_an_integer),
]


def test_a_sound_graph_passes() -> None:
    verify_graph(sound(), after="sizes")


def test_every_rule_has_a_planted_violation() -> None:
    assert {name for name, _ in VIOLATIONS} == {rule.name for rule in RULES}


@pytest.mark.parametrize(("rule", "plant"), VIOLATIONS, ids=[plant.__name__ for _, plant in VIOLATIONS])
def test_a_violation_is_found_by_its_rule_and_names_the_pass(
    rule: str, plant: Callable[[OpGraph], OpGraph]
) -> None:
    with pytest.raises(InternalError) as caught:
        verify_graph(plant(sound()), after="guilty-pass")
    assert "guilty-pass" in caught.value.what
    broken = [reason.split("]")[0].lstrip("[") for reason in caught.value.because]
    assert broken == [rule]


def test_all_violations_are_collected() -> None:
    with pytest.raises(InternalError) as caught:
        verify_graph(in_place(no_origin(no_value(sound()))), after="several")
    assert len(caught.value.because) == 3
