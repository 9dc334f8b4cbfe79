"""flex_attention with its mask, and what changes its scores, as programs over small tensors (``runtime.ops.flex``).

Before                                                      After
    mask = ge(i [l, 1], j [1, s]) & eq(d[i], d[j])              blocks = flex_blocks([i, j, d[i], d[j]], steps, l, s)
    far = x - 0.1 * (i - j)                                     y = flex_attention(q, k, v, blocks, [i, j, …], steps, …)
    y = flex_traced(q, k, v, mask, x, far, scale)

Steps are the pointwise ops behind tensors that are large in rows and columns alike. What is small is an operand, and so is
a large tensor that no pointwise op makes: a table of biases. The graph then has nothing of l times s numbers but these.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from cost_models.errors import ModelError
from passes.graph.nodes import call, drop_dead_code, fake_mode_of, where
from passes.trace.normal.flex import FLEX_TRACED
from runtime.ops.flex import FLEX_ATTENTION, FLEX_BLOCKS
from runtime.ops.flex_program import ProgramValue, write

aten = torch.ops.aten

_SAME = (aten.expand.default, aten.clone.default, aten.contiguous.default, aten.detach.default)
"""Ops whose result has their operand's numbers, spread over more places perhaps."""
_UNTAGGED = (aten.__and__.Tensor, aten.__or__.Tensor, aten.__xor__.Tensor, aten.to.dtype)
"""Pointwise ops that torch does not call so."""


def fold_flex(graph: fx.Graph) -> None:
    """Replace ``flex_traced``, in place."""
    nodes = graph.find_nodes(op="call_function", target=FLEX_TRACED)
    blocks: dict[fx.Node, fx.Node] = {}  # many layers read one mask
    for node in nodes:
        _fold(graph, node, blocks)
    if nodes:
        drop_dead_code(graph)


def _fold(graph: fx.Graph, node: fx.Node, blocks: dict[fx.Node, fx.Node]) -> None:
    given: tuple[Any, ...] = node.args
    query, key, value, mask, score, changed, scale, grouped = given
    rows, columns = (int(t.meta["val"].shape[-2]) for t in (query, key))
    mode = fake_mode_of(graph)
    program = _FlexOperands(rows, columns)
    shown = [] if mask is None else program.steps(mask)
    lists = blocks.get(mask)
    if mask is not None and lists is None:
        with graph.inserting_after(mask):
            described = (list(program.operands), shown, rows, columns)
            lists = blocks[mask] = call(graph, mode, FLEX_BLOCKS, described, like=mask)
            lists._rename("flex_blocks")
    far = program.steps(changed, score) if changed is not None else []
    with graph.inserting_before(node):
        arguments = (query, key, value, lists, list(program.operands), shown, far, scale, grouped)
        new = call(graph, mode, FLEX_ATTENTION, arguments, {"visible": 1.0}, like=node)
        new._rename("flex_attention")
    node.replace_all_uses_with(new)
    graph.erase_node(node)


@dataclass(frozen=True)
class _FlexOperands:
    """The operands of an attention's programs, and the steps of one."""

    rows: int
    columns: int
    operands: list[fx.Node] = field(default_factory=list)

    def steps(self, root: fx.Node, score: fx.Node | None = None) -> list[str]:
        """Write down how ``root`` is made of operands, to which it adds, and of ``score``."""
        inner = self._inner(root, score)
        read = [root, *(source for node in inner for source in node.all_input_nodes)]
        for leaf in dict.fromkeys(read):
            if leaf not in inner and leaf not in self.operands and leaf is not score:
                self.operands.append(leaf)
        values = {leaf: ProgramValue(place) for place, leaf in enumerate(self.operands)}
        if score is not None:
            values[score] = ProgramValue(len(values))
        written: list[str] = []
        for node in inner:
            if node.target in _SAME:
                values[node] = values[node.args[0]]  # type: ignore[index]
            else:
                values[node] = ProgramValue(len(written), made=True)
                written.append(str(_step(node, values)))
        last = values[root]
        return written if last == ProgramValue(len(written) - 1, made=True) else [*written, str(last)]

    def _inner(self, root: fx.Node, score: fx.Node | None) -> list[fx.Node]:
        """List the ops that the program does itself, in order: back from ``root``, while they are steps."""
        inner: set[fx.Node] = set()
        waiting = [root]
        while waiting:
            node = waiting.pop()
            if node in inner or node is score or not self._is_large(node):
                continue
            if _can_be_step(node):
                inner.add(node)
                waiting += node.all_input_nodes
            elif score is not None and _reads(node, score):
                raise ModelError(
                    "the score function of flex_attention is no function of one score",
                    [f"{where(node)} reads others, or takes what no plan can write down"],
                    ["compute it element by element, from the score, the four indices and captured tensors"],
                )
        return sorted(inner)

    def _is_large(self, node: fx.Node) -> bool:
        shape = node.meta["val"].shape
        return len(shape) > 1 and shape[-2] == self.rows and shape[-1] == self.columns


def _can_be_step(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten":
        return False
    if node.target in _SAME:
        return True
    pointwise = torch.Tag.pointwise in node.target.tags or node.target in _UNTAGGED
    drawn = torch.Tag.nondeterministic_seeded in node.target.tags
    numbers = any(not isinstance(source.meta.get("val"), torch.Tensor) for source in node.all_input_nodes)
    if not pointwise or drawn or numbers:
        return False
    return _step(node, dict.fromkeys(node.all_input_nodes, ProgramValue(0))) is not None


def _step(node: fx.Node, values: dict[fx.Node, ProgramValue]) -> str | None:
    def value(argument: Any) -> Any:
        return values[argument] if isinstance(argument, fx.Node) else argument

    return write(node.target, [value(a) for a in node.args], {k: value(a) for k, a in node.kwargs.items()})


def _reads(node: fx.Node, source: fx.Node) -> bool:
    """Tell whether ``node`` depends on ``source``."""
    seen, waiting = {node}, [node]
    while waiting:
        new = [n for n in waiting.pop().all_input_nodes if n not in seen]
        seen.update(new)
        waiting += new
    return source in seen
