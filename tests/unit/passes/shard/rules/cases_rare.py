"""Drawn examples of the rarer ops of the sharding table: see ``shard_cases``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from runtime.ops.bags import EMBEDDING_BAG
from tests.unit.passes.shard.rules.draw import Case, Draw

aten = torch.ops.aten


def rare_products(d: Draw) -> Case:
    x, weight, bias = d.tensor(4, 4, 3, 3, 4), d.tensor(6, 4, 2, 2, 2), d.tensor(6)
    image, kernel = d.tensor(4, 4, 5, 5), d.tensor(4, 6, 3, 3)
    turned = d.maybe()
    kernel = kernel if turned else kernel.transpose(0, 1)
    ones, zeros = [1, 1], [0, 0]
    return d.one_of(
        (aten.conv3d.default, x, weight, bias),
        (aten.conv3d.padding, x, weight, bias, [1, 1, 1], "same"),
        (aten.conv_transpose3d.input, x, weight.transpose(0, 1), bias),
        (aten.convolution.default, image, kernel, d.tensor(6), ones, zeros, ones, turned, zeros, 1),
        (aten.convolution.default, image, d.tensor(4, 2, 3, 3), None, ones, zeros, ones, False, zeros, 2),
        (
            aten.rnn_tanh.input,
            d.tensor(4, 6, 2),
            d.tensor(1, 6, 4),
            cell(d),
            True,
            1,
            0.0,
            True,
            False,
            False,
        ),
        (aten.rnn_relu.input, d.tensor(6, 4, 2), d.tensor(1, 6, 4), cell(d), True, 1, 0.0, True, False, True),
    )


def cell(d: Draw) -> list[torch.Tensor]:
    return [d.tensor(4, 2), d.tensor(4, 4), d.tensor(4), d.tensor(4)]


def rare_elementwise(d: Draw) -> Case:
    shape = d.sizes(1, 3)
    x, y = d.tensor(*shape), d.tensor(*d.broadcast(shape))
    return d.one_of(
        (aten.__and__.Scalar, x > 0, True),
        (aten.__or__.Scalar, x > 0, False),
        (aten.__or__.Tensor, x > 0, y > 0),
        (aten.__xor__.Tensor, x > 0, y > 0),
        (aten.alias.default, x),
        (aten.lift_fresh_copy.default, x),
        (aten.selu.default, x),
        (aten.hardswish.default, x),
        (aten.log_sigmoid.default, x),
        (aten.floor_divide.default, d.ints(20, *shape), d.one_of(3, d.ints(5, *d.broadcast(shape)) + 1)),
        (aten.polar.default, x.abs(), d.tensor(*shape)),
        (aten.view_as_complex.default, d.tensor(*shape, 2)),
        (aten.view_as_real.default, torch.complex(x, d.tensor(*shape))),
        (aten.index_put.default, x, [torch.rand(shape[: d.one_of(1, len(shape))]) > 0.5], d.tensor()),
        (aten.fill.Scalar, x, 2.0),
        (aten.deg2rad.default, x),
        (aten.mul.Scalar, x, 2.0),
        (aten.div.Scalar, x, 2.0),
        (aten.div.Tensor_mode, x, y.abs() + 1, {"rounding_mode": d.one_of(None, "floor")}),
        (aten.rsub.Tensor, x, y),
        (aten._to_copy.default, x),
        (aten.to.device, x, torch.device("cpu"), torch.float64),
        (aten.to.dtype_layout, x),
        (aten.ones_like.default, x),
    )


def rare_reductions(d: Draw) -> Case:
    shape = d.sizes(1, 3)
    x, rank, keep = d.tensor(*shape), len(shape), d.maybe()
    dim = d.dim(rank)
    return d.one_of(
        (aten.amin.default, x, [dim], keep),
        (aten.min.default, x),
        (aten.min.dim, x, dim, keep),
        (aten.argmin.default, x, dim, keep),
        (aten.all.default, x > 0),
        (aten.all.dim, x > 0, dim, keep),
        (aten.any.default, x > 0),
        (aten.any.dims, x > 0, [dim], keep),
        (aten.count_nonzero.default, x),
        (aten.prod.default, x),
        (aten.std.default, torch.cat([x, x + 1])),
        (aten.std.dim, d.tensor(4, 6), [0], True, keep),
        (aten.std.correction, d.tensor(4, 6), [1], {"correction": 1, "keepdim": keep}),
        (aten.var.default, torch.cat([x, x + 1])),
        (aten.var.dim, d.tensor(4, 6), [1], True, keep),
        (aten.var_mean.dim, d.tensor(4, 6), [1], True, keep),
        (aten.norm.Scalar, x),
        (aten.norm.ScalarOpt_dim, x, 2, [dim], keep),
        (aten.median.dim, x, dim, keep),
        (aten.kthvalue.default, x, 1, dim, keep),
        (aten._softmax.default, x, dim, False),
        (aten._log_softmax.default, x, dim, False),
        (aten.cummax.default, x, dim),
        (aten.logcumsumexp.default, x, dim),
        (aten.sort.stable, x, {"stable": True, "dim": dim}),
        (aten.argsort.stable, x, {"stable": True, "dim": dim}),
        (aten.nll_loss.default, d.tensor(4, 6), d.ints(6, 4), None, d.one_of(0, 1, 2)),
        (aten.nll_loss2d.default, d.tensor(4, 3, 2, 6), d.ints(3, 4, 2, 6), None, d.one_of(0, 1, 2)),
    )


def rare_views(d: Draw) -> Case:
    a, b, c = d.size(), d.size(), d.size()
    x = d.tensor(a, b, c)
    return d.one_of(
        (aten._unsafe_view.default, x, [a * b, c]),
        (aten.reshape_as.default, x, d.tensor(a, b * c)),
        (aten.ravel.default, x),
        (aten.atleast_1d.default, x),
        (aten.atleast_1d.default, d.tensor()),
        (aten.numpy_T.default, x),
        (aten.swapaxes.default, x, 0, -1),
        (aten.swapdims.default, x, 1, 2),
        (aten.broadcast_to.default, x, [4, a, b, c]),
        (aten.split.sizes, d.tensor(4, 6, 4), [1, 3, 2], 1),
        (aten.tensor_split.sections, d.tensor(4, 6), 3, d.dim(2)),
        (aten.tensor_split.indices, d.tensor(4, 6), [1, 3], d.dim(2)),
        (aten.tile.default, x, [2 if c == 1 else 1]),
        (aten.tile.default, x, [4, 1, 3, 1]),
        (aten.triu.default, x),
        (aten.pixel_shuffle.default, d.tensor(4, 6, 4, 2, 2), 2),
        (aten.pixel_unshuffle.default, d.tensor(4, 6, 4, 2), 2),
    )


def rare_images(d: Draw) -> Case:
    line, image, cube = d.tensor(4, 6, 8), d.tensor(4, 6, 4, 4), d.tensor(2, 4, 4, 4, 4)
    return d.one_of(
        (aten.adaptive_avg_pool3d.default, cube, [2, 2, 2]),
        (aten.avg_pool3d.default, cube, [2, 2, 2]),
        (aten.max_pool3d.default, cube, [2, 2, 2]),
        (aten.adaptive_max_pool1d.default, line, [3]),
        (aten.max_pool1d_with_indices.default, line, [2]),
        (aten.upsample_bicubic2d.vec, image, [8, 8], False, None),
        (aten.upsample_bilinear2d.default, image, [8, 8], True),
        (aten.upsample_linear1d.vec, line, [16], False, None),
        (aten.upsample_nearest1d.vec, line, [16], None),
        (aten.upsample_nearest2d.default, image, [8, 8]),
        (aten.feature_dropout.default, image, 0.5, False),
    )


def rare_lookups(d: Draw) -> Case:
    sorted_rows = d.tensor(4, 6).sort(1).values
    plane, space = d.tensor(4, 6, 5, 3), d.tensor(4, 2, 3, 5, 4)
    on_plane, in_space = d.tensor(4, 6, 4, 2), d.tensor(4, 2, 6, 3, 3)
    return d.one_of(
        (aten.grid_sampler.default, plane, on_plane, d.one_of(0, 1, 2), d.one_of(0, 1, 2), d.maybe()),
        (aten.grid_sampler.default, space, in_space, d.one_of(0, 1), d.one_of(0, 1, 2), d.maybe()),
        (aten.grid_sampler_2d.default, plane, on_plane, d.one_of(0, 1, 2), 0, d.maybe()),
        (aten.grid_sampler_3d.default, space, in_space, d.one_of(0, 1), 0, d.maybe()),
        (aten.index_copy.default, d.tensor(4, 6), 1, torch.tensor([2, 0]), d.tensor(4, 2)),
        (aten.searchsorted.Tensor, sorted_rows[0], d.tensor(4, 6)),
        (aten.searchsorted.Tensor, sorted_rows, d.tensor(4, 8)),
    )


def rare_losses(d: Draw) -> Case:
    shape, reduction = d.sizes(1, 3), d.one_of(0, 1, 2)
    x, y, signs = d.tensor(*shape), d.tensor(*shape), d.tensor(*shape).sign()
    b, c = d.size(), d.size()
    rows, labels = [d.tensor(b, c) for _ in range(3)], d.ints(c, b)
    weight = d.one_of(None, torch.rand(c, dtype=torch.float64))
    return d.one_of(
        (aten.hinge_embedding_loss.default, x, signs, 1.0, reduction),
        (aten.poisson_nll_loss.default, x, y.abs(), True, False, 1e-8, reduction),
        (aten.margin_ranking_loss.default, x, y, signs, 0.1, reduction),
        (aten.triplet_margin_loss.default, *rows, 1.0, 2.0, 1e-6, False, reduction),
        (aten.cosine_embedding_loss.default, *rows[:2], rows[2][:, 0].sign(), 0.1, reduction),
        (aten.multi_margin_loss.default, rows[0], labels, 1, 1.0, weight, reduction),
        (aten.multilabel_margin_loss.default, rows[0], d.ints(c, b, c), reduction),
    )


def bags(d: Draw) -> Case:
    """Fixed bags and bags by offsets, one of them empty; of a padded row, which counts nowhere."""
    rows, width, mode = d.size(), d.size(), d.one_of(0, 1, 2)
    fixed = d.maybe()
    shape = [d.size(ones=False), d.one_of(1, 3)] if fixed else [12]
    begins = None if fixed else torch.tensor([0, 3, 3, 8] + [12] * d.one_of(0, 1))
    shares = d.tensor(*shape) if mode == 0 and d.maybe() else None
    last = begins is not None and len(begins) == 5
    by_freq, sparse = d.one_of((False, False), (False, False), (mode != 2, False), (False, mode != 2))
    options = (begins, by_freq, mode, sparse, shares, last, d.one_of(None, 0))
    return (EMBEDDING_BAG, d.tensor(rows, width), d.ints(rows, *shape), *options)


def rare_producers(d: Draw) -> Case:
    shape = d.sizes(1, 2)
    return d.one_of(
        (aten.ones.default, shape),
        (aten.new_ones.default, d.tensor(), shape),
        (aten.arange.start, 2, 8),
        (aten.arange.start_step, 2, 8, 2),
        (aten.eye.default, 4),
        (aten.eye.m, 4, 6),
        (aten.linspace.default, 0.0, 1.0, 4),
        (aten.scalar_tensor.default, 2.0),
        (aten.tril_indices.default, 4, 4),
        (aten.triu_indices.default, 4, 4),
        (aten.hann_window.default, 4),
    )


RARE: Mapping[str, Callable[[Draw], Case]] = {
    function.__name__: function
    for function in (
        rare_products, rare_elementwise, rare_reductions, rare_views, rare_images, rare_lookups, rare_losses, bags,
        rare_producers,
    )
}  # fmt: skip
