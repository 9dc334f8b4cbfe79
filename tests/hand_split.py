"""A pair of linear layers cut into blocks of neurons by hand, and a plan of it: what tests of parts stand on.

linear(x, fc1.weight, fc1.bias) -> tanh -> linear(·, fc2.weight, fc2.bias)

linear(x, fc1.weight#0, fc1.bias#0) -> tanh -> linear(·, fc2.weight#0, fc2.bias) ─┐
linear(x, fc1.weight#1, fc1.bias#1) -> tanh -> linear(·, fc2.weight#1) ───────────┴─ add
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx, nn

from cost_models.cluster import ClusterSpec
from partitioner import Workload
from partitioner.describe import describe
from passes.compile import Compiled
from passes.costs import costs_of
from passes.free_variants import Variant, place_variant
from passes.graph import GraphInput, OpGraph, StateSpec
from passes.node_tools import call, copy_graph, fake_call, fake_mode_of, new_module
from passes.place_free import FreeRequest
from passes.splits import Split
from passes.trace import trace
from passes.verify_graph import verify_graph
from runtime.check import check
from runtime.parts import StatePart, part_name
from runtime.sharding import Block

WIDTH, HIDDEN, CLASSES, SAMPLES, MICROBATCHES = 6, 10, 4, 8, 2
SIZES = (3, 5, 2)
RANK_OF_BLOCK = (0, 1, 0)
"""Rank 0 holds two parts of each tensor."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.norm, self.head = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return self.head(normed + self.fc2(torch.tanh(self.fc1(normed))))


def loss_fn(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(output, batch["label"])


def batch(samples: int = SAMPLES, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(samples, WIDTH, generator=generator, dtype=torch.float64),
        "label": torch.randint(0, CLASSES, (samples,), generator=generator),
    }


def model(seed: int = 0) -> Net:
    made = Net().double()
    with torch.no_grad():
        for number, parameter in enumerate(made.parameters()):
            generator = torch.Generator().manual_seed(100 * seed + number)
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)
    return made


def workload(seed: int = 0) -> Workload:
    return Workload(model(seed), batch(), loss_fn, "net")


def traced(made: Workload) -> OpGraph:
    return trace(made.model, made.example_inputs, loss_fn=made.loss_fn, name=made.name)


def split_of(graph: OpGraph, sizes: Sequence[int]) -> tuple[Split, ...]:
    """What ``split_pair`` does to the first pair of linear layers, as plans say it."""
    return (Split(_linears(graph)[0].name, -1, tuple(sizes)),)


def known_split(graph: OpGraph, sizes: Sequence[int] = SIZES) -> OpGraph:
    """``graph``, which gives ``split_pair`` to whoever asks for this split."""
    graph.memo["split", split_of(graph, sizes)] = split_pair(graph, sizes)
    return graph


def split_pair(graph: OpGraph, sizes: Sequence[int] = SIZES) -> OpGraph:
    """The first two linear layers of ``graph``, and the chain of elementwise ops between them, in blocks."""
    new = copy_graph(graph.graph)
    first, second, *_ = _linears(graph)
    nodes = {node.name: node for node in new.nodes}
    (start, weight, bias), (_, weight2, bias2) = nodes[first.name].args, nodes[second.name].args
    cuts = {weight: 0, bias: 0, weight2: 1}
    pieces, parts = _placeholders(graph, new, cuts, sizes)
    mode, sums = fake_mode_of(new), None
    with new.inserting_before(nodes[second.name]):
        for number in range(len(sizes)):
            mine = {whole: pieces[whole][number] for whole in cuts}
            node, args = nodes[first.name], (start, mine[weight], mine[bias])
            while True:
                block = call(new, mode, node.target, args, like=node)
                block = _named(new, block, f"{node.name}_b{number}")
                if node is nodes[second.name]:
                    break
                (node,) = node.users
                args = (block,)
                if node is nodes[second.name]:
                    args = (block, mine[weight2], *([bias2] if number == 0 else []))
            if sums is not None:
                block = call(new, mode, torch.ops.aten.add.Tensor, (sums, block), like=node)
                block = _named(new, block, f"{node.name}_sum{number}")
            sums = block
    nodes[second.name].replace_all_uses_with(sums)
    for node in reversed(list(new.nodes)):
        if not node.users and (node in cuts or node.op == "call_function"):
            new.erase_node(node)
    made = _with_parts(graph, new, parts)
    verify_graph(made, after="split by hand")
    return made


