"""Every layer of torch.nn that is no loss, no recurrence and no transformer, by the chapters of the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.odd_models.case import SAMPLES, Case, Ready, floats, function, ids, layer, model, squared

LINE, IMAGE, VOLUME = (4, 8), (4, 8, 8), (2, 4, 4, 4)
"""Shapes of one sample with channels in one, two and three dimensions."""


def _table(rows: Mapping[str, tuple[Callable[[], Any], tuple[int, ...]]]) -> dict[str, Case]:
    return {name: layer(make, *shape) for name, (make, shape) in rows.items()}


CONVOLUTIONS = _table(
    {
        "Conv1d": (lambda: nn.Conv1d(4, 6, 3, padding=1), LINE),
        "Conv2d, strided and dilated": (lambda: nn.Conv2d(4, 6, 3, stride=2, dilation=2, padding=2), IMAGE),
        "Conv2d, depthwise, circular": (
            lambda: nn.Conv2d(4, 8, 3, groups=4, padding=1, padding_mode="circular"),
            IMAGE,
        ),
        "Conv2d, same, reflect": (lambda: nn.Conv2d(4, 4, 3, padding="same", padding_mode="reflect"), IMAGE),
        "Conv3d": (lambda: nn.Conv3d(2, 4, 3, padding=1, bias=False), VOLUME),
        "ConvTranspose1d": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1), LINE),
        "ConvTranspose2d, grouped": (lambda: nn.ConvTranspose2d(4, 4, 3, groups=2, padding=1), IMAGE),
        "ConvTranspose3d": (lambda: nn.ConvTranspose3d(2, 3, 2, stride=2), VOLUME),
        "Unfold": (lambda: nn.Unfold(3, padding=1, stride=2), IMAGE),
        "Fold": (lambda: nn.Fold((6, 6), 2, stride=2), (8, 9)),
    }
)


def _lazily_made() -> Ready:
    net = nn.Sequential(nn.LazyConv1d(6, 3), nn.LazyBatchNorm1d(), nn.Flatten(), nn.LazyLinear(4))
    net(torch.randn(SAMPLES, *LINE))
    return Ready(net, floats(*LINE), squared)


def _unpooled(dims: int) -> Case:
    pool = [nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d][dims - 1]
    back = [nn.MaxUnpool1d, nn.MaxUnpool2d, nn.MaxUnpool3d][dims - 1]

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pool, self.back = pool(2, return_indices=True), back(2)

        def forward(self, x: Tensor) -> Any:
            y, at = self.pool(x)
            return self.back(y.sigmoid(), at, output_size=x.shape)

    return layer(Both, *[LINE, IMAGE, VOLUME][dims - 1])


def _fractional(dims: int) -> Case:
    def run(m: Any, x: Tensor) -> Tensor:
        y = x[:, None, :, None].expand(-1, 2, -1, 6) * m.a(x)[:, None, None, :]
        if dims == 3:
            y = y[..., None].expand(-1, -1, -1, -1, 6) * m.b(x)[:, None, None, None, :]
        at = torch.full((x.shape[0], 2, dims), 0.3)
        pool = nn.functional.fractional_max_pool2d if dims == 2 else nn.functional.fractional_max_pool3d
        return pool(y, 2, output_size=(3,) * dims, _random_samples=at)

    return model(run)


POOLING = {
    "LazyModules": Case(_lazily_made),
    **{f"MaxUnpool{d}d": _unpooled(d) for d in (1, 2, 3)},
    **{f"FractionalMaxPool{d}d": _fractional(d) for d in (2, 3)},
    **_table(
        {
            "MaxPool1d": (lambda: nn.MaxPool1d(3, 2, padding=1), LINE),
            "MaxPool2d, ceil, dilated": (lambda: nn.MaxPool2d(2, 2, dilation=2, ceil_mode=True), IMAGE),
            "MaxPool3d": (lambda: nn.MaxPool3d(2), VOLUME),
            "MaxPool2d with indices": (lambda: nn.MaxPool2d(2, return_indices=True), IMAGE),
            "AvgPool1d": (lambda: nn.AvgPool1d(3, 2, 1, count_include_pad=False), LINE),
            "AvgPool2d, own divisor": (lambda: nn.AvgPool2d(3, 2, 1, divisor_override=5), IMAGE),
            "AvgPool3d": (lambda: nn.AvgPool3d(2), VOLUME),
            "LPPool1d": (lambda: nn.LPPool1d(2, 2), LINE),
            "LPPool2d": (lambda: nn.LPPool2d(4, 2), IMAGE),
            "LPPool3d": (lambda: nn.LPPool3d(2, 2), VOLUME),
            "AdaptiveMaxPool1d": (lambda: nn.AdaptiveMaxPool1d(3), LINE),
            "AdaptiveMaxPool2d": (lambda: nn.AdaptiveMaxPool2d((3, None)), IMAGE),
            "AdaptiveMaxPool3d": (lambda: nn.AdaptiveMaxPool3d(3, return_indices=True), VOLUME),
            "AdaptiveAvgPool1d": (lambda: nn.AdaptiveAvgPool1d(3), LINE),
            "AdaptiveAvgPool2d": (lambda: nn.AdaptiveAvgPool2d((None, 3)), IMAGE),
            "AdaptiveAvgPool3d": (lambda: nn.AdaptiveAvgPool3d((1, 2, 3)), VOLUME),
        }
    ),
}

_PADS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    f"{kind}Pad{d}d": (lambda kind=kind, d=d: getattr(nn, f"{kind}Pad{d}d")(1), shape)
    for kind in ("Reflection", "Replication", "Zero", "Circular")
    for d, shape in ((1, LINE), (2, IMAGE), (3, VOLUME))
}
_PADS |= {
    f"ConstantPad{d}d": (lambda d=d: getattr(nn, f"ConstantPad{d}d")(1, 3.5), shape)
    for d, shape in ((1, LINE), (2, IMAGE), (3, VOLUME))
}
PADDING = _table(_PADS) | {
    "negative padding": function(lambda x: nn.functional.pad(x, (-1, 2, -2, 1), value=0.5), 4, 8),
}

_PLAIN = (
    *[
        "ELU",
        "Hardshrink",
        "Hardsigmoid",
        "Hardtanh",
        "Hardswish",
        "LeakyReLU",
        "LogSigmoid",
        "PReLU",
        "ReLU",
        "ReLU6",
        "SELU",
        "CELU",
        "GELU",
    ],
    *[
        "Sigmoid",
        "SiLU",
        "Mish",
        "Softplus",
        "Softshrink",
        "Softsign",
        "Tanh",
        "Tanhshrink",
        "GLU",
        "Identity",
    ],
)


def _adaptive_log_softmax() -> Case:
    def run(m: Any, x: Tensor, y: Tensor) -> Tensor:
        return m.head(m.a(x).tanh(), y).loss

    def batch() -> dict[str, Tensor]:
        return {"x": torch.randn(SAMPLES, 6), "y": torch.arange(SAMPLES) % 12}

    parts = lambda: {"head": nn.AdaptiveLogSoftmaxWithLoss(6, 12, [4, 8])}  # noqa: E731
    return model(run, batch, None, parts)


def _attention(**options: Any) -> Case:
    class Self(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(8, 2, batch_first=True, **options)

        def forward(self, x: Tensor) -> Any:
            return self.inner(x, x, x, need_weights=True, average_attn_weights=False)

    return layer(Self, 5, 8)


def _masked_attention() -> Case:
    def run(m: Any, x: Tensor) -> Tensor:
        padding = x[..., 0] > 1.5
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return m.m(x, x * 2, x + 1, key_padding_mask=padding, attn_mask=causal, need_weights=False)[
            0
        ].nan_to_num()

    return model(run, floats(5, 8), parts=lambda: {"m": nn.MultiheadAttention(8, 2, batch_first=True)})


ACTIVATIONS = {
    **_table({name: (lambda name=name: getattr(nn, name)(), (4, 6)) for name in _PLAIN}),
    **_table(
        {
            "PReLU per channel": (lambda: nn.PReLU(4), (4, 6)),
            "RReLU of one slope": (lambda: nn.RReLU(0.25, 0.25), (4, 6)),
            "Threshold": (lambda: nn.Threshold(0.1, 20.0), (4, 6)),
            "GELU, tanh": (lambda: nn.GELU("tanh"), (4, 6)),
            "Softmin": (lambda: nn.Softmin(1), (4, 6)),
            "Softmax over channels": (lambda: nn.Softmax(1), (4, 6)),
            "Softmax2d": (nn.Softmax2d, IMAGE),
            "LogSoftmax": (lambda: nn.LogSoftmax(-1), (4, 6)),
            "LogSoftmax over the batch": (lambda: nn.LogSoftmax(0), (4, 6)),
            "in-place ReLU": (
                lambda: nn.Sequential(
                    nn.Linear(6, 6), nn.LeakyReLU(0.3, inplace=True), nn.Linear(6, 6), nn.ELU(inplace=True)
                ),
                (6,),
            ),
        }
    ),
    "MultiheadAttention": _attention(),
    "MultiheadAttention, extra keys": _attention(add_bias_kv=True, add_zero_attn=True),
    "MultiheadAttention, no bias": _attention(bias=False),
    "MultiheadAttention, masked": _masked_attention(),
    "AdaptiveLogSoftmaxWithLoss": _adaptive_log_softmax(),
}

NORMALIZATION = _table(
    {
        "BatchNorm1d": (lambda: nn.BatchNorm1d(4), LINE),
        "BatchNorm2d, own momentum": (lambda: nn.BatchNorm2d(4, momentum=0.3), IMAGE),
        "BatchNorm3d, cumulative": (lambda: nn.BatchNorm3d(2, momentum=None), VOLUME),
        "BatchNorm1d, not affine": (lambda: nn.BatchNorm1d(4, affine=False), LINE),
        "BatchNorm1d, no statistics": (lambda: nn.BatchNorm1d(4, track_running_stats=False), LINE),
        "BatchNorm1d, kept in evaluation mode": (lambda: Frozen(), LINE),
        "SyncBatchNorm": (lambda: nn.SyncBatchNorm(4), LINE),
        "GroupNorm": (lambda: nn.GroupNorm(2, 4), IMAGE),
        "InstanceNorm1d": (lambda: nn.InstanceNorm1d(4, affine=True), LINE),
        "InstanceNorm2d with statistics": (lambda: nn.InstanceNorm2d(4, track_running_stats=True), IMAGE),
        "InstanceNorm3d, both": (lambda: nn.InstanceNorm3d(2, affine=True, track_running_stats=True), VOLUME),
        "LayerNorm over two": (lambda: nn.LayerNorm([4, 6]), (4, 6)),
        "LayerNorm, no bias": (lambda: nn.LayerNorm(6, bias=False), (4, 6)),
        "LocalResponseNorm": (lambda: nn.LocalResponseNorm(3), IMAGE),
        "CrossMapLRN2d": (lambda: nn.CrossMapLRN2d(3), IMAGE),
        "RMSNorm": (lambda: nn.RMSNorm(6), (4, 6)),
        "RMSNorm, not affine": (lambda: nn.RMSNorm((4, 6), elementwise_affine=False), (4, 6)),
    }
)


class Frozen(nn.BatchNorm1d):
    """Stays in evaluation mode whatever ``model.train()`` says, as detectors keep their backbones."""

    def __init__(self) -> None:
        super().__init__(4)
        self.train(True)

    def train(self, mode: bool = True) -> Frozen:
        super().train(False)
        return self


def _shared_norm() -> Case:
    return model(lambda m, x: m.n(m.b(m.n(m.a(x)).tanh())), parts=lambda: {"n": nn.BatchNorm1d(6)})


def _unread(m: Any, x: Tensor) -> Tensor:
    m.n(m.a(x))
    y: Tensor = m.b(x)
    return y


def _two(make: Callable[[], nn.Module]) -> Case:
    return model(lambda m, x: m.l(m.a(x), m.b(x)), parts=lambda: {"l": make()})


LINEAR_AND_VISION = {
    "BatchNorm1d at two places": _shared_norm(),
    "BatchNorm1d that nobody reads": model(_unread, parts=lambda: {"n": nn.BatchNorm1d(6)}),
    "Bilinear": _two(lambda: nn.Bilinear(6, 6, 5)),
    "CosineSimilarity": _two(lambda: nn.CosineSimilarity(dim=1)),
    "PairwiseDistance": _two(lambda: nn.PairwiseDistance(p=3.0, keepdim=True)),
    "Dropout of nothing": layer(lambda: nn.Dropout(0.0), 4, 6),
    "Dropout of everything": layer(lambda: nn.Sequential(nn.Dropout(1.0), nn.Linear(6, 6)), 4, 6),
    **_table(
        {
            "Dropout1d, 2d, 3d of everything": (
                lambda: nn.Sequential(nn.Dropout2d(1.0), nn.Linear(8, 3)),
                IMAGE,
            ),
            "AlphaDropout of nothing": (lambda: nn.AlphaDropout(0.0), (4, 6)),
            "FeatureAlphaDropout of nothing": (lambda: nn.FeatureAlphaDropout(0.0), IMAGE),
            "PixelShuffle": (lambda: nn.PixelShuffle(2), IMAGE),
            "PixelUnshuffle": (lambda: nn.PixelUnshuffle(2), IMAGE),
            "ChannelShuffle": (lambda: nn.ChannelShuffle(2), IMAGE),
            "Upsample, nearest": (lambda: nn.Upsample(scale_factor=2), IMAGE),
            "Upsample, linear": (lambda: nn.Upsample(size=12, mode="linear", align_corners=True), LINE),
            "Upsample, bicubic": (lambda: nn.Upsample(scale_factor=1.5, mode="bicubic"), IMAGE),
            "Upsample, trilinear": (lambda: nn.Upsample(size=(6, 5, 3), mode="trilinear"), VOLUME),
            "Upsample, area": (lambda: nn.Upsample(size=3, mode="area"), IMAGE),
            "UpsamplingNearest2d": (lambda: nn.UpsamplingNearest2d(scale_factor=2), IMAGE),
            "UpsamplingBilinear2d": (lambda: nn.UpsamplingBilinear2d(scale_factor=2), IMAGE),
            "Flatten and Unflatten": (
                lambda: nn.Sequential(nn.Flatten(1, 2), nn.Unflatten(1, (8, 4)), nn.Linear(8, 3)),
                IMAGE,
            ),
            "interpolate, antialiased": (lambda: _Antialiased(), IMAGE),
        }
    ),
    "grid_sample of affine_grid": model(
        lambda m, x: nn.functional.grid_sample(
            x[:, None, None, :].expand(-1, 2, 6, -1) * m.a(x)[:, None, None, :],
            nn.functional.affine_grid(m.b(x).view(-1, 2, 3), [x.shape[0], 2, 5, 5], align_corners=False),
            padding_mode="border",
            align_corners=False,
        )
    ),
}


class _Antialiased(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.interpolate(x, size=(3, 3), mode="bilinear", antialias=True)


def _embedding(**options: Any) -> Case:
    return model(lambda m, x: m.a(m.e(x)).tanh(), ids(5), parts=lambda: {"e": nn.Embedding(11, 6, **options)})


def _bag(mode: str, run: Callable[..., Any], **options: Any) -> Case:
    return model(run, ids(5), parts=lambda: {"e": nn.EmbeddingBag(11, 6, mode=mode, **options)})


def _flat(m: Any, x: Tensor) -> Tensor:
    return m.a(m.e(x.flatten(), torch.arange(x.shape[0]) * x.shape[1]))


def _weighted(m: Any, x: Tensor) -> Tensor:
    return m.a(m.e(x, per_sample_weights=m.w[x]))


EMBEDDINGS = {
    "Embedding": _embedding(),
    "Embedding with padding": _embedding(padding_idx=3),
    "Embedding by frequency": _embedding(scale_grad_by_freq=True),
    "Embedding renormalized": _embedding(max_norm=1.0),
    "Embedding with sparse gradients": _embedding(sparse=True),
    "Embedding frozen": model(
        lambda m, x: m.a(m.e(x)).tanh(),
        ids(5),
        parts=lambda: {"e": nn.Embedding.from_pretrained(torch.randn(11, 6))},
    ),
    "EmbeddingBag, mean": _bag("mean", lambda m, x: m.a(m.e(x)), padding_idx=2),
    "EmbeddingBag, max": _bag("max", lambda m, x: m.a(m.e(x))),
    "EmbeddingBag, sum, offsets": _bag("sum", _flat),
    "EmbeddingBag, sum, last offset": _bag(
        "sum",
        lambda m, x: m.a(m.e(x.flatten(), torch.arange(x.shape[0] + 1) * x.shape[1])),
        include_last_offset=True,
    ),
    "EmbeddingBag, weighted": model(
        _weighted,
        ids(5),
        parts=lambda: {"e": nn.EmbeddingBag(11, 6, mode="sum"), "w": nn.Parameter(torch.rand(11))},
    ),
    "EmbeddingBag, sparse gradients": _bag("sum", lambda m, x: m.a(m.e(x)), sparse=True),
}

CHAPTERS = {
    "convolution": CONVOLUTIONS,
    "pooling": POOLING,
    "padding": PADDING,
    "activation": ACTIVATIONS,
    "normalization": NORMALIZATION,
    "linear, dropout, distance, vision": LINEAR_AND_VISION,
    "embedding": EMBEDDINGS,
}
