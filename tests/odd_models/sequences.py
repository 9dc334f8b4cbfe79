"""Recurrences, transformers, packed sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from tests.odd_models.case import SAMPLES, Case, floats, layer, model, whole


def _rnn(make: Callable[..., nn.Module], **options: Any) -> Case:
    return layer(lambda: make(6, 4, batch_first=True, **options), 5, 6)


def _cell(make: Callable[..., nn.Module]) -> Case:
    def run(m: Any, x: Tensor) -> Tensor:
        h = None
        for step in x.unbind(1):
            h = m.cell(m.a(step), h)
        assert h is not None
        return h[0] * h[1] if isinstance(h, tuple) else h

    return model(run, floats(4, 6), parts=lambda: {"cell": make(6, 4)})


def _packed(m: Any, x: Tensor) -> Tensor:
    packed = pack_padded_sequence(m.a(x), torch.full((x.shape[0],), 4), batch_first=True)
    return pad_packed_sequence(m.r(packed)[0], batch_first=True)[0]


def _uneven(m: Any, x: Tensor, n: Tensor) -> Tensor:
    packed = pack_padded_sequence(m.a(x), n, batch_first=True, enforce_sorted=False)
    return pad_packed_sequence(m.r(packed)[0], batch_first=True, total_length=5)[0]


RECURRENCES = {
    "RNN": _rnn(nn.RNN),
    "RNN, relu, no bias": _rnn(nn.RNN, nonlinearity="relu", bias=False),
    "LSTM": _rnn(nn.LSTM),
    "LSTM, two layers, both ways": _rnn(nn.LSTM, num_layers=2, bidirectional=True),
    "LSTM, projected": _rnn(nn.LSTM, proj_size=2),
    "GRU": _rnn(nn.GRU),
    "GRU, both ways": _rnn(nn.GRU, bidirectional=True),
    "LSTM, positions first": model(
        lambda m, x: m.r(m.a(x))[0],
        lambda: torch.randn(5, SAMPLES, 6),
        parts=lambda: {"r": nn.LSTM(6, 4)},
        batch_dims={"x": 1},
    ),
    "LSTM, given state": model(
        lambda m, x: m.r(
            m.a(x), (m.h.expand(1, x.shape[0], 4).contiguous(), m.b(x[:, 0])[None, :, :4].contiguous())
        )[0],
        floats(5, 6),
        parts=lambda: {"r": nn.LSTM(6, 4, batch_first=True), "h": nn.Parameter(torch.randn(4))},
    ),
    "RNNCell": _cell(nn.RNNCell),
    "LSTMCell": _cell(nn.LSTMCell),
    "GRUCell": _cell(nn.GRUCell),
    "packed sequences of one length": model(
        _packed, floats(5, 6), parts=lambda: {"r": nn.GRU(6, 4, batch_first=True)}
    ),
    "packed sequences of many lengths": model(
        _uneven,
        lambda: {"x": torch.randn(SAMPLES, 5, 6), "n": torch.arange(SAMPLES) % 5 + 1},
        parts=lambda: {"r": nn.GRU(6, 4, batch_first=True)},
    ),
    "sequences padded in forward": model(
        lambda m, x: m.b(
            pad_sequence([m.a(x[:, :2]).flatten(0, 1), m.a(x[:, 2:]).flatten(0, 1)], padding_value=0.5)
        ),
        floats(5, 6),
    ),
}


def _seq2seq(m: Any, x: Tensor) -> Tensor:
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
    return m.t(m.e(x), m.e(x.flip(1)), tgt_mask=mask, tgt_is_causal=True)


def _decoder(m: Any, x: Tensor) -> Tensor:
    return m.d(x.tanh(), m.e(x))


TRANSFORMERS = {
    "TransformerEncoderLayer": layer(
        lambda: nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True), 5, 8
    ),
    "TransformerEncoderLayer, norm first": layer(
        lambda: nn.TransformerEncoderLayer(
            8, 2, 12, 0.0, "gelu", norm_first=True, batch_first=True, bias=False
        ),
        5,
        8,
    ),
    "TransformerEncoder": layer(
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True),
            2,
            nn.LayerNorm(8),
            enable_nested_tensor=False,
        ),
        *(5, 8),
    ),
    "TransformerEncoder, positions first": whole(
        lambda: nn.Sequential(nn.TransformerEncoderLayer(8, 2, 12, 0.0), nn.Linear(8, 8)),
        lambda: torch.randn(5, SAMPLES, 8),
        batch_dims={"input": 1},
    ),
    "TransformerDecoder": model(
        _decoder,
        floats(5, 8),
        parts=lambda: {
            "d": nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 12, 0.0, batch_first=True), 2),
            "e": nn.Linear(8, 8),
        },
    ),
    "Transformer": model(
        _seq2seq,
        floats(5, 8),
        parts=lambda: {
            "t": nn.Transformer(8, 2, 1, 1, 12, 0.0, batch_first=True),
            "e": nn.Linear(8, 8),
        },
    ),
    "attention, grouped queries": model(
        lambda m, x: nn.functional.scaled_dot_product_attention(
            m.a(x).unflatten(-1, (3, 2)).transpose(1, 2).repeat_interleave(2, 1),
            m.b(x).unflatten(-1, (3, 2)).transpose(1, 2),
            m.c(x).unflatten(-1, (3, 2)).transpose(1, 2),
            is_causal=True,
            enable_gqa=True,
            scale=0.4,
        ),
        floats(5, 6),
    ),
    "attention with a trained bias": model(
        lambda m, x: nn.functional.scaled_dot_product_attention(m.a(x), m.b(x), m.c(x), attn_mask=m.bias),
        floats(5, 6),
        parts=lambda: {"bias": nn.Parameter(torch.randn(5, 5))},
    ),
    "mixture of experts, top 2": model(lambda m, x: _experts(m, x), floats(6)),
}


def _experts(m: Any, x: Tensor) -> Tensor:
    scores = m.c(x)[:, :2].softmax(-1)
    weight, which = scores.topk(1)
    results = torch.stack([m.a(x).tanh(), m.b(x).tanh()], 1)
    return results.gather(1, which[..., None].expand(-1, -1, 6)).squeeze(1) * weight


CHAPTERS = {"recurrent": RECURRENCES, "transformer": TRANSFORMERS}
