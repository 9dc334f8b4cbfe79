"""The share of blocks that masks of flex_attention leave visible: what its kernel does not skip.

Operands of masks are small, so they are computed, and the blocks are looked at. Where a mask is of positions alone that is
exact; where it reads the batch (documents, padding) the example tells, and a note says so. What the plan computes does not
depend on it, nor does the model's fingerprint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from passes.graph.graph import GraphInput
from passes.graph.nodes import argument, is_size
from passes.trace.normal.masks import MOST_ELEMENTS
from runtime.ops.flex import BLOCK, FLEX_BLOCKS, block_kinds

aten = torch.ops.aten

MOST_PAIRS = 1 << 28
"""Pairs of query and key whose mask is looked at: some 2 seconds. Of larger ones, rows of blocks evenly apart."""


class _Known(NamedTuple):
    """A node's value for the example. ``of_batch``: it depends on what is in the batch, not on its sizes alone."""

    value: Any
    of_batch: bool


def count_visible(
    graph: fx.Graph,
    inputs: Sequence[GraphInput],
    leaves: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
) -> list[str]:
    """Note in every flex_attention which share of blocks its mask leaves, in place. Returns what to say about it.

    ``leaves``: the example's. ``state``: constants and buffers, by name.
    """
    notes = []
    named = {given.node: leaves if given.kind == "batch" else state for given in inputs}
    names = {given.node: given.name for given in inputs}
    values = _ExampleValues({node: named[node].get(name) for node, name in names.items()}, _batch(inputs))
    for node in graph.find_nodes(op="call_function", target=FLEX_BLOCKS):
        given: Any = node.args
        operands, mask, rows, columns = given
        found = [values.of(operand) for operand in operands]
        known = [each for each in found if each is not None]
        made = f"flex_attention's mask made in {node.meta['source'] or 'forward'}"
        if len(known) < len(found):
            notes.append(f"{made} is not known before it runs: all of its blocks count")
            continue
        share = _share([each.value for each in known], mask, rows, columns)
        for user in list(node.users):
            user.kwargs = {**user.kwargs, "visible": share}
        if any(each.of_batch for each in known):
            notes.append(
                f"{made} depends on the batch: torch's kernel is priced with {share:.0%} of its blocks, as in the example"
            )
    return list(dict.fromkeys(notes))


def _batch(inputs: Sequence[GraphInput]) -> frozenset[str]:
    return frozenset(given.node for given in inputs if given.kind == "batch")


def _share(operands: Sequence[Tensor], mask: Sequence[str], rows: int, columns: int) -> float:
    """Return the mean share of visible blocks over samples and heads."""
    ranks = range(3, 1 + max(t.dim() for t in operands))
    lead = math.prod(max(t.shape[-rank] for t in operands if t.dim() >= rank) for rank in ranks)
    bands = math.ceil(rows / BLOCK)
    every = math.ceil(bands * BLOCK * columns * lead / MOST_PAIRS)
    seen = total = 0
    for band in range(every // 2, bands, every):
        first, last = band * BLOCK, min((band + 1) * BLOCK, rows)
        part = [t[..., first:last, :] if t.dim() > 1 and t.shape[-2] > 1 else t for t in operands]
        kinds = block_kinds(part, mask, last - first, columns)
        seen, total = seen + int((kinds > 0).sum()), total + kinds.numel()
    return seen / total


class _ExampleValues:
    """The values that nodes have for the example, as far as inputs and sizes tell."""

    def __init__(self, given: Mapping[str, Tensor | None], batch: frozenset[str]) -> None:
        self._given, self._batch = given, batch
        self._found: dict[fx.Node, _Known | None] = {}

    def of(self, root: fx.Node) -> _Known | None:
        """Compute a node; None if it depends on the model's state, on chance, or is large."""
        waiting = [root]
        while waiting:
            node = waiting[-1]
            todo = [] if self._is_size(node) else [n for n in node.all_input_nodes if n not in self._found]
            if todo:
                waiting += todo
                continue
            waiting.pop()
            if node not in self._found:
                self._found[node] = self._compute(node)
        return self._found[root]

    def _is_size(self, node: fx.Node) -> bool:
        source = node.args[0] if node.target is aten.sym_size.int else None
        return isinstance(source, fx.Node) and self._given.get(source.name) is not None

    def _compute(self, node: fx.Node) -> _Known | None:
        if self._is_size(node):
            leaf: Any = self._given[node.all_input_nodes[0].name]
            return _Known(leaf.shape[argument(node, "dim")], of_batch=False)
        if node.op == "placeholder":
            value = self._given.get(node.name)
            if value is None or value.is_meta or isinstance(value, torch._subclasses.FakeTensor):
                return None
            return _Known(value.detach().cpu(), of_batch=node.name in self._batch)
        read = [self._found[source] for source in node.all_input_nodes]
        known = [each for each in read if each is not None]
        if len(known) < len(read) or node.op != "call_function" or not _is_plain(node):
            return None
        supply = {source: each.value for source, each in zip(node.all_input_nodes, known, strict=True)}
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda source: supply[source])
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return _Known(node.target(*args, **kwargs), any(each.of_batch for each in known))  # type: ignore[operator]


def _is_plain(node: fx.Node) -> bool:
    """Tell whether an op may run here: it draws nothing, writes nothing, and its result is small."""
    value = node.meta.get("val")
    if isinstance(value, Tensor) and math.prod(s for s in value.shape if not is_size(s)) > MOST_ELEMENTS:
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return not (node.target._schema.is_mutable or torch.Tag.nondeterministic_seeded in node.target.tags)
    return getattr(node.target, "__module__", "") == "_operator"
