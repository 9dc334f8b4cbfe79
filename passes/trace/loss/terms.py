"""The terms of a loss, and the linear path from each to the loss.

    loss = cross_entropy(logits, labels) + 0.01 * aux        path: add, mul        terms: cross_entropy, aux

A term is what a linear path leads to: the op that makes one number (or a few) of all samples. How a batch has it from its
micro-batches is told by the power k of the number of samples n in  term = nᵏ · (a sum over samples):

    means       a mean cross-entropy, which divides by what the batch decides: labels that are not ignored, their weights
    sums        k = 0: a sum over samples
    averages    k = -1: a mean over samples, in one op or by hand (``loss.sum() / loss.shape[0]``)
    others      none of these, as far as it can be told: only the whole batch has it

Whether an op's result is a sum or a mean over samples is said by its rule of sharding: a part of the batch gives a part of
the sum, or of the mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from cost_models.layout import Partial, Shard
from passes.graph.nodes import argument, op_name, where
from passes.graph.recomputed import draws_random_numbers
from passes.shard.rules import choices, has_rule, makes_tensors
from passes.shard.rules.reductions import MEAN as MEAN_OF_TERMS
from passes.shard.words import Choice, operands
from passes.trace.build import Converted
from passes.trace.loss.dependence import (
    LINEAR,
    SAME,
    SHAPE,
    Dependence,
    ancestors,
    elements,
    is_floating_tensor,
    values,
)
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

_ADDING = frozenset({"add", "sub", "rsub", "stack", "cat", "where"})
_NEVER_IGNORED = frozenset({"argmax", "argmin", "arange"})
"""Ops that make no negative number."""


@dataclass(frozen=True)
class LabelMean:
    """A mean cross-entropy: its op, and the node of its targets."""

    node: fx.Node
    targets: fx.Node


@dataclass(frozen=True)
class LossTerms:
    """Terms by their kind (above). ``path``: nodes between the terms and the loss, in order.

    ``problems``: why a mean over labels cannot be had of what looks like one.
    ``adds_constant``: true if something is added that is the same for every micro-batch (a number, a penalty on weights).
    """

    means: tuple[LabelMean, ...]
    sums: tuple[fx.Node, ...]
    averages: tuple[fx.Node, ...]
    others: tuple[fx.Node, ...]
    path: tuple[fx.Node, ...]
    problems: tuple[str, ...]
    adds_constant: bool

    def unlike(self, reduction: str) -> tuple[fx.Node, ...]:
        """List the terms that ``reduction`` of the micro-batches does not bring to the whole batch's value."""
        means = () if reduction == "token_mean" else tuple(mean.node for mean in self.means)
        sums = self.sums if reduction == "mean" else ()
        averages = self.averages if reduction == "sum" else ()
        return (*means, *sums, *averages, *self.others)


def loss_terms(traced: Converted, spec: BatchSpec) -> LossTerms | None:
    """Find the terms of the traced loss; None if there is none."""
    loss = next((o.node for o in traced.outputs if o.kind == "loss"), None)
    if loss is None:
        return None
    facts = Dependence(traced, spec)
    return _LossWalk(facts).terms_of(facts.nodes[loss])


