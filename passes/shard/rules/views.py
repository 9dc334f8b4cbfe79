"""Ops that move elements about: reshapes, permutations, slices, concatenation, padding. All are linear."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import fx

from passes.graph.nodes import argument, tensors_of
from passes.shard.rules.notation import Rule, Term, from_terms
from passes.shard.rules.shapes import operands_shapes, plain, shape
from passes.shard.words import Choice

aten = torch.ops.aten

Letters: TypeAlias = list[str | None]


def reshape(node: fx.Node) -> tuple[Choice, ...]:
    """Shard dimensions that merge or split and keep the order of elements: the outermost of either side go together.

    (6, 4) -> (24): [a .] -> [a].  (24) -> (6, 4): [a] -> [a .].  (2, 6, 4) -> (2, 24): [a b .] -> [a b].
    """
    before, after = operands_shapes(node)[0], shape(tensors_of(node)[0])
    left: Letters = [None] * len(before)
    right: Letters = [None] * len(after)
    for letter, (i, j) in enumerate(outermost_pairs(before, after)):
        left[i] = right[j] = f"d{letter}"
    made = Term(tuple(right))
    # view_as has a second operand, of the shape to come.
    return from_terms(node, [Term(tuple(left), linear=True), made][: len(operands_shapes(node))], [made])


def outermost_pairs(before: Sequence[int], after: Sequence[int]) -> list[tuple[int, int]]:
    """Find the outermost dimension on either side of each group of dimensions that hold the same elements on both."""
    left = [d for d, size in enumerate(before) if size != 1]
    right = [d for d, size in enumerate(after) if size != 1]
    if 0 in before or 0 in after:
        return []
    pairs: list[tuple[int, int]] = []
    while left and right:
        i, j = left.pop(0), right.pop(0)
        pairs.append((i, j))
        many, few = before[i], after[j]
        while many != few:
            if many < few:
                many *= before[left.pop(0)]
            else:
                few *= after[right.pop(0)]
    return pairs


def _moved(order: Callable[[fx.Node, int], Sequence[int]]) -> Rule:
    """Make the rule of ops whose output dimension k is input dimension ``order[k]``."""

    def rule(node: fx.Node) -> tuple[Choice, ...]:
        rank = len(operands_shapes(node)[0])
        return from_terms(
            node,
            [Term(tuple(f"d{d}" for d in range(rank)), linear=True)],
            [Term(tuple(f"d{d % rank}" for d in order(node, rank)))],
        )

    return rule


def _swapped(first: int | str, second: int | str) -> Callable[[fx.Node, int], list[int]]:
    def order(node: fx.Node, rank: int) -> list[int]:
        dims = list(range(rank))
        if rank > 1:
            a, b = (argument(node, d) if isinstance(d, str) else d for d in (first, second))
            dims[a], dims[b] = dims[b], dims[a]
        return dims

    return order


def _movedim(node: fx.Node, rank: int) -> list[int]:
    source, target = (argument(node, name) for name in ("source", "destination"))
    from_dims = [d % rank for d in ([source] if isinstance(source, int) else source)]
    to_dims = [d % rank for d in ([target] if isinstance(target, int) else target)]
    rest = iter(d for d in range(rank) if d not in from_dims)
    placed = dict(zip(to_dims, from_dims, strict=True))
    return [placed[k] if k in placed else next(rest) for k in range(rank)]


def _kept(*names: str, default: int | None = None, removed: bool = False) -> Rule:
    """Keep dimensions named by arguments whole (or gone, ``removed``); the others may be sharded."""

    def rule(node: fx.Node) -> tuple[Choice, ...]:
        shapes = operands_shapes(node)
        rank = len(shapes[0])
        whole: set[int] = set()
        for name in names:
            dims = argument(node, name, default)
            dims = default if dims is None else dims
            whole |= {d % rank for d in ([dims] if isinstance(dims, int) else dims or range(rank))}
        letters: Letters = [None if d in whole else f"d{d}" for d in range(rank)]
        made = [x for d, x in enumerate(letters) if not removed or d not in whole]
        term = Term(tuple(letters), linear=True)
        return from_terms(node, [term] * len(shapes), [Term(tuple(made))] * len(tensors_of(node)))

    return rule


def _stack(node: fx.Node) -> tuple[Choice, ...]:
    shapes = operands_shapes(node)
    letters: Letters = [f"d{d}" for d in range(len(shapes[0]))]
    position = argument(node, "dim", 0) % (len(letters) + 1)
    made = [*letters[:position], None, *letters[position:]]
    return from_terms(node, [Term(tuple(letters), added=True)] * len(shapes), [Term(tuple(made))])


def _cat(node: fx.Node) -> tuple[Choice, ...]:
    """Shard what is put side by side; torch allows empty one-dimensional tensors among it, for old times' sake."""
    shapes = operands_shapes(node)
    rank = max(len(s) for s in shapes)
    dim = argument(node, "dim", 0) % rank
    letters = tuple(None if d == dim else f"d{d}" for d in range(rank))
    terms = [Term(letters if len(s) == rank else (None,), added=True) for s in shapes]
    return from_terms(node, terms, [Term(letters)])


