"""Drawn examples of ops that move elements about: see ``shard_cases``."""

from __future__ import annotations

import torch

from tests.unit.passes.shard.rules.draw import Case, Draw

aten = torch.ops.aten


def reshape(d: Draw) -> Case:
    a, b, c, e = d.size(), d.size(), d.size(), d.size()
    x, flat = d.tensor(a, b, c), d.tensor(a * b, c * e)
    return d.one_of(
        (aten.view.default, x, [a * b, c]),
        (aten.view.default, x, [a, b * c]),
        (aten.view.default, flat, [a, b, c, e]),
        (aten.view.default, flat, [a, -1, c * e]),
        (aten.view.default, flat, [-1, e]),
        (aten.reshape.default, x, [-1]),
        (aten.reshape.default, x, [1, a, b, 1, c]),
        (aten.reshape.default, flat, [b, a, e, c]),
        (aten.reshape.default, flat.T, [a * c, b * e]),
        (aten.flatten.using_ints, x, d.one_of(0, 1, -2), -1),
        (aten.unflatten.int, flat, 0, [a, b]),
        (aten.unflatten.int, flat, -1, [c, -1]),
        (aten.squeeze.default, x),
        (aten.squeeze.dim, x, d.dim(3)),
        (aten.squeeze.dims, x, [0, -1]),
        (aten.unsqueeze.default, x, d.dim(4)),
        (aten.view_as.default, x, d.tensor(a * b, c)),
    )


def move(d: Draw) -> Case:
    shape = d.sizes(2, 3)
    x, rank = d.tensor(*shape), len(shape)
    order = d.random.sample(range(rank), rank)
    widened = [d.one_of(4, 6) if n == 1 else n for n in shape]
    return d.one_of(
        (aten.permute.default, x, [n - d.one_of(0, rank) for n in order]),
        (aten.transpose.int, x, d.dim(rank), d.dim(rank)),
        (aten.t.default, d.tensor(4, 6)),
        (aten.mT.default, x),
        (aten.movedim.int, x, d.dim(rank), d.dim(rank)),
        (aten.movedim.intlist, x, [0, 1], [-1, 0]),
        (aten.expand.default, x, [4, *widened]),
        (aten.expand.default, x, [-1] * rank),
        (aten.expand_as.default, x, d.tensor(*widened)),
        (aten.repeat.default, x, [4, *(2 if n == 1 else d.one_of(1, 1, 3) for n in shape)]),
        (aten.repeat_interleave.self_int, x, 3, d.dim(rank)),
        (aten.repeat_interleave.self_int, x, 2),
        (aten.tril.default, x),
        (aten.flip.default, x, [d.dim(rank)]),
        (aten.roll.default, x, [1], [d.dim(rank)]),
        (aten.roll.default, x, [1]),
        (aten.diagonal.default, x, 0, 0, -1),
    )


def cut(d: Draw) -> Case:
    shape = [n + 2 for n in d.sizes(2, 3)]
    x, rank = d.tensor(*shape), len(shape)
    dim = d.dim(rank)
    others = [n for k, n in enumerate(shape) if k != dim % rank]
    pad = [d.one_of(0, 1, -1) for _ in range(2 * d.random.randint(1, rank))]
    third = d.tensor(*(3 if k == dim % rank else n for k, n in enumerate(shape)))
    return d.one_of(
        (aten.select.int, x, dim, 1),
        (aten.slice.Tensor, x, dim, 1, 9223372036854775807),
        (aten.slice.Tensor, x, dim, 0, -1, 2),
        (aten.narrow.default, x, dim, 0, 2),
        (aten.split.Tensor, x, 2, dim),
        (aten.split_with_sizes.default, x, [1, x.shape[dim] - 1], dim),
        (aten.chunk.default, x, 2, dim),
        (aten.unbind.int, x, dim),
        (aten.unfold.default, x, dim, 2, 1),
        (aten.cat.default, [x, third, x.clone()], dim),
        (aten.stack.default, [x, x.clone()], d.dim(rank + 1)),
        (aten.pad.default, x, pad, "constant", d.one_of(None, 0.0, 2.0)),
        (aten.pad.default, d.tensor(4, 6, 6), [1, 2], d.one_of("reflect", "circular")),
        (aten.constant_pad_nd.default, x, pad),
        (aten.select_scatter.default, x, d.tensor(*others), dim, 0),
        (aten.slice_scatter.default, x, third, dim, 0, 3),
    )


def lookup(d: Draw) -> Case:
    shape = d.sizes(2, 3)
    x, rank = d.tensor(*shape), len(shape)
    dim = d.dim(rank)
    n = shape[dim]
    rows, matrix = d.ints(n, 6), d.ints(shape[0], *d.sizes(1, 2))
    index = d.ints(n, *(4 if k == dim % rank else m for k, m in enumerate(shape)))
    short = index.narrow((dim + 1) % rank, 0, 1)
    source = d.tensor(*(6 if k == dim % rank else m for k, m in enumerate(shape)))
    return d.one_of(
        (aten.index.Tensor, x, [matrix]),
        (aten.index.Tensor, x, [None, d.ints(shape[1], 4)]),
        (aten.index.Tensor, x, [d.ints(shape[0], 4, 1), d.ints(shape[1], 6)]),
        (aten.index.Tensor, d.tensor(4, 6, 4, 2), [d.ints(4, 6), None, d.ints(4, 6)]),
        (aten.index_select.default, x, dim, rows),
        (aten.gather.default, x, dim, d.one_of(index, short)),
        (
            aten.scatter.src,
            x,
            dim,
            index.argsort(dim) % n,
            source.new_ones(index.shape),
        ),
        (aten.scatter.value, x, dim, d.one_of(index, short), d.one_of(0, 2.0)),
        (aten.scatter_add.default, x, dim, index, d.tensor(*index.shape)),
        (aten.index_add.default, x, dim, rows, source),
        (aten.index_fill.int_Scalar, x, dim, rows, 1.5),
        (aten.index_put.default, x, [matrix], d.tensor(*shape[1:]), True),
        (aten.index_put.default, x, [None, d.ints(shape[1], 4)], d.tensor(4, *shape[2:]), True),
        (aten.one_hot.default, d.ints(5, 4, 6), 5),
        (aten.bucketize.Tensor, x, d.tensor(6).sort().values),
    )