class _LossWalk:
    """A walk from the loss backwards."""

    def __init__(self, facts: Dependence) -> None:
        self.facts = facts
        self.means: dict[fx.Node, LabelMean] = {}
        self.path: set[fx.Node] = set()
        self.problems: list[str] = []
        self.sums: dict[fx.Node, None] = {}
        self.averages: dict[fx.Node, None] = {}
        self.others: dict[fx.Node, None] = {}
        self.adds_constant = False

    def terms_of(self, loss: fx.Node) -> LossTerms:
        waiting = [(loss, 0)]
        seen: dict[fx.Node, int] = {}
        while waiting:
            node, outer = waiting.pop()
            if node not in self.facts.varying:
                continue
            if node in seen:
                if seen[node] != outer:
                    self._other(node, "is taken with two powers of the number of samples")
                continue
            seen[node] = outer
            following = self._visit(node, outer)
            if following:
                self.path.add(node)
                waiting += following
        others = tuple(self.others)
        return LossTerms(
            tuple(mean for node, mean in self.means.items() if node not in self.others),
            tuple(node for node in self.sums if node not in self.others),
            tuple(node for node in self.averages if node not in self.others),
            others,
            tuple(node for node in self.facts.nodes.values() if node in self.path),
            tuple(dict.fromkeys(self.problems)),
            self.adds_constant,
        )

    def _visit(self, node: fx.Node, outer: int) -> list[tuple[fx.Node, int]]:
        """Record ``node`` if it is a term; else values it is linear in. ``outer``: powers of n between it and the loss."""
        if node.target in CROSS_ENTROPIES and self._label_mean(node, outer):
            return []
        inputs = self._linear_in(node)
        if inputs and not any(self.facts.counts_samples(source) for source, _ in inputs):
            return [(source, outer + power) for source, power in inputs]
        choice = self._by_samples(node)
        if choice is None:
            self._other(node)
            return []
        given = operands(node)
        if not any(self.facts.counts_samples(source) for source in given):
            return [(source, outer) for source in given if source in self.facts.varying]
        power = self._inner_power(node)
        total = None if power is None else outer + power - (choice.local == MEAN_OF_TERMS)
        if total == 0:
            self.sums[node] = None
        elif total == -1:
            self.averages[node] = None
        else:
            self._other(node, "is no sum and no mean over samples")
        return []

    def _label_mean(self, node: fx.Node, outer: int) -> bool:
        """Tell whether ``node`` is a mean over labels, and record it."""
        targets, weight, ignored = (argument(node, name) for name in ("target", "weight", "ignore_index"))
        if argument(node, "reduction") != MEAN or targets.meta["val"].is_floating_point():
            return False  # probabilities as targets: divided by positions, which every sample has alike
        samples = sympy.sympify(elements(targets) / self.facts.symbol)
        if self.facts.symbol in samples.free_symbols:
            self._other(node, f"has {elements(targets)} targets, which are not so many per sample")
        elif outer or self.facts.powers[node]:
            self._other(node, "is multiplied by the number of samples")
        elif weight in self.facts.varying:
            self._other(node, "has class weights that depend on the batch")
        elif weight is not None and isinstance(ignored, fx.Node):
            self._other(node, "has class weights, and ignores a label that depends on sizes")
        elif weight is None and not isinstance(ignored, fx.Node) and ignored < 0 and _never_negative(targets):
            self.averages[node] = None
        elif problem := self._why_not_counted(targets):
            self._other(node, problem)
        else:
            self.means[node] = LabelMean(node, targets)
        return True

    def _linear_in(self, node: fx.Node) -> list[tuple[fx.Node, int]]:
        """Return the floating-point inputs that ``node`` is linear in, each with the power of n that it is multiplied by;
        none if it is not linear, or not for all of them.
        """
        name, facts = op_name(node), self.facts
        if not is_floating_tensor(node):
            return []
        if name in _ADDING and any(_is_constant(item) and item not in facts.varying for item in _added(node)):
            self.adds_constant = True
        varying = [s for s in node.all_input_nodes if s in facts.varying]
        floating = [s for s in varying if is_floating_tensor(s)]
        if name in ("mul", "div", "true_divide"):
            first, second = node.args[0], node.args[1]
            if (name != "mul" and second in facts.contents) or node.kwargs.get("rounding_mode"):
                return []
            factors = [s for s in varying if s not in facts.contents]
            read = [s for s in varying if s in facts.contents]
            power = sum(facts.powers[s] or 0 for s in factors)
            if len(read) != 1 or read[0] not in floating or first is second:
                return []
            if any(facts.powers[s] is None for s in factors):
                return []
            return [(read[0], power if name == "mul" else -power)]
        if name == "where":
            condition = node.args[0]
            return [] if condition in facts.varying else [(s, 0) for s in floating]
        return [(s, 0) for s in floating] if name in LINEAR and len(floating) == len(varying) else []

    def _by_samples(self, node: fx.Node) -> Choice | None:
        """Return the choice that makes a part of the result out of a part of the samples (or of results of them)."""
        facts = self.facts
        counts = [s for s in values(node) if s in facts.varying and s not in facts.contents]
        if not makes_tensors(node) or not has_rule(node) or any(facts.powers[s] != 0 for s in counts):
            return None
        for choice in choices(node):
            if choice.local not in ("", MEAN_OF_TERMS) or not isinstance(choice.outputs[0], Partial):
                continue
            given = operands(node)
            if len(choice.inputs) == len(given) and all(
                self._takes(need.placement, source) for need, source in zip(choice.inputs, given, strict=True)
            ):
                return choice
        return None

    def _takes(self, placement: object, source: fx.Node) -> bool:
        if source not in self.facts.varying:
            return not isinstance(placement, Shard | Partial)
        dim = self.facts.sample_dim(source)
        if dim is None:
            return isinstance(placement, Partial) and not self.facts.counts_samples(source)
        return isinstance(placement, Shard) and placement.dim == dim

    def _inner_power(self, node: fx.Node) -> int | None:
        """Return the power of n in what is reduced over samples."""
        powers = [self.facts.powers[source] for source in values(node)]
        if op_name(node) in ("sum", "mean"):
            return powers[0]
        return 0 if all(power == 0 for power in powers) else None

    def _why_not_counted(self, node: fx.Node) -> str:
        """Say why the batch alone does not determine ``node``; "" if it does."""
        for source in ancestors(node):
            kind, name = self.facts.kinds.get(source.name, ("", ""))
            if kind in ("parameter", "buffer"):
                return f"has targets that depend on the {kind} {name}"
            if source.op == "call_function" and draws_random_numbers(source):
                return f"has targets that are drawn at random ({source.name})"
        return "" if node in self.facts.varying else "has targets that do not depend on the batch"

    def _other(self, node: fx.Node, problem: str = "") -> None:
        """Record a term of which nothing is known; note every mean over labels that reaches the loss through it."""
        self.others[node] = None
        if problem:
            self.problems.append(f"{where(node)} {problem}")
            return
        for source in ancestors(node):
            if source.target in CROSS_ENTROPIES and argument(source, "reduction") == MEAN:
                self.problems.append(
                    f"{where(source)} reaches the loss through {where(node)}, which is not linear"
                )


def _never_negative(targets: fx.Node) -> bool:
    while op_name(targets) in SAME | SHAPE and len(targets.all_input_nodes) == 1:
        targets = targets.all_input_nodes[0]
    return op_name(targets) in _NEVER_IGNORED


def _added(node: fx.Node) -> list[Any]:
    """Return the inputs that are added up, or put side by side."""
    first = node.args[0]
    if op_name(node) == "where":
        return list(node.args[1:3])
    return list(first) if isinstance(first, list | tuple) else list(node.args[:2])


def _is_constant(item: object) -> bool:
    """Tell whether a summand may be something else than 0."""
    if isinstance(item, fx.Node):
        return item.target not in (aten.zeros_like.default, aten.new_zeros.default, aten.zeros.default)
    return item != 0