def _scattered(node: fx.Node) -> tuple[Choice, ...]:
    """Shard ops that replace a slice or plane of ``self`` by ``src``: together they are linear."""
    whole, part = operands_shapes(node)
    dim = argument(node, "dim", 0) % len(whole)
    letters: Letters = [None if d == dim else f"d{d}" for d in range(len(whole))]
    inner = letters if len(part) == len(whole) else letters[:dim] + letters[dim + 1 :]
    return from_terms(
        node, [Term(tuple(letters), added=True), Term(tuple(inner), added=True)], [Term(tuple(letters))]
    )


def _expand(node: fx.Node) -> tuple[Choice, ...]:
    """Shard new dimensions and those repeated in the output, the input is whole then."""
    rank = len(operands_shapes(node)[0])
    letters = [f"d{d}" for d in range(tensors_of(node)[0].dim())]
    made = Term(tuple(letters))
    taken = Term(tuple(letters[len(letters) - rank :]), linear=True)
    return from_terms(node, [taken, made][: len(operands_shapes(node))], [made])


def _repeat(node: fx.Node) -> tuple[Choice, ...]:
    """Shard as expand does if a dimension of 1 is repeated; longer ones that repeat stay whole."""
    before, after = operands_shapes(node)[0], shape(tensors_of(node)[0])
    old = (1,) * (len(after) - len(before)) + before
    letters = [f"d{d}" if a in (1, b) else None for d, (a, b) in enumerate(zip(old, after, strict=True))]
    return from_terms(
        node, [Term(tuple(letters[len(after) - len(before) :]), linear=True)], [Term(tuple(letters))]
    )


def _repeat_interleave(node: fx.Node) -> tuple[Choice, ...]:
    """Shard neighbours that repeat together: a range of elements becomes a range, of the flat tensor if there is no dim."""
    rank = len(operands_shapes(node)[0])
    letters: Letters = [f"d{d}" for d in range(rank)]
    if argument(node, "dim") is None:
        first = next((d for d, n in enumerate(operands_shapes(node)[0]) if n != 1), None)
        letters = ["d0" if d == first else None for d in range(rank)]
        flat = "d0" if first is not None else None  # one element is repeated as a whole
        return from_terms(node, [Term(tuple(letters), linear=True)], [Term((flat,))])
    made = [x if n != 1 else None for x, n in zip(letters, operands_shapes(node)[0], strict=True)]
    return from_terms(node, [Term(tuple(letters), linear=True)], [Term(tuple(made))])


