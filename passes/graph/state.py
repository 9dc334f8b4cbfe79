"""Parameters and buffers: which ops need them where they run, and which ops must stay together because of them.

An op needs what it reads, and what ops that are recomputed for it read.

A buffer that the model writes has one owning segment: everything that reads or writes it runs there, once per
micro-batch and in order. All ops between these run there as well: elsewhere, they would part the segment.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Mapping

import torch
from networkx.utils import UnionFind

from passes.graph.contraction import united
from passes.graph.graph import OpGraph

_WRITE_STATISTICS = (
    "aten::batch_norm",
    "aten::native_batch_norm",
    "aten::cudnn_batch_norm",
    "aten::_native_batch_norm_legit",
    "aten::instance_norm",
)


def mutable_buffers(graph: OpGraph) -> frozenset[str]:
    """Name the buffers, canonically, that a training step writes.

    Declared writes are outputs of the graph; batch and instance norms write running statistics without saying so.
    """
    written = {output.name for output in graph.outputs if output.kind == "buffer"}
    for node in graph.ops:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name in _WRITE_STATISTICS:
            for source in node.all_input_nodes:
                source_input = graph.input_of.get(source.name)
                if source_input is not None and source_input.kind == "buffer":
                    written.add(source_input.name)
    return frozenset(written)


def colocated(graph: OpGraph) -> tuple[frozenset[str], ...]:
    """Group ops that must share a segment: projections with their producer, the users of a written buffer."""
    groups: UnionFind[str] = UnionFind()
    for node in graph.ops:
        if node.target is operator.getitem:
            groups.union(node.all_input_nodes[0].name, node.name)
    mutable = mutable_buffers(graph)
    users: dict[str, set[str]] = defaultdict(set)
    for placeholder in graph.inputs:
        if placeholder.kind == "buffer" and placeholder.name in mutable:
            users[placeholder.name].update(
                user.name for user in graph.nodes[placeholder.node].users if user.op != "output"
            )
    for output in graph.outputs:
        if output.kind == "buffer" and graph.nodes[output.node].op == "call_function":
            users[output.name].add(output.node)
    for group in users.values():
        if len(group) > 1:
            groups.union(*sorted(group))
    return tuple(map(frozenset, groups.to_sets()))


def owning_units(graph: OpGraph, recomputed: frozenset[str]) -> dict[str, int]:
    """Number the unit of each placed op in a topological order: a ``colocated`` group, and all between its ops, is one."""
    placed = [node for node in graph.ops if node.name not in recomputed]
    index = {node.name: i for i, node in enumerate(placed)}
    readers = tuple(tuple(sorted(index[u.name] for u in node.users if u.name in index)) for node in placed)
    groups = [sorted(index[name] for name in group if name in index) for group in colocated(graph)]
    return dict(zip(index, united(readers, [group for group in groups if group]), strict=True))


def owning_groups(graph: OpGraph, recomputed: frozenset[str]) -> tuple[tuple[int, ...], ...]:
    """List the units that have several ops, by the numbers of the placed ops in the graph's order."""
    found: dict[int, list[int]] = defaultdict(list)
    for op, unit in enumerate(owning_units(graph, recomputed).values()):
        found[unit].append(op)
    return tuple(tuple(ops) for ops in found.values() if len(ops) > 1)


def state_reads(graph: OpGraph, recomputed: Collection[str]) -> dict[str, set[str]]:
    """Name the parameters and buffers that each op needs which is not ``recomputed`` where it is needed, by op name."""
    needed = needed_state(graph, recomputed)
    return {op: names for op, names in needed.items() if op not in recomputed}


def needed_state(graph: OpGraph, recomputed: Collection[str]) -> dict[str, set[str]]:
    """Name the parameters and buffers that each op reads, itself or through ops that are ``recomputed`` for it."""
    return needed_inputs(graph, recomputed, ("parameter", "buffer"))


def needed_inputs(graph: OpGraph, recomputed: Collection[str], kinds: Collection[str]) -> dict[str, set[str]]:
    """Name the inputs of these kinds that each op reads, itself or through ops that are ``recomputed`` for it."""
    needed: dict[str, set[str]] = {}
    for node in graph.ops:
        own: set[str] = set()
        for source in node.all_input_nodes:
            placeholder = graph.input_of.get(source.name)
            if placeholder is not None and placeholder.kind in kinds:
                own.add(placeholder.name)
            if source.name in recomputed:
                own |= needed.get(source.name, set())
        needed[node.name] = own
    return needed


def state_readers(graph: OpGraph, index: Mapping[str, int]) -> dict[str, set[int]]:
    """Number the placed ops that need each parameter and buffer, by ``index``; all other ops are recomputed."""
    return readers(graph, index, ("parameter", "buffer"))


def readers(graph: OpGraph, index: Mapping[str, int], kinds: Collection[str]) -> dict[str, set[int]]:
    """Number the placed ops that need each input of these kinds, by ``index``; all other ops are recomputed."""
    found: dict[str, set[int]] = defaultdict(set)
    recomputed = {node.name for node in graph.ops}.difference(index)
    for op, names in needed_inputs(graph, recomputed, kinds).items():
        # sorted: sums of floats follow this order, a set's differs from process to process
        for name in sorted(names) if op in index else ():
            found[name].add(index[op])
    return found
