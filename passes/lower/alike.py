"""Stages that are equal but for the names of their ops and parameters: the middle of a pipeline of equal layers.

    layers.4 … layers.7      linear(0, 3) choice 0, mul(4, 1) choice 1, …    ─┐
    layers.8 … layers.11     linear(0, 3) choice 0, mul(4, 1) choice 1, …    ─┴─►   one key

A key holds everything that the graph of a rank follows from: ops with their signatures, what
they read by number, inputs, outputs and state with their layouts, blocks that are computed again. The order of every list
is in it, too. What follows from ranks and links is not (``passes.lower.mesh_stages`` adds it).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from passes.graph.graph import OpGraph, once_per_graph
from passes.graph.nodes import nodes_in, symbolic
from passes.graph.signatures import group_by_signature
from passes.shard.words import FeaturePlacement


@dataclass(frozen=True)
class StageNames:
    """The names in a stage, by the numbers that stand for them in its key."""

    nodes: tuple[str, ...]
    """Ops and what they read."""
    state: tuple[str, ...]
    """Parameters and buffers."""


@dataclass(frozen=True)
class _Facts:
    """The part of a key that nodes and state of a graph have whatever the stage: equal numbers for equal facts."""

    kind: Mapping[str, int]
    """Kind of each op and each input, by node."""
    reads: Mapping[str, tuple[str, ...]]
    """Nodes that each op reads, in the order of its arguments."""
    place: Mapping[str, int]
    """Place of each node in the graph."""
    state: Mapping[str, tuple[int, int]]
    """Place of each parameter and buffer in the model, and its kind."""
    input_place: Mapping[str, int]
    """Place of each placeholder among the inputs."""


@once_per_graph
def _facts(graph: OpGraph) -> _Facts:
    numbers: dict[Hashable, int] = {}

    def number(facts: Hashable) -> int:
        return numbers.setdefault(facts, len(numbers))

    kind: dict[str, int] = {}
    for node, signature in zip(graph.ops, group_by_signature(graph).of, strict=True):
        kind[node.name] = number(("op", signature, *_described(node)))
    for given in graph.inputs:
        own = given.name if given.kind in ("constant", "batch") else ""
        kind[given.node] = number((given.kind, own, given.needs_grad, *_described(graph.nodes[given.node])))
    specs = (*graph.parameters.items(), *graph.buffers.items())
    return _Facts(
        kind,
        {node.name: tuple(n.name for n in nodes_in((node.args, dict(node.kwargs)))) for node in graph.ops},
        {name: place for place, name in enumerate(graph.nodes)},
        {
            name: (place, number((name in graph.parameters, name in graph.trained, replace(spec, name=""))))
            for place, (name, spec) in enumerate(specs)
        },
        {given.node: place for place, given in enumerate(graph.inputs)},
    )


def _described(node: fx.Node) -> Iterator[Hashable]:
    """Yield what a node's value is."""
    value = node.meta.get("val")
    yield isinstance(value, list | tuple)
    for item in value if isinstance(value, list | tuple) else (value,):
        if isinstance(item, torch.Tensor):
            yield tuple(map(symbolic, item.shape)), tuple(map(symbolic, item.stride()))
            yield item.dtype, item.device, item.requires_grad
        else:
            yield type(item), symbolic(item)


def stage_key(
    graph: OpGraph,
    ops: Sequence[str],
    copied: Collection[str],
    placement: FeaturePlacement,
    shared: Collection[str],
) -> tuple[Hashable, StageNames]:
    """Return the key of a stage of ``ops``, in the graph's order, and the names that its numbers stand for.

    ``copied``: ops of which every stage has copies; ``shared``: state of several stages.
    """
    facts, own = _facts(graph), set(ops)
    whole = len(own) == len(graph)
    entering = {name for op in ops for name in facts.reads[op]} - own
    if whole:  # it is no part, and has inputs that nobody reads, too
        entering |= graph.input_of.keys()
    taken = sorted(entering, key=facts.place.__getitem__)
    number = {name: i for i, name in enumerate((*taken, *ops))}
    held = {i.name for name in taken if (i := graph.input_of.get(name)) and i.kind in ("parameter", "buffer")}
    held |= {output.name for output in graph.outputs if output.kind == "buffer" and output.node in own}
    state = sorted((*graph.parameters, *graph.buffers) if whole else held, key=facts.state.__getitem__)
    state_number = {name: i for i, name in enumerate(state)}
    choices: dict[Hashable, int] = {}
    numbered: dict[int, int] = {}
    """Index of each distinct sharding choice, by object identity: equal ops mostly share one object."""

    def choice(op: str) -> int:
        found = placement.choices.get(op)
        if id(found) not in numbered:
            numbered[id(found)] = choices.setdefault(found, len(choices))
        return numbered[id(found)]

    def value(name: str) -> Hashable:
        return name in graph.needs_grad, placement.values.get(name), placement.returned.get(name)

    def read(name: str) -> Hashable:
        given = graph.input_of.get(name)
        if given is None:
            return ("value", *_described(graph.nodes[name]), value(name))
        layout = {"batch": placement.batch.get(given.name), "value": value(given.name)}.get(given.kind)
        return facts.kind[name], state_number.get(given.name), layout

    key = (
        whole,
        placement.mesh.shape,
        placement.mesh.axes,
        tuple(map(read, taken)),
        tuple(
            number[name]
            for name in sorted(entering & graph.input_of.keys(), key=facts.input_place.__getitem__)
        ),
        tuple((facts.kind[op], choice(op), *(number[name] for name in facts.reads[op])) for op in ops),
        tuple(choices),
        tuple(
            (
                facts.state[name][1],
                name in shared,
                placement.stored.get(name),
                placement.sharded_state.get(name),
            )
            for name in state
        ),
        tuple((number[name], value(name)) for name in _leaving(graph, ops, own, copied)),
        tuple(
            (output.kind, number.get(output.node), state_number.get(output.name), value(output.name))
            for output in graph.outputs
            if whole or output.node in own
        ),
    )
    return key, StageNames(tuple(number), tuple(state))


def _leaving(
    graph: OpGraph, ops: Sequence[str], own: Collection[str], copied: Collection[str]
) -> Iterator[str]:
    """Yield the ops whose results other stages read."""
    for op in ops:
        users = (user for user in graph.nodes[op].users if user.op != "output")
        if op not in copied and any(user.name not in own and user.name not in copied for user in users):
            yield op