def _linears(graph: OpGraph) -> list[fx.Node]:
    return [node for node in graph.ops if node.target is torch.ops.aten.linear.default]


def _placeholders(
    graph: OpGraph, new: fx.Graph, cuts: Mapping[fx.Node, int], sizes: Sequence[int]
) -> tuple[dict[fx.Node, list[fx.Node]], dict[str, tuple[StatePart, str]]]:
    """Placeholders of each block, by that of the whole; parts and their placeholders' names, by the parts' names."""
    pieces: dict[fx.Node, list[fx.Node]] = {}
    parts: dict[str, tuple[StatePart, str]] = {}
    for whole, dim in cuts.items():
        name, value, at = graph.input_of[whole.name].name, whole.meta["val"], 0
        pieces[whole] = []
        for number, size in enumerate(sizes):
            shape, offsets = list(value.shape), [0] * value.dim()
            shape[dim], offsets[dim], at = size, at, at + size
            with new.inserting_before(whole):
                node = new.placeholder(f"{whole.name}_{number}")
            fake = fake_call(fake_mode_of(new), torch.empty, (shape,), {"dtype": value.dtype})
            node.meta = {**whole.meta, "val": fake.requires_grad_(value.requires_grad)}
            node.meta.pop("tensor_meta", None)
            pieces[whole].append(node)
            parts[part_name(name, number)] = (
                StatePart(name, Block(tuple(offsets), tuple(shape))),
                node.name,
            )
    return pieces, parts


def _named(new: fx.Graph, node: fx.Node, name: str) -> fx.Node:
    node.name = name
    return node


def _with_parts(graph: OpGraph, new: fx.Graph, parts: Mapping[str, tuple[StatePart, str]]) -> OpGraph:
    kept = {node.name for node in new.nodes}
    known = {i.node: i for i in graph.inputs if i.node in kept}
    known |= {node: GraphInput(node, "parameter", name) for name, (_, node) in parts.items()}
    wholes = {part.whole for part, _ in parts.values()}
    parameters: dict[str, StateSpec] = {}
    for name, spec in graph.parameters.items():
        if name not in wholes:
            parameters[name] = spec
        for part, (place, _) in parts.items():
            if place.whole == name:
                parameters[part] = dataclasses.replace(spec, name=part, shape=place.block.shape)
    return dataclasses.replace(
        graph,
        module=new_module(graph.module, new),
        inputs=tuple(known[node.name] for node in new.nodes if node.op == "placeholder"),
        parameters=parameters,
        parts={name: part for name, (part, _) in parts.items()},
    )


def hand_plan(
    made: Workload,
    sizes: Sequence[int] = SIZES,
    rank_of_block: Sequence[int] = RANK_OF_BLOCK,
    ranks: int = 2,
) -> str:
    """A plan with block i on ``rank_of_block[i]``, the sums and what is before them on rank 0, the rest on rank 1."""
    graph, cluster = traced(made), ClusterSpec.local(ranks)
    split = split_pair(graph, sizes)
    pins = {f"*_b{number}": rank for number, rank in enumerate(rank_of_block)}
    request = FreeRequest(
        batch_size=SAMPLES, microbatches=MICROBATCHES, pins={**pins, "*_sum*": 0, "head": ranks - 1}
    )
    variant = Variant(split, costs_of(split, cluster), split_of(graph, sizes))
    placed = place_variant(variant, cluster, request, None)
    sums = [group.as_tuple for group in placed.realized.tied]
    proof = check(placed.realized.programs, placed.realized.segments, placed.microbatches, tied=sums)
    compiled = Compiled(variant.costs, placed, proof)
    return describe(graph, cluster, request, compiled).model_dump_json()
