"""The terms of a loss, and the linear path from each to the loss.

    loss = cross_entropy(logits, labels) + 0.01 * aux        path: add, mul        terms: cross_entropy, aux

A term that is divided by a count of the batch's own tokens (``cross_entropy`` with reduction "mean", or a sum divided by
``mask.sum()``) may be divided by the whole batch's count instead, exactly, as long as all that follows is linear.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from passes.graph.nodes import argument, is_size, op_name, symbolic, where
from passes.graph.recomputed import draws_random_numbers
from passes.trace.build import Converted
from runtime.segment.code import BatchSpec

aten = torch.ops.aten

CROSS_ENTROPIES = frozenset(
    {
        aten.cross_entropy_loss.default,
        aten.nll_loss.default,
        aten.nll_loss_nd.default,
        aten.nll_loss2d.default,
    }
)
NONE, MEAN, SUM = 0, 1, 2
"""torch's numbers for ``reduction=``."""

_SAME = {"alias", "clone", "contiguous", "detach", "positive", "to", "_to_copy"}
_SHAPE = {"flatten", "reshape", "select", "squeeze", "unsqueeze", "view", "_unsafe_view"}
_LINEAR = frozenset(_SAME | _SHAPE | {"neg", "add", "sub", "rsub", "stack", "cat", "mean", "sum"})
"""Linear (or affine, with shares that sum to 1) in all of their floating-point inputs together."""
_ADDING = frozenset({"add", "sub", "rsub", "stack", "cat"})


_MADE_BY_SHAPE = frozenset(
    {
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.full_like.default,
        aten.new_zeros.default,
        aten.new_ones.default,
        aten.new_full.default,
    }
)
"""Their results depend on their inputs' sizes only: ``loss = logits.new_zeros(())``."""


@dataclass(frozen=True)
class LossTerm:
    """A term that is divided by a count of tokens. ``node``: the cross-entropy, or the division.

    ``counted``: the node of its targets, or of its denominator where ``node`` is a division.
    """

    node: fx.Node
    counted: fx.Node


@dataclass(frozen=True)
class LossTerms:
    """``path``: nodes between the terms and the loss, in order. ``problems``: why a token mean cannot be had of what
    looks like one. ``sums``, ``others``: the remaining terms that depend on the batch; ``others`` are no sums.
    ``adds_constant``: true if something is added that is the same for every micro-batch (a number, a penalty on weights).
    """

    terms: tuple[LossTerm, ...]
    path: tuple[fx.Node, ...]
    problems: tuple[str, ...]
    sums: tuple[fx.Node, ...]
    others: tuple[fx.Node, ...]
    adds_constant: bool


def loss_terms(traced: Converted, spec: BatchSpec) -> LossTerms | None:
    """Find the terms of the traced loss; None if there is none."""
    loss = next((o.node for o in traced.outputs if o.kind == "loss"), None)
    if loss is None:
        return None
    facts = _Known(traced, spec)
    return _Walk(facts).terms_of(facts.nodes[loss])


class _Known:
    """The facts about every node that are known before the walk."""

    def __init__(self, traced: Converted, spec: BatchSpec) -> None:
        self.symbol = spec.batch_symbol
        self.nodes: Mapping[str, fx.Node] = {node.name: node for node in traced.module.graph.nodes}
        self.kinds = {i.node: (i.kind, i.name) for i in traced.inputs}
        self.varying = self._varying(spec)

    def _varying(self, spec: BatchSpec) -> set[fx.Node]:
        """Find nodes that differ between micro-batches: contents of batch leaves, and sizes that count samples."""
        found: set[fx.Node] = set()
        for node in self.nodes.values():
            kind, name = self.kinds.get(node.name, ("", ""))
            value = node.meta.get("val")
            if is_size(value):
                varies = self.symbol in value.node.expr.free_symbols
            elif node.target in _MADE_BY_SHAPE:
                varies = self.symbol in sympy.sympify(_elements(node)).free_symbols
            elif node.op == "placeholder":
                varies = kind == "batch" and spec.batch_dims.get(name) is not None
            else:
                varies = any(source in found for source in node.all_input_nodes)
            if varies:
                found.add(node)
        return found


