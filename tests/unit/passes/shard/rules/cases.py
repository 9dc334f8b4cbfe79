"""Drawn examples of ops for the proofs of sharding rules: an op with its arguments per name.

Sizes are 4, 6 or 12 (an axis of 2 divides all of them), at times 1; numbers are float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from runtime.ops.flex import FLEX_ATTENTION, FLEX_BLOCKS
from tests.unit.passes.shard.rules.cases_views import cut, lookup, move, reshape
from tests.unit.passes.shard.rules.draw import Case, Draw

aten = torch.ops.aten


def linear(d: Draw) -> Case:
    i, o = d.size(), d.size()
    bias = [d.tensor(o)] if d.maybe() else []
    return (aten.linear.default, d.tensor(*d.sizes(1, 3), i), d.tensor(o, i), *bias)


def matmul(d: Draw) -> Case:
    m, k, n, b = d.size(), d.size(), d.size(), d.size()
    batch = d.sizes(1, 2)
    return d.one_of(
        (aten.mm.default, d.tensor(m, k), d.tensor(k, n)),
        (aten.bmm.default, d.tensor(b, m, k), d.tensor(b, k, n)),
        (aten.mv.default, d.tensor(m, k), d.tensor(k)),
        (aten.dot.default, d.tensor(k), d.tensor(k)),
        (aten.matmul.default, d.tensor(k), d.tensor(k)),
        (aten.matmul.default, d.tensor(*batch, m, k), d.tensor(*d.broadcast(batch), k, n)),
        (aten.matmul.default, d.tensor(*d.broadcast(batch), m, k), d.tensor(*batch, k, n)),
        (aten.matmul.default, d.tensor(*batch, m, k), d.tensor(k)),
        (aten.matmul.default, d.tensor(k), d.tensor(*batch, k, n)),
        (aten.outer.default, d.tensor(m), d.tensor(n)),
        (aten.bilinear.default, d.tensor(b, m), d.tensor(b, k), d.tensor(n, m, k), d.tensor(n)),
    )


def added_product(d: Draw) -> Case:
    b, m, k, n = d.size(), d.size(), d.size(), d.size()
    return d.one_of(
        (aten.addmm.default, d.tensor(*d.broadcast([m, n])), d.tensor(m, k), d.tensor(k, n)),
        (aten.addmv.default, d.tensor(m), d.tensor(m, k), d.tensor(k)),
        (aten.baddbmm.default, d.tensor(*d.broadcast([b, m, n])), d.tensor(b, m, k), d.tensor(b, k, n)),
    )


def einsum(d: Draw) -> Case:
    b, i, j, k = d.size(), d.size(), d.size(), d.size()
    return d.one_of(
        (aten.einsum.default, "bij,bjk->bik", [d.tensor(b, i, j), d.tensor(b, j, k)]),
        (aten.einsum.default, "i,j->ij", [d.tensor(i), d.tensor(j)]),
        (aten.einsum.default, "ij,kj", [d.tensor(i, j), d.tensor(k, j)]),
        (aten.einsum.default, "ii->i", [d.tensor(i, i)]),
        (aten.einsum.default, "ij,j,j->", [d.tensor(i, j), d.tensor(j), d.tensor(j)]),
        (aten.einsum.default, "...ij,...jk->...ik", [d.tensor(b, i, j), d.tensor(j, k)]),
        (aten.einsum.default, "bhqd, bhkd -> bhqk", [d.tensor(2, b, i, j), d.tensor(2, b, k, j)]),
    )


def convolution(d: Draw) -> Case:
    dims, groups = d.one_of(1, 2), d.one_of(1, 1, 2, 4)
    b, i, o = d.sizes(0, 1), d.one_of(4, 8), d.one_of(4, 12)
    stride, padding, dilation = d.one_of(1, 2), d.one_of(0, 1), d.one_of(1, 2)
    x, size = d.tensor(*b, i, *[7] * dims), [3] * dims
    if d.maybe():
        op = {1: aten.conv_transpose1d.default, 2: aten.conv_transpose2d.input}[dims]
        bias = d.tensor(o) if d.maybe() else None
        return (op, x, d.tensor(i, o // groups, *size), bias, [stride], [padding], [0], groups, [dilation])
    bias = d.tensor(o) if d.maybe() else None
    weight = d.tensor(o, i // groups, *size)
    op = {1: aten.conv1d, 2: aten.conv2d}[dims]
    if d.maybe():
        return (op.padding, x, weight, bias, [1], d.one_of("same", "valid"), [dilation], groups)
    return (op.default, x, weight, bias, [stride], [padding], [dilation], groups)


def embedding(d: Draw) -> Case:
    rows = d.size()
    indices = d.ints(rows, *d.sizes(0, 2))
    return (aten.embedding.default, d.tensor(rows, d.size()), indices, d.one_of(-1, 0, rows - 1))


def norm(d: Draw) -> Case:
    inner = d.sizes(1, 2)
    x, weight, bias = d.tensor(*d.sizes(1, 2), *inner), d.tensor(*inner), d.tensor(*inner)
    c = d.one_of(4, 8, 12)
    image, channel = d.tensor(d.one_of(4, 6), c, *d.sizes(0, 2)), [d.tensor(c), d.tensor(c)]
    stats = [d.tensor(c), d.tensor(c).abs() + 0.1]
    affine = channel if d.maybe() else [None, None]
    return d.one_of(
        (aten.layer_norm.default, x, inner, weight, bias),
        (aten.layer_norm.default, x, inner, weight if d.maybe() else None),
        (aten.rms_norm.default, x, inner, weight if d.maybe() else None, 1e-6),
        (aten.group_norm.default, image, d.one_of(2, 4), *affine),
        (aten.batch_norm.default, image, *affine, *stats, True, 0.1, 1e-5, False),
        (aten.batch_norm.default, image, *affine, None, None, True, 0.1, 1e-5, False),
        (aten.batch_norm.default, image, *affine, *stats, False, 0.1, 1e-5, False),
        (aten.instance_norm.default, d.tensor(4, c, 6), *affine, None, None, True, 0.1, 1e-5, False),
    )


def attention(d: Draw) -> Case:
    b, h, q, k, e, v = d.sizes(1, 1)[0], d.one_of(4, 12), d.size(), d.size(), d.size(), d.size()
    shared, k = d.one_of(1, 2, 4), d.one_of(q, k)
    query, key, value = d.tensor(b, h, q, e), d.tensor(b, h // shared, k, e), d.tensor(b, h // shared, k, v)
    mask = d.one_of(
        None,
        None,
        torch.rand(d.one_of([b, h, q, k], [b, 1, q, k], [1, h, 1, k], [q, k])) > 0.3,
        d.tensor(b, 1, q, k),
        d.tensor(q, k),
    )
    if mask is not None and mask.dtype == torch.bool and mask.dim() and mask.shape[-1] == k:
        mask[..., 0] = True
    causal = mask is None and d.maybe()
    return (aten.scaled_dot_product_attention.default, query, key, value, mask, 0.0, causal), {
        "scale": d.one_of(None, 0.3),
        "enable_gqa": shared > 1,
    }


def recurrent(d: Draw) -> Case:
    b, t, i, h, layers, both = d.one_of(4, 6), 4, 4, 4, d.one_of(1, 2), d.maybe()
    first = d.maybe()
    x = d.tensor(b, t, i) if first else d.tensor(t, b, i)
    ways, gates = 1 + both, d.one_of(4, 3)
    params = []
    for layer in range(layers):
        for _ in range(ways):
            width = i if layer == 0 else h * ways
            params += [
                d.tensor(gates * h, width),
                d.tensor(gates * h, h),
                d.tensor(gates * h),
                d.tensor(gates * h),
            ]
    state = d.tensor(layers * ways, b, h)
    options = (params, True, layers, 0.0, True, both, first)
    if gates == 4:
        return (aten.lstm.input, x, [state, d.tensor(layers * ways, b, h)], *options)
    return (aten.gru.input, x, state, *options)


def loss(d: Draw) -> Case:
    c, shape = d.size(ones=False), [d.size(ones=False), *d.sizes(0, 1)]
    if d.maybe():
        shape = d.one_of(shape, [])
    logits = d.tensor(*shape[:1], c, *shape[1:])
    target = d.ints(c, *shape)
    ignored = d.one_of(-100, 1)
    if d.maybe():
        target = target.masked_fill(torch.rand(shape) < 0.3, ignored)
    target = target.flatten().index_fill(0, torch.tensor([0]), 2).view(shape)
    weight = torch.rand(c, dtype=torch.float64) if d.maybe() else None
    reduction = d.one_of(0, 1, 2)
    smoothing = d.one_of(0.0, 0.1)
    probabilities = d.tensor(*logits.shape).softmax(1 if shape else 0)
    return d.one_of(
        (aten.cross_entropy_loss.default, logits, target, weight, reduction, ignored, smoothing),
        (aten.cross_entropy_loss.default, logits, probabilities, weight, reduction, -100, smoothing),
        (aten.nll_loss_nd.default, logits, target, weight, reduction, ignored),
    )


def elementwise_loss(d: Draw) -> Case:
    shape, reduction = d.sizes(1, 3), d.one_of(0, 1, 2)
    x, y = d.tensor(*shape), d.tensor(*shape)
    p, q = x.sigmoid(), y.sigmoid()
    return d.one_of(
        (aten.mse_loss.default, x, y, reduction),
        (aten.mse_loss.default, x, d.tensor(*shape[1:]), reduction),
        (aten.l1_loss.default, x, y, reduction),
        (aten.smooth_l1_loss.default, x, y, reduction),
        (aten.huber_loss.default, x, y, reduction),
        (aten.binary_cross_entropy.default, p, q, None, reduction),
        (
            aten.binary_cross_entropy_with_logits.default,
            x,
            q,
            d.tensor(*shape),
            d.tensor(shape[-1]),
            reduction,
        ),
        (aten.kl_div.default, x, q, reduction),
        (aten.soft_margin_loss.default, x, y.sign(), reduction),
    )


def pool(d: Draw) -> Case:
    x = d.tensor(d.size(), d.size(), 6, 6)
    line = d.tensor(d.size(), d.size(), 12)
    return d.one_of(
        (aten.max_pool2d.default, x, [2, 2]),
        (aten.max_pool2d.default, x[0], [3, 3], [1, 1], [1, 1]),
        (aten.max_pool2d_with_indices.default, x, [2, 2]),
        (aten.avg_pool2d.default, x, [2, 2]),
        (aten.max_pool1d.default, line, [3]),
        (aten.avg_pool1d.default, line, [2]),
        (aten.adaptive_avg_pool2d.default, x, [1, 1]),
        (aten.adaptive_avg_pool1d.default, line, [5]),
        (aten.adaptive_max_pool2d.default, x, [2, 3]),
        (aten.upsample_nearest2d.vec, x, [12, 12], None),
        (aten.upsample_bilinear2d.vec, x, None, False, [2.0, 2.0]),
    )


def elementwise(d: Draw) -> Case:
    shape = d.sizes(0, 3)
    x, y, z = d.tensor(*shape), d.tensor(*d.broadcast(shape)), d.tensor(*d.broadcast(shape))
    mask = torch.rand(d.broadcast(shape)) > 0.5
    unary = (aten.neg, aten.relu, aten.gelu, aten.silu, aten.tanh, aten.sigmoid, aten.exp, aten.sin, aten.abs)
    copies = (
        aten.clone,
        aten.detach,
        aten.contiguous,
        aten.softplus,
        aten.hardtanh,
        aten.leaky_relu,
        aten.elu,
    )
    return d.one_of(
        *((packet.default, x) for packet in (*unary, *copies)),
        (aten.add.Tensor, x, y),
        (aten.add.Tensor, y, x),
        (aten.add.Tensor, x, 2.5),
        (aten.sub.Tensor, x, y),
        (aten.mul.Tensor, x, y),
        (aten.mul.Tensor, x, 0.5),
        (aten.div.Tensor, x, y.abs() + 1),
        (aten.div.Tensor, x, 3.0),
        (aten.rsub.Scalar, x, 1.0),
        (aten.pow.Tensor_Scalar, x, 2),
        (aten.maximum.default, x, y),
        (aten.min.other, x, y),
        (aten.lerp.Scalar, x, y, 0.25),
        (aten.addcmul.default, x, y, z),
        (aten.addcdiv.default, x, y, z.abs() + 1),
        (aten.where.self, mask, x, y),
        (aten.where.ScalarOther, mask, x, 0.0),
        (aten.where.ScalarOther, mask, x, -1.0),
        (aten.where.ScalarSelf, mask, 0, x),
        (aten.masked_fill.Scalar, x, mask, 0),
        (aten.masked_fill.Scalar, x, mask, -1e3),
        (aten.eq.Tensor, x, y),
        (aten.__and__.Tensor, x > 0, mask),
        (aten.clamp.default, x, -0.5, 0.5),
        (aten.to.dtype, x, torch.int64),
        (aten.to.dtype, mask, torch.float64),
        (aten.fill.Tensor, x, d.tensor()),
        (aten.full_like.default, x, 3.0),
        (aten.prelu.default, d.tensor(4, 6, 2), d.tensor(d.one_of(1, 6))),
        (aten.dropout.default, x, 0.5, False),
        (aten.glu.default, d.tensor(4, 6), d.dim(2)),
    )


def reduction(d: Draw) -> Case:
    shape = d.sizes(1, 3)
    x, rank, keep = d.tensor(*shape), len(shape), d.maybe()
    dim, dims = d.dim(rank), sorted({d.dim(rank) % rank for _ in range(2)})
    several = d.one_of(dims, [dim], [n - rank for n in dims])
    return d.one_of(
        (aten.sum.default, x),
        (aten.sum.dim_IntList, x, several, keep),
        (aten.sum.dim_IntList, x > 0, several, keep),
        (aten.mean.default, x),
        (aten.mean.dim, x, several, keep),
        (aten.mean.dim, x, None, keep),
        (aten.amax.default, x, several, keep),
        (aten.max.dim, x, dim, keep),
        (aten.max.default, x),
        (aten.argmax.default, x, dim, keep),
        (aten.argmax.default, x),
        (aten.prod.dim_int, x, dim, keep),
        (aten.any.dim, x > 0, dim, keep),
        (aten.var.correction, x, several, {"correction": 0, "keepdim": keep}),
        (aten.var_mean.correction, x, several, {"correction": 0, "keepdim": keep}),
        (aten.logsumexp.default, x, several, keep),
        (aten.linalg_vector_norm.default, x, 2, several, keep),
        (aten.count_nonzero.dim_IntList, x > 0, several),
        (aten.softmax.int, x, dim),
        (aten.log_softmax.int, x, dim),
        (aten.cumsum.default, x, dim),
        (aten.cumprod.default, x, dim),
        (aten.topk.default, x, 1, dim),
        (aten.sort.default, x, dim),
        (aten.argsort.default, x, dim),
        (aten.diff.default, x, 1, dim, x.clone()),
    )


def producer(d: Draw) -> Case:
    shape, x = d.sizes(1, 3), d.tensor(4, 6)
    return d.one_of(
        (aten.zeros.default, shape),
        (aten.full.default, shape, 2.5),
        (aten.new_zeros.default, x, shape),
        (aten.new_full.default, x, shape, 1.5),
        (aten.arange.default, 12),
        (aten.zeros_like.default, x),
    )


def flex(d: Draw) -> Case:
    """Documents of each sample, a bias of each head; rows and columns that are no multiple of a block."""
    b, h, q, k, e, v = d.sizes(1, 1)[0], d.one_of(4, 12), d.size(), d.size(ones=False), d.size(), d.size()
    shared = d.one_of(1, 2)
    query, key, value = d.tensor(b, h, q, e), d.tensor(b, h // shared, k, e), d.tensor(b, h // shared, k, v)
    row, column = d.ints(2, d.one_of(1, b), d.one_of(1, h), q, 1), d.ints(2, b, 1, 1, k)
    mask = ["le.Tensor %0 %1", "ge.Scalar %0 1", "__or__.Tensor $0 $1"]
    blocks = (FLEX_BLOCKS, [row, column], mask, q, k)
    score = d.one_of([], ["mul.Tensor %0 %1", "add.Tensor $0 %2", "sub.Tensor $1 %3"])
    operands = [row, column, d.tensor(h, 1, 1)]
    listed = FLEX_BLOCKS(*blocks[1:])
    return d.one_of(
        blocks,
        (FLEX_ATTENTION, query, key, value, listed, operands, mask, score, 0.3, shared > 1),
        (FLEX_ATTENTION, query, key, value, None, operands, [], score, 0.3, shared > 1),
    )


CASES: Mapping[str, Callable[[Draw], Case]] = {
    function.__name__: function
    for function in (
        linear, matmul, added_product, einsum, convolution, embedding, norm, attention, flex, recurrent, loss,
        elementwise_loss, pool, elementwise, reduction, reshape, move, cut, lookup, producer,
    )
}  # fmt: skip
