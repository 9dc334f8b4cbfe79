"""Matrix products, einsum and convolutions: linear in each factor, sums over what they contract."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from passes.graph.nodes import argument
from passes.shard.rules.notation import Rule, Term, from_terms, from_text, notation
from passes.shard.rules.shapes import operands_shapes, plain
from passes.shard.words import Choice, operands

aten = torch.ops.aten


def _matmul(node: fx.Node) -> tuple[Choice, ...]:
    """Shard matmul: vectors have one dimension less; leading dimensions broadcast."""
    left, right = (len(shape) for shape in operands_shapes(node))
    return from_text(
        node,
        f"self'[{'k' if left == 1 else 'b* m k'}] other'[{'k' if right == 1 else 'b* k n'}] -> "
        f"[{'b*' if max(left, right) > 2 else ''} {'m' if left > 1 else ''} {'n' if right > 1 else ''}]",
    )


def _added(text: str, dims: tuple[str, ...]) -> Rule:
    """Shard addmm and the like: ``self`` broadcasts over the product, and is not added if beta is 0."""

    def rule(node: fx.Node) -> tuple[Choice, ...]:
        rank = len(operands_shapes(node)[0])
        return from_text(node, f"self+[{' '.join(dims[len(dims) - rank :])}] {text} -> [{' '.join(dims)}]")

    return rule


def _einsum(node: fx.Node) -> tuple[Choice, ...]:
    equation = str(argument(node, "equation")).replace(" ", "")
    left, _, right = equation.partition("->")
    if "->" not in equation:
        letters = sorted(c for c in set(left) - set(",.") if left.count(c) == 1)
        right = ("..." if "..." in left else "") + "".join(letters)
    terms = []
    for text, value in zip([*left.split(","), right], [*operands(node), node], strict=True):
        rank = value.meta["val"].dim()
        extra = rank - len(text.replace("...", ""))
        rest = [f"b{i}" for i in reversed(range(extra))]
        before, dots, after = text.partition("...")
        dims: list[str | None] = [*before, *(rest if dots else ()), *after]
        # A diagonal (ii) is no range of numbers that one slice of the operand could hold.
        terms.append(dims)
    twice = {d for dims in terms for d in dims if d and dims.count(d) > 1}
    made = [Term(tuple(None if d in twice else d for d in dims), linear=True) for dims in terms]
    return from_terms(node, made[:-1], made[-1:])


def _convolution(transposed: bool | None = False) -> Rule:
    """Shard input (batch, in, …), weight (out, in, …), or (in, out, …) if transposed; groups cut both channels alike."""

    def rule(node: fx.Node) -> tuple[Choice, ...]:
        turned = bool(argument(node, "transposed")) if transposed is None else transposed
        image, kernel = (len(shape) for shape in operands_shapes(node)[:2])
        spatial = " ".join("." * (kernel - 2))
        groups = int(plain(argument(node, "groups", 1)))
        batch = "b" if image == kernel else ""
        if groups == 1:
            weight = "i o" if turned else "o i"
            text = (
                f"input'[{batch} i {spatial}] weight'[{weight} {spatial}] bias+[o] -> [{batch} o {spatial}]"
            )
            return from_text(node, text)
        text = f"input'[{batch} g {spatial}] weight'[g . {spatial}] bias+[g] -> [{batch} g {spatial}]"
        return from_text(node, text, divides={"g": groups})

    return rule


RULES: Mapping[object, Rule] = {
    aten.linear.default: notation("input'[b* i] weight'[o i] bias+[o] -> [b* o]"),
    aten.mm.default: notation("self'[m k] mat2'[k n] -> [m n]"),
    aten.bmm.default: notation("self'[b m k] mat2'[b k n] -> [b m n]"),
    aten.mv.default: notation("self'[m k] vec'[k] -> [m]"),
    aten.dot.default: notation("self'[k] tensor'[k] -> []"),
    aten.outer.default: notation("self'[m] vec2'[n] -> [m n]"),
    aten.matmul.default: _matmul,
    aten.einsum.default: _einsum,
    aten.addmm.default: _added("mat1'[m k] mat2'[k n]", ("m", "n")),
    aten.addmv.default: _added("mat'[m k] vec'[k]", ("m",)),
    aten.baddbmm.default: _added("batch1'[b m k] batch2'[b k n]", ("b", "m", "n")),
    aten.bilinear.default: notation("input1'[b* i] input2'[b* j] weight'[o i j] bias+[o] -> [b* o]"),
    aten._grouped_mm.default: notation("self'[. k] mat2'[. k n] offs[.] bias+[. n] -> [. n]"),
    aten.conv1d.default: _convolution(),
    aten.conv2d.default: _convolution(),
    aten.conv3d.default: _convolution(),
    aten.conv1d.padding: _convolution(),
    aten.conv2d.padding: _convolution(),
    aten.conv3d.padding: _convolution(),
    aten.conv_transpose1d.default: _convolution(transposed=True),
    aten.conv_transpose2d.input: _convolution(transposed=True),
    aten.conv_transpose3d.input: _convolution(transposed=True),
    aten.convolution.default: _convolution(transposed=None),
}
