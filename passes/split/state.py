"""Parameters and buffers of blocks: parts that are placeholders of their own, or slices of the whole.

    all that is read of fc1.weight [100, 32]                becomes
    rows [0, 60) and rows [60, 100)                         placeholders fc1.weight#0, fc1.weight#1
    rows [0, 60), rows [60, 100), and all of it elsewhere   slices of the placeholder fc1.weight

Parts leave nothing out and do not overlap, so whoever reads the tensor must cut it alike; else it stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations

from torch import fx

from passes.graph.graph import GraphInput, OpGraph, StateSpec
from passes.split.values import RangeKey, SplitGraph
from runtime.mesh.sharding import Block
from runtime.state.rank_state import TensorPart, part_name


def settle(values: SplitGraph) -> dict[fx.Node, dict[RangeKey, fx.Node]]:
    """Turn requests into parts or slices. The parts' placeholders by the whole's old node and by range, in order."""
    parts: dict[fx.Node, dict[RangeKey, fx.Node]] = {}
    for whole, requests in values.requests.items():
        live = {key: node for key, node in requests.items() if node.users}
        for node in (node for node in requests.values() if not node.users):
            values.new.erase_node(node)
        placeholder = values.made[whole]
        assert isinstance(placeholder, fx.Node)
        if live and not placeholder.users and whole.name not in values.unparted and _tile(whole, live):
            parts[whole] = _as_parts(values, whole, placeholder, live)
            values.new.erase_node(placeholder)
        else:
            _as_slices(values, placeholder, live)
    return parts


def block_of(whole: fx.Node, key: RangeKey) -> Block:
    """Return a range of a tensor as a block."""
    ranges = dict(key)
    spans = [ranges.get(d, (0, int(size))) for d, size in enumerate(whole.meta["val"].shape)]
    return Block(tuple(begin for begin, _ in spans), tuple(end - begin for begin, end in spans))


def _tile(whole: fx.Node, requests: Mapping[RangeKey, fx.Node]) -> bool:
    blocks = [block_of(whole, key) for key in requests]
    complete = sum(math.prod(block.shape) for block in blocks) == whole.meta["val"].numel()
    return complete and all(a.shared_with(b) is None for a, b in combinations(blocks, 2))


def _as_parts(
    values: SplitGraph, whole: fx.Node, placeholder: fx.Node, requests: Mapping[RangeKey, fx.Node]
) -> dict[RangeKey, fx.Node]:
    parts: dict[RangeKey, fx.Node] = {}
    before = placeholder
    for number, key in enumerate(sorted(requests, key=lambda key: block_of(whole, key).offsets)):
        with values.new.inserting_after(before):
            before = values.new.placeholder(values.fresh(f"{whole.name}_b{number}"))
        before.meta = dict(requests[key].meta)
        requests[key].replace_all_uses_with(before)
        values.new.erase_node(requests[key])
        parts[key] = before
    return parts


def _as_slices(values: SplitGraph, placeholder: fx.Node, requests: Mapping[RangeKey, fx.Node]) -> None:
    first = next(node for node in values.new.nodes if node.op != "placeholder")
    for key, request in requests.items():
        found = placeholder
        with values.new.inserting_before(first):
            for dim, (begin, end) in key:
                found = values.sliced(found, dim, begin, end)
        request.replace_all_uses_with(found)
        values.new.erase_node(request)


def with_parts(graph: OpGraph, parts: Mapping[fx.Node, Mapping[RangeKey, fx.Node]]) -> OpGraph:
    """Return the tables of ``graph``, the module left as it is, with parts in place of the tensors that were cut."""
    by_name = {graph.input_of[whole.name].name: (whole, cut) for whole, cut in parts.items()}
    known = dict(graph.parts)
    for name, (whole, cut) in by_name.items():
        outer = known.pop(name, None)  # cut once already: parts of a part are parts of the whole
        for number, key in enumerate(cut):
            block = block_of(whole, key)
            if outer is not None:
                offsets = tuple(a + b for a, b in zip(outer.block.offsets, block.offsets, strict=True))
                block = Block(offsets, block.shape)
            known[part_name(name, number)] = TensorPart(outer.whole if outer else name, block)

    def cut_specs(specs: Mapping[str, StateSpec]) -> dict[str, StateSpec]:
        found: dict[str, StateSpec] = {}
        for name, spec in specs.items():
            numbers = range(len(by_name[name][1])) if name in by_name else ()
            for part in (part_name(name, number) for number in numbers):
                found[part] = replace(spec, name=part, shape=known[part].block.shape)
            if name not in by_name:
                found[name] = spec
        return found

    inputs: list[GraphInput] = []
    for given in graph.inputs:
        if graph.nodes[given.node] not in parts:
            inputs.append(given)
            continue
        cut = parts[graph.nodes[given.node]]
        inputs += [
            GraphInput(node.name, given.kind, part_name(given.name, number))
            for number, node in enumerate(cut.values())
        ]
    return replace(
        graph,
        inputs=tuple(inputs),
        parameters=cut_specs(graph.parameters),
        buffers=cut_specs(graph.buffers),
        parts=known,
    )