class _Walk:
    """One walk from the loss (or a numerator) backwards."""

    def __init__(self, facts: _Known) -> None:
        self.facts, self.symbol, self.varying = facts, facts.symbol, facts.varying
        self.terms: dict[fx.Node, LossTerm] = {}
        self.path: set[fx.Node] = set()
        self.problems: list[str] = []
        self.sums: dict[fx.Node, None] = {}
        self.others: dict[fx.Node, None] = {}
        self.adds_constant = False

    def terms_of(self, loss: fx.Node) -> LossTerms:
        waiting = [loss]
        seen: set[fx.Node] = set()
        while waiting:
            node = waiting.pop()
            if node in seen or node not in self.varying:
                continue
            seen.add(node)
            following = self._visit(node)
            if following:
                self.path.add(node)
                waiting += following
        return LossTerms(
            tuple(self.terms.values()),
            tuple(node for node in self.facts.nodes.values() if node in self.path),
            tuple(dict.fromkeys(self.problems)),
            tuple(self.sums),
            tuple(self.others),
            self.adds_constant,
        )

    def _visit(self, node: fx.Node) -> list[fx.Node]:
        """Record ``node`` if it is a term; else what it is linear in."""
        if node.target in CROSS_ENTROPIES:
            self._cross_entropy(node)
            return []
        inputs = self._linear_in(node)
        if inputs and not any(self._counts_samples(source) for source in inputs):
            return inputs
        if op_name(node) == "div" and self._division(node):
            return []
        if op_name(node) == "sum" and inputs:
            self.sums[node] = None
            return []
        self.others[node] = None
        self._blame(node)
        return []

    def _cross_entropy(self, node: fx.Node) -> None:
        target, reduction = argument(node, "target"), argument(node, "reduction")
        if reduction == SUM:
            self.sums[node] = None
            return
        samples = _elements(target) / self.symbol if isinstance(target, fx.Node) else None
        if reduction != MEAN or samples is None or target.meta["val"].is_floating_point():
            self.others[node] = (
                None  # probabilities as targets: divided by positions, which every sample has alike
            )
            return
        problem = self._why_not_counted(target)
        if not problem and self.symbol in sympy.sympify(samples).free_symbols:
            problem = f"has {_elements(target)} targets, which are not so many per sample"
        if problem:
            self.problems.append(f"{where(node)} {problem}")
            self.others[node] = None
            return
        self.terms[node] = LossTerm(node, target)

    def _division(self, node: fx.Node) -> bool:
        """Tell whether ``node`` is a sum over the batch, divided by a number that the batch's contents give."""
        above, below = node.args[0], node.args[1]
        if not isinstance(above, fx.Node) or not isinstance(below, fx.Node) or below not in self.varying:
            return False
        value = below.meta["val"]
        if node.kwargs or not isinstance(value, torch.Tensor) or value.dim() or self._why_not_counted(below):
            return False
        found = _Walk(self.facts).terms_of(above)
        if found.sums and (found.terms or found.others or found.adds_constant):
            self.problems.append(
                f"{where(node)} divides more than a sum over the batch by a count of the batch"
            )
        if found.terms or found.others or found.adds_constant or not found.sums:
            return False
        self.terms[node] = LossTerm(node, below)
        return True

    def _linear_in(self, node: fx.Node) -> list[fx.Node]:
        """Return the floating-point inputs that ``node`` is linear in; none if it is not, or not for all of them."""
        name = op_name(node)
        if not _is_floating(node):
            return []
        if name in _ADDING and any(_is_constant(item) and item not in self.varying for item in _added(node)):
            self.adds_constant = True
        varying = [s for s in node.all_input_nodes if s in self.varying]
        floating = [s for s in varying if _is_floating(s)]
        if name in ("mul", "div"):
            first, second = node.args[0], node.args[1]
            if name == "div" and (second in varying or node.kwargs.get("rounding_mode")):
                return []
            return floating if len(varying) == 1 and first is not second else []
        return floating if name in _LINEAR and len(floating) == len(varying) else []

    def _counts_samples(self, node: fx.Node) -> bool:
        """Tell whether the tensor has an element (or more) per sample: reducing it is then a term of its own."""
        return self.symbol in sympy.sympify(_elements(node)).free_symbols

    def _why_not_counted(self, node: fx.Node) -> str:
        """Say why the batch alone does not determine ``node``; "" if it does."""
        for source in self._ancestors(node):
            kind, name = self.facts.kinds.get(source.name, ("", ""))
            if kind in ("parameter", "buffer"):
                return f"has targets that depend on the {kind} {name}"
            if source.op == "call_function" and draws_random_numbers(source):
                return f"has targets that are drawn at random ({source.name})"
        return "" if node in self.varying else "has targets that do not depend on the batch"

    def _blame(self, node: fx.Node) -> None:
        """Note every mean cross-entropy that reaches the loss through ``node``, which is not linear."""
        for source in self._ancestors(node):
            if source.target in CROSS_ENTROPIES and argument(source, "reduction") == MEAN:
                self.problems.append(
                    f"{where(source)} reaches the loss through {where(node)}, which is not linear"
                )

    def _ancestors(self, node: fx.Node) -> Iterator[fx.Node]:
        waiting, seen = [node], {node}
        while waiting:
            found = waiting.pop()
            yield found
            fresh = [s for s in found.all_input_nodes if s not in seen]
            seen.update(fresh)
            waiting += fresh


def _added(node: fx.Node) -> list[Any]:
    """Return the inputs that are added up, or put side by side."""
    first = node.args[0]
    return list(first) if isinstance(first, list | tuple) else list(node.args[:2])


def _is_constant(item: object) -> bool:
    """Tell whether a summand may be something else than 0."""
    if isinstance(item, fx.Node):
        return item.target not in (aten.zeros_like.default, aten.new_zeros.default, aten.zeros.default)
    return item != 0


def _is_floating(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _elements(node: fx.Node) -> Any:
    """Number of elements: a number or an expression of the sizes."""
    sizes = node.meta["val"].shape if isinstance(node.meta.get("val"), torch.Tensor) else ()
    return sympy.expand(sympy.prod(map(symbolic, sizes)))
