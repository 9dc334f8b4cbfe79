"""Lookups and scatters: dimensions of the indices may be sharded, and those that are not looked into.

The dimension looked into stays whole, but for the rows of an embedding: each rank looks up what it holds, zeros for
the rest, and the sum is the embedding ("embedding:vocabulary", ``runtime.ops.local``), and so for bags.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from cost_models.layout import Shard
from passes.graph.nodes import argument, tensors_of
from passes.shard.rules.notation import P, R, Rule, Term, from_terms, from_text, notation
from passes.shard.rules.shapes import operand_names, operands_shapes
from passes.shard.words import Choice, Need
from runtime.ops.bags import EMBEDDING_BAG, MAX

aten = torch.ops.aten

VOCABULARY = "embedding:vocabulary"
BAG_VOCABULARY = "embedding_bag:vocabulary"


def _embedding(node: fx.Node) -> tuple[Choice, ...]:
    if argument(node, "scale_grad_by_freq") or argument(node, "sparse"):
        return from_text(node, "weight[. e] indices[.*] -> [.* e]")
    found = from_text(node, "weight'[. e] indices[b*] -> [b* e]")
    if operands_shapes(node)[0][0] <= 1:
        return found
    return (*found, Choice((Need(Shard(0)), Need(R)), (P,), VOCABULARY))


def _index(node: fx.Node) -> tuple[Choice, ...]:
    """Shard x[i, :, j]: indices broadcast; their dimensions stand where the first index is, or in front if not adjacent."""
    given = argument(node, "indices")
    rank = len(operands_shapes(node)[0])
    if _fills_by_mask(node):
        masked = len(operands_shapes(node)[1])
        inside = tuple(f"d{d}" for d in range(rank))
        value = Term((None,) * len(operands_shapes(node)[2]), added=True)
        return from_terms(node, [Term(inside, added=True), Term(inside[:masked]), value], [Term(inside)])
    at = [d for d, index in enumerate(given) if index is not None]
    if not at or any(
        index.meta["val"].dtype in (torch.bool, torch.uint8) for index in given if index is not None
    ):
        return from_text(node, "self[.*] indices[.*] values[.*] -> [.*]")
    letters: list[str | None] = [None if d in at else f"d{d}" for d in range(rank)]
    shapes = operands_shapes(node)[1 : 1 + len(at)]
    broadcast = [f"i{d}" for d in range(max(len(s) for s in shapes))]
    indices = [Term(tuple(broadcast[len(broadcast) - len(s) :])) for s in shapes]
    position = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    rest = [x for d, x in enumerate(letters) if d not in at]
    made = Term((*rest[:position], *broadcast, *rest[position:]))
    if node.target is aten.index.Tensor:
        return from_terms(node, [Term(tuple(letters), linear=True), *indices], [made])
    # index_put: what is put has the shape of what an index would get, or broadcasts to it. With a sharded index each
    # rank makes its own writes only: parts of a sum if they are added.
    written = operands_shapes(node)[-1]
    put = made.dims[len(made.dims) - len(written) :]
    spread = {x for x, size in zip(put, written, strict=True) if size != 1} if _adds(node) else set()
    put = tuple(None if x and x.startswith("i") and x not in spread else x for x in put)
    indices = [Term(tuple(x if x in spread else None for x in index.dims)) for index in indices]
    return from_terms(
        node, [Term(tuple(letters), added=True), *indices, Term(put, added=True)], [Term(tuple(letters))]
    )


def _fills_by_mask(node: fx.Node) -> bool:
    """Tell whether the op is x[mask] = number: what is written where does not depend on how much of the mask is true."""
    given = argument(node, "indices")
    return (
        node.target is aten.index_put.default
        and len(given) == 1
        and given[0].meta["val"].dtype == torch.bool
        and not _adds(node)
        and set(operands_shapes(node)[-1]) <= {1}
    )


def _embedding_bag(node: fx.Node) -> tuple[Choice, ...]:
    """Shard bags of fixed size, columns, and rows where their sums add up; a bag by offsets is not known without all.

    Gradients that depend on how often an index comes (or hold only rows that come) need all indices on every rank.
    """
    plain = not argument(node, "scale_grad_by_freq") and not argument(node, "sparse")
    summed = plain and argument(node, "mode") != MAX
    bag = "b" if plain and argument(node, "offsets") is None else "."
    indices = f"{bag} ." if argument(node, "offsets") is None else "."
    linear = "'" if summed else ""
    found = from_text(
        node,
        f"weight{linear}[. e] indices[{indices}] offsets[.] per_sample_weights{linear}[{indices}] -> [{bag} e]",
    )
    if not summed or operands_shapes(node)[0][0] <= 1:
        return found
    given = tuple(Need(R, partial_gradient=name == "per_sample_weights") for name in operand_names(node)[1:])
    return (*found, Choice((Need(Shard(0)), *given), (P,), BAG_VOCABULARY))


def _index_select(node: fx.Node) -> tuple[Choice, ...]:
    rank = len(operands_shapes(node)[0])
    dim = argument(node, "dim") % max(rank, 1)
    letters = [None if d == dim else f"d{d}" for d in range(rank)]
    index = ("i",) * len(operands_shapes(node)[1])
    made = [*letters[:dim], "i", *letters[dim + 1 :]] if rank else []
    return from_terms(node, [Term(tuple(letters), linear=True), Term(index)], [Term(tuple(made))])


def _gather(node: fx.Node) -> tuple[Choice, ...]:
    """Shard other dimensions together if they are as long in the index: a longer tensor's rest is not read."""
    source, index = operands_shapes(node)
    dim = argument(node, "dim") % max(len(source), 1)
    left = [f"d{d}" if d != dim and source[d] == index[d] else None for d in range(len(source))]
    right = [f"d{d}" if d == dim or source[d] == index[d] else None for d in range(len(index))]
    return from_terms(node, [Term(tuple(left), linear=True), Term(tuple(right))], [Term(tuple(right))])