def _pad(node: fx.Node) -> tuple[Choice, ...]:
    """Keep padded dimensions whole. Linear unless a constant other than 0 is put there."""
    rank = len(operands_shapes(node)[0])
    sizes = plain(argument(node, "pad"))
    widths = [(sizes[2 * k], sizes[2 * k + 1]) for k in range(len(sizes) // 2)]
    whole = {rank - 1 - k for k, ends in enumerate(widths) if any(ends)}
    letters = tuple(None if d in whole else f"d{d}" for d in range(rank))
    zeros = argument(node, "mode", "constant") != "constant" or not argument(node, "value", 0)
    return from_terms(node, [Term(letters, linear=zeros)], [Term(letters)])


def _in_front_of(last: int) -> Rule:
    """Make the rule of ops that work on the ``last`` dimensions: those in front may be sharded."""

    def rule(node: fx.Node) -> tuple[Choice, ...]:
        rank = len(operands_shapes(node)[0])
        letters = tuple(f"d{d}" if d < rank - last else None for d in range(rank))
        return from_terms(node, [Term(letters, linear=True)], [Term(letters)])

    return rule


def _diagonal(node: fx.Node) -> tuple[Choice, ...]:
    rank = len(operands_shapes(node)[0])
    whole = {argument(node, name) % rank for name in ("dim1", "dim2")}
    letters = [None if d in whole else f"d{d}" for d in range(rank)]
    made = [x for d, x in enumerate(letters) if d not in whole]
    return from_terms(node, [Term(tuple(letters), linear=True)], [Term((*made, None))])


def _unfold(node: fx.Node) -> tuple[Choice, ...]:
    rank = len(operands_shapes(node)[0])
    dim = argument(node, "dimension") % rank
    letters = tuple(None if d == dim else f"d{d}" for d in range(rank))
    return from_terms(node, [Term(letters, linear=True)], [Term((*letters, None))])


RULES: Mapping[object, Rule] = {
    **dict.fromkeys(
        (
            aten.view.default,
            aten.reshape.default,
            aten._unsafe_view.default,
            aten.view_as.default,
            aten.reshape_as.default,
            aten.flatten.using_ints,
            aten.unflatten.int,
            aten.squeeze.default,
            aten.squeeze.dim,
            aten.squeeze.dims,
            aten.unsqueeze.default,
            aten.ravel.default,
            aten.atleast_1d.default,
        ),
        reshape,
    ),
    aten.permute.default: _moved(lambda node, rank: argument(node, "dims")),
    aten.transpose.int: _moved(_swapped("dim0", "dim1")),
    aten.swapaxes.default: _moved(_swapped("axis0", "axis1")),
    aten.swapdims.default: _moved(_swapped("dim0", "dim1")),
    aten.t.default: _moved(_swapped(0, 1)),
    aten.numpy_T.default: _moved(lambda node, rank: range(rank)[::-1]),
    aten.mT.default: _moved(_swapped(-2, -1)),
    aten.movedim.int: _moved(_movedim),
    aten.movedim.intlist: _moved(_movedim),
    aten.expand.default: _expand,
    aten.expand_as.default: _expand,
    aten.broadcast_to.default: _expand,
    aten.select.int: _kept("dim", default=0, removed=True),
    aten.unbind.int: _kept("dim", default=0, removed=True),
    **{
        op: _kept("dim", default=0)
        for op in (
            aten.slice.Tensor,
            aten.narrow.default,
            aten.split.Tensor,
            aten.split.sizes,
            aten.split_with_sizes.default,
            aten.chunk.default,
            aten.tensor_split.sections,
            aten.tensor_split.indices,
        )
    },
    aten.flip.default: _kept("dims"),
    aten.roll.default: _kept("dims"),
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.select_scatter.default: _scattered,
    aten.slice_scatter.default: _scattered,
    aten.repeat.default: _repeat,
    aten.tile.default: _repeat,
    aten.repeat_interleave.self_int: _repeat_interleave,
    aten.pad.default: _pad,
    aten.constant_pad_nd.default: _pad,
    aten.tril.default: _in_front_of(2),
    aten.triu.default: _in_front_of(2),
    aten.diagonal.default: _diagonal,
    aten.unfold.default: _unfold,
    aten.pixel_shuffle.default: _in_front_of(3),  # channels become pixels
    aten.pixel_unshuffle.default: _in_front_of(3),
}
