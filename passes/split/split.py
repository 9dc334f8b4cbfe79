"""split_neurons: ops become blocks of their output neurons, and what reads them goes on in blocks as long as it can.

    h = linear(x, w1, b1)   [b, 100]       h_b0 = linear(x, w1#0, b1#0)   [b, 60]     h_b1 = …   [b, 40]
    a = gelu(h)             [b, 100]       a_b0 = gelu(h_b0)              [b, 60]     a_b1 = …   [b, 40]
    y = linear(a, w2, b2)   [b, 8]         y_b0 = linear(a_b0, w2#0, b2)  [b, 8]      y_b1 = linear(a_b1, w2#1)
                                           y_sum = add(y_b0, y_b1)        [b, 8]

Every op is one of: in blocks (its rule, ``passes.split.rules``, or its windows, ``passes.split.windows``), sums of what
its blocks make, nothing but a choice among blocks (``passes.split.shapes``), or whole, on operands that are put together
right there. Blocks may be of any sizes. Parameters that are read in blocks become parts (``passes.split.state``).
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from pydantic import Field
from torch import fx

from cost_models.errors import InternalError, UsageError
from passes.graph.graph import GraphOutput, OpGraph
from passes.graph.nodes import drop_dead_code, new_module, tensors_of
from passes.shard.rules import makes_tensors
from passes.split.push import Pusher
from passes.split.rules import mapped_args
from passes.split.state import settle, with_parts
from passes.split.values import BlockedTensor, SplitGraph, ranges_of
from runtime.state.rank_state import part_name


@dataclass(frozen=True)
class Split:
    """An op that is run in blocks of its output neurons."""

    op: str
    dim: Annotated[int, Field(description="of the op's output")]
    sizes: Annotated[
        tuple[Annotated[int, Field(ge=1)], ...], Field(description="elements of each block along it")
    ]


def split_neurons(graph: OpGraph, splits: Sequence[Split]) -> OpGraph:
    """Run the named ops of ``graph`` in blocks, and all that can follow from them; it computes the same."""
    _refuse_bad(graph, splits)
    rank = {split.op: tensors_of(graph.nodes[split.op])[0].dim() for split in splits}
    seeds = {
        split.op: (split.dim % rank[split.op], tuple(split.sizes)) for split in splits if len(split.sizes) > 1
    }
    kept: frozenset[str] = frozenset()
    while True:
        rewriting = _Rewriting(graph, seeds, kept)
        made = rewriting.run()
        if not rewriting.refused:
            return made
        if rewriting.refused <= kept:
            raise InternalError("split: what must stay whole is cut again", sorted(rewriting.refused))
        kept |= rewriting.refused


class _Rewriting:
    """One run of the pass. ``refused``: ops, parameters and buffers that must stay whole, found at the end of it."""

    def __init__(
        self, graph: OpGraph, seeds: Mapping[str, tuple[int, tuple[int, ...]]], kept: frozenset[str]
    ) -> None:
        self.old, self.seeds, self.kept = graph, seeds, kept
        self.values = SplitGraph(graph, kept)
        self.pusher = Pusher(graph, self.values)
        self.refused: set[str] = set()

    def run(self) -> OpGraph:
        """Make the graph in blocks; of no use if something was ``refused``."""
        for node in self.old.graph.nodes:
            if node.op == "placeholder":
                copy = self.values.new.placeholder(node.name)
                copy.meta = dict(node.meta)
                self.values.made[node] = copy
            elif node.op == "call_function":
                self._op(node)
        outputs = self._outputs()
        drop_dead_code(self.values.new)
        parts = settle(self.values)
        self._refuse_lost_writes(outputs, {whole.name for whole in parts})
        if self.refused:
            return self.old
        returned = self.values.new.output_node().args[0]
        assert isinstance(returned, list | tuple)
        made = replace(
            with_parts(self.old, parts),
            module=new_module(self.old.module, self.values.new),
            blocks=self._blocks(),
            outputs=tuple(
                replace(output, node=node.name) for output, node in zip(outputs, returned, strict=True)
            ),
        )
        self._refuse_lost_gradients(made, {whole.name: len(cut) for whole, cut in parts.items()})
        return made

    def _blocks(self) -> dict[str, tuple[str, int]]:
        """Return the ops of the new graph that are blocks, of this split and of those before."""
        known = {**self.old.blocks, **self.values.blocks}
        return {node.name: known[node.name] for node in self.values.new.nodes if node.name in known}

    def _op(self, node: fx.Node) -> None:
        values = self.values
        made = None
        if node.name not in self.kept and (makes_tensors(node) or node.target is operator.getitem):
            dim, sizes = self.seeds.get(node.name, (0, ()))
            made = self.pusher.made(node, dim, sizes) if sizes else self.pusher.pushed(node)
        values.made[node] = made or values.copy(node, *mapped_args(values, node, {}))
        if node.name in self.seeds and not isinstance(values.made[node], BlockedTensor):
            self._cut(node)

    def _cut(self, node: fx.Node) -> None:
        """Run an op whole that cannot run in blocks; its readers go on with slices of it."""
        dim, sizes = self.seeds[node.name]
        parts = [self.values.take(node, {dim: span}) for span in ranges_of(sizes)]
        self.values.made[node] = BlockedTensor(dim, tuple(parts), sizes)

    # ------------------------------------------------------------------------------------------------------
    # The values that the graph returns and writes

    def _outputs(self) -> tuple[GraphOutput, ...]:
        """Make the output node: whole values, but for buffers that are read and written in the same blocks."""
        table: list[GraphOutput] = []
        returned: list[fx.Node] = []
        for output in self.old.outputs:
            node = self.old.nodes[output.node]
            if output.kind == "buffer" and output.name not in self.kept and self._in_parts(output):
                blocks = self.values.made[node]
                assert isinstance(blocks, BlockedTensor)
                returned += blocks.nodes
                table += [replace(output, name=part_name(output.name, k)) for k in range(len(blocks.nodes))]
            else:
                returned.append(self.values.whole(node))
                table.append(output)
        old = self.old.graph.output_node()
        self.values.new.output(tuple(returned)).meta.update(old.meta)
        return tuple(table)

    def _in_parts(self, output: GraphOutput) -> bool:
        blocks = self.values.made[self.old.nodes[output.node]]
        given = (i.node for i in self.old.inputs if (i.kind, i.name) == ("buffer", output.name))
        requests = self.values.requests.get(self.old.nodes[next(given, output.node)], {})
        return isinstance(blocks, BlockedTensor) and set(requests) == {
            ((blocks.dim, span),) for span in blocks.ranges
        }

    def _refuse_lost_writes(self, outputs: Sequence[GraphOutput], parted: set[str]) -> None:
        """Refuse to split where ops would write slices: they must write buffers, whole or parts."""
        for op, buffers in self.pusher.written.items():
            if not buffers <= parted:
                self.refused.add(op)
        returned = {output.name for output in outputs}
        given = {i.name: i.node for i in self.old.inputs if i.kind == "buffer"}
        for output in self.old.outputs:
            if output.kind != "buffer" or output.name not in given:
                continue
            in_parts = output.name not in returned
            if in_parts and given[output.name] not in parted:
                self.refused.add(output.name)
            elif not in_parts and given[output.name] in parted:
                self.refused.add(given[output.name])

    def _refuse_lost_gradients(self, made: OpGraph, counts: Mapping[str, int]) -> None:
        """Refuse parts that do not train though the whole does: weight decay and momentum move it at a gradient of 0."""
        for node, count in counts.items():
            name = self.old.input_of[node].name
            parts = {part_name(name, number) for number in range(count)}
            if name in self.old.trained and not parts <= made.trained:
                self.refused.add(node)


def _refuse_bad(graph: OpGraph, splits: Sequence[Split]) -> None:
    because: list[str] = []
    for name, count in Counter(split.op for split in splits).items():
        if count > 1:
            because.append(f"{name} is named {count} times")
    for split in splits:
        because += _problems(graph, split)
    if because:
        raise UsageError(
            f"{graph.model_name} cannot be split so",
            because,
            ["passes.split.families.families(graph) lists what can be split, and into how many units"],
        )


def _problems(graph: OpGraph, split: Split) -> list[str]:
    node = graph.nodes.get(split.op)
    if node is None or node.op != "call_function":
        return [f"{split.op} is no op of the graph"]
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return [f"{split.op} does not make one tensor"]
    shape: tuple[int | torch.SymInt, ...] = tuple(value.shape)
    if not -len(shape) <= split.dim < len(shape):
        return [f"{split.op} has no dimension {split.dim}: its output has {len(shape)}"]
    size = shape[split.dim]
    if not isinstance(size, int):
        return [f"dimension {split.dim} of {split.op} depends on the batch ({size}), which is not split"]
    if min(split.sizes, default=0) < 1 or sum(split.sizes) != size:
        return [
            f"{split.op}: blocks of {', '.join(map(str, split.sizes)) or 'no'} elements do not make up "
            f"the {size} of dimension {split.dim}"
        ]
    return []