def _scatter(node: fx.Node) -> tuple[Choice, ...]:
    """Shard ``self``, what is written, and the index together in the other dimensions; a value is no partial sum.

    Index and source are cut along ``dim`` together if they are equally long: of a longer source the rest is not read.
    """
    shapes = operands_shapes(node)
    rank = len(shapes[0])
    dim = argument(node, "dim") % max(rank, 1)
    same = [len({s[d] for s in shapes if len(s) == rank}) == 1 for d in range(rank)]
    letters = tuple(f"d{d}" if d != dim and same[d] else None for d in range(rank))
    has_source = any(a.name == "src" for a in node.target._schema.arguments)  # type: ignore[union-attr]
    is_zero = not has_source and argument(node, "value") == 0
    together = _adds(node) and len({s[dim] for s in shapes[1:] if s}) == 1
    read = tuple("t" if d == dim and together else x for d, x in enumerate(letters))
    terms = [Term(letters, added=has_source, linear=is_zero), Term(read)]
    return from_terms(node, [*terms, *[Term(read, added=True)] * (len(shapes) - 2)], [Term(letters)])


def _adds(node: fx.Node) -> bool:
    """Tell whether what is written is added to what is there: any rank may then write any part of it."""
    return node.target in (aten.scatter_add.default, aten.index_add.default) or bool(
        argument(node, "accumulate")
    )


def _index_write(node: fx.Node) -> tuple[Choice, ...]:
    """Shard index_add, index_copy: rows of ``source`` go to rows of ``self``."""
    shapes = operands_shapes(node)
    rank = len(shapes[0])
    dim = argument(node, "dim") % max(rank, 1)
    letters = tuple(None if d == dim else f"d{d}" for d in range(rank))
    index = Term(("t" if _adds(node) else None,) * len(shapes[1]))
    written = tuple(x or index.dims[0] for x in letters) if index.dims else letters
    source = written if len(shapes[2]) == rank else index.dims
    return from_terms(node, [Term(letters, added=True), index, Term(source, added=True)], [Term(letters)])


def _index_fill(node: fx.Node) -> tuple[Choice, ...]:
    shapes = operands_shapes(node)
    dim = argument(node, "dim") % max(len(shapes[0]), 1)
    letters = tuple(None if d == dim else f"d{d}" for d in range(len(shapes[0])))
    return from_terms(node, [Term(letters), *(Term((None,) * len(s)) for s in shapes[1:])], [Term(letters)])


def _one_hot(node: fx.Node) -> tuple[Choice, ...]:
    """Shard one_hot; without a number of classes the largest label decides, which no rank knows alone."""
    rank = len(operands_shapes(node)[0])
    letters = tuple(f"d{d}" if argument(node, "num_classes", -1) != -1 else None for d in range(rank))
    return from_terms(node, [Term(letters)], [Term((*letters, None))])


def _search(node: fx.Node) -> tuple[Choice, ...]:
    """Shard a search: values are looked up in one sorted list."""
    names = ("self", "boundaries") if node.target is aten.bucketize.Tensor else ("self", "sorted_sequence")
    rank = tensors_of(node)[0].dim()
    shapes = operands_shapes(node)
    of_values = 0 if names[1] == "boundaries" else 1
    letters = tuple(f"d{d}" if len(shapes[1 - of_values]) == 1 else None for d in range(rank))
    return from_terms(
        node,
        [Term(letters if i == of_values else (None,) * len(s)) for i, s in enumerate(shapes)],
        [Term(letters)],
    )


_GRID = notation("input'[n c .*] grid[n d* .] -> [n c d*]")
"""Read an image at the places that the grid has in its last dimension. (Nobody may try other numbers there: the CPU's
kernel ends the process at NaN.)"""

RULES: Mapping[object, Rule] = {
    aten.embedding.default: _embedding,
    EMBEDDING_BAG: _embedding_bag,
    aten.index.Tensor: _index,
    aten.index_put.default: _index,
    aten.index_select.default: _index_select,
    aten.gather.default: _gather,
    aten.scatter.src: _scatter,
    aten.scatter.value: _scatter,
    aten.scatter_add.default: _scatter,
    aten.index_add.default: _index_write,
    aten.index_copy.default: _index_write,
    aten.index_fill.int_Scalar: _index_fill,
    aten.one_hot.default: _one_hot,
    aten.bucketize.Tensor: _search,
    aten.searchsorted.Tensor: _search,
    aten.grid_sampler.default: _GRID,
    aten.grid_sampler_2d.default: _GRID,
    aten.grid_sampler_3d.default: _GRID,
}
