"""Memory formats, data types, batches of every form, storages that are shared, Python state."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.odd_models.behaviour import _changed, chain
from tests.odd_models.case import SAMPLES, Case, Ready, floats, model, odd, squared, whole

B = SAMPLES


def _channels_last() -> nn.Module:
    net = nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 3, 3))
    return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


MEMORY_FORMATS = {
    "channels last": whole(
        _channels_last, lambda: torch.randn(B, 4, 8, 8).contiguous(memory_format=torch.channels_last)
    ),
    "channels last in forward": model(
        lambda m, x: m.n(x.contiguous(memory_format=torch.channels_last)),
        floats(4, 6, 6),
        parts=lambda: {"n": nn.Conv2d(4, 3, 3)},
    ),
    "channels last 3d": model(
        lambda m, x: m.n(x.to(memory_format=torch.channels_last_3d)),
        floats(2, 4, 4, 4),
        parts=lambda: {"n": nn.Conv3d(2, 3, 3)},
    ),
    "a transposed weight": _changed(lambda m: setattr(m.b, "weight", nn.Parameter(torch.randn(6, 6).T))),
    "a batch that is no block": model(chain, lambda: torch.randn(6, B).T),
    "a batch that is expanded": model(chain, lambda: torch.randn(1, 6).expand(B, 6)),
}


def _cast(dtype: torch.dtype, tolerance: float) -> Case:
    def make() -> Ready:
        net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 4)).to(
            dtype
        )
        return Ready(net, lambda: torch.randn(B, 6).to(dtype), lambda y, b: (y.double() ** 2).mean())

    return Case(make, tolerance=tolerance)


def _autocast(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = m.f(h).tanh()
    return m.c(y.double())


DTYPES = {
    "float32": _cast(torch.float32, 2e-5),
    "bfloat16": _cast(torch.bfloat16, 6e-2),
    "float16": _cast(torch.float16, 8e-3),
    "mixed parameters": model(
        lambda m, x: m.c(m.l(m.a(x).float()).double()),
        parts=lambda: {"l": nn.Linear(6, 6).float()},
        tolerance=2e-5,
    ),
    "integer batch": model(
        lambda m, x: m.b(m.a(x / 3).tanh()), lambda: torch.randint(-5, 5, (B, 6), dtype=torch.int32)
    ),
    "bytes": model(
        lambda m, x: m.b(m.a(x.double() / 255)), lambda: torch.randint(0, 256, (B, 6), dtype=torch.uint8)
    ),
    "a mask as batch": model(
        lambda m, x, k: m.b(m.a(x).masked_fill(k, 0.0)),
        lambda: {"x": torch.randn(B, 6), "k": torch.rand(B, 6) > 0.5},
    ),
    "complex batch": model(
        lambda m, x: m.a(x.real) * m.b(x.imag), lambda: torch.randn(B, 6, dtype=torch.complex128)
    ),
    "short integers": model(
        lambda m, x: m.a(m.e.weight[x.long()]),
        lambda: torch.randint(0, 9, (B,), dtype=torch.int16),
        parts=lambda: {"e": nn.Embedding(9, 6)},
    ),
    "autocast inside": model(_autocast, parts=lambda: {"f": nn.Linear(6, 6).float()}, tolerance=6e-2),
    "float8 weights": model(
        lambda m, x: m.b(m.a(x)) @ m.q.to(torch.float64),
        parts=lambda: {"q": torch.randn(6, 6).to(torch.float8_e4m3fn)},
    ),
}


@dataclass
class Sample:
    """A batch that is no container that torch knows."""

    x: Tensor


def _many(m: Any, batch: Any) -> Tensor:
    return m.b(m.a(batch["x"]["left"]).tanh() + batch["x"]["right"][0])


def _nested() -> dict[str, Any]:
    return {"batch": {"x": {"left": torch.randn(B, 6), "right": [torch.randn(B, 6)]}}}


BATCHES = {
    "a tuple": model(lambda m, x, y: m.b(m.a(x).tanh()) * y, lambda: (torch.randn(B, 6), torch.rand(B, 1))),
    "a nested dictionary": model(_many, _nested),
    "a dataclass": model(lambda m, sample: chain(m, sample.x), lambda: Sample(torch.randn(B, 6))),
    "seven samples": model(chain, floats(6, samples=7), samples=7),
    "two samples": model(chain, floats(6, samples=2), samples=2),
    "one sample": model(chain, floats(6, samples=1), samples=1),
    "a leaf for all samples": model(
        lambda m, x, w: m.b(m.a(x)) * w,
        lambda: {"x": torch.randn(B, 6), "w": torch.rand(6)},
        batch_dims={"x": 0, "w": None},
    ),
    "samples in dimension 1": model(
        lambda m, x: chain(m, x), lambda: torch.randn(3, B, 6), batch_dims={"x": 1}
    ),
    "a number beside tensors": model(
        lambda m, x, k: m.b(m.a(x)) * k, lambda: {"x": torch.randn(B, 6), "k": 3}
    ),
    "a number as tensor": model(
        lambda m, x, k: m.b(m.a(x)) * k,
        lambda: {"x": torch.randn(B, 6), "k": torch.tensor(0.5)},
        batch_dims={"x": 0, "k": None},
    ),
    "nothing optional": model(
        lambda m, x, mask=None: m.b(m.a(x)) if mask is None else m.c(x),
        lambda: {"x": torch.randn(B, 6), "mask": None},
    ),
    "an unused leaf": model(
        lambda m, x, extra: chain(m, x), lambda: {"x": torch.randn(B, 6), "extra": torch.randn(B, 3)}
    ),
    "one tensor twice": model(
        lambda m, x, y: m.b(m.a(x)) * m.c(y), lambda: dict.fromkeys(("x", "y"), torch.randn(B, 6))
    ),
    "outputs in a dictionary": model(lambda m, x: {"h": m.a(x), "y": (m.b(x), m.c(x))}),
    "a batch without sizes 0": model(lambda m, x: chain(m, x) + x[:, :0].sum(), floats(6)),
}


class _Mirror(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        if kind == "buffer":
            self.register_buffer("mirror", self.a.weight.data)
        elif kind == "slice":
            self.register_buffer("mirror", self.a.weight.data[:2])
        elif kind == "attribute":
            self.mirror = self.a.weight.data
        elif kind == "flat parameters":
            flat = torch.randn(72)
            self.a.weight = nn.Parameter(flat[:36].view(6, 6))
            self.b.weight = nn.Parameter(flat[36:].view(6, 6))
        elif kind == "overlapping parameters":
            flat = torch.randn(54)
            self.a.weight = nn.Parameter(flat[:36].view(6, 6))
            self.b.weight = nn.Parameter(flat[18:].view(6, 6))
        elif kind == "expanded":
            self.a.weight = nn.Parameter(torch.randn(1, 6).expand(6, 6), requires_grad=False)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x).tanh())
        return (
            h
            if not hasattr(self, "mirror")
            else h + x[:, : self.mirror.shape[0]].sum(1, keepdim=True) @ self.mirror[:1]
        )


def _overlapping_buffers() -> Ready:
    def run(m: Any, x: Tensor) -> Tensor:
        m.seen += m.a(x).detach().mean(0)
        return m.b(m.a(x)) * m.part.sum()

    whole_buffer = torch.zeros(6)
    net = odd(run, a=nn.Linear(6, 6), b=nn.Linear(6, 6), seen=whole_buffer, part=whole_buffer[:2])
    return Ready(net, floats(6), squared)


STORAGES = {
    **{
        f"{kind}": whole(lambda kind=kind: _Mirror(kind), floats(6))
        for kind in ("buffer", "slice", "attribute", "flat parameters", "overlapping parameters", "expanded")
    },
    "overlapping buffers": Case(_overlapping_buffers),
    "tied weights": _changed(lambda m: setattr(m.c, "weight", m.a.weight)),
    "tied to an embedding": model(
        lambda m, x: nn.functional.linear(m.a(m.e(x)).tanh(), m.e.weight),
        lambda: torch.randint(0, 9, (B, 4)),
        parts=lambda: {"e": nn.Embedding(9, 6)},
    ),
    "a transposed tie": _changed(lambda m: None, lambda m, x: m.a(x) @ m.a.weight + m.b(x)),
    "one buffer in two modules": _changed(
        lambda m: (m.a.register_buffer("s", torch.ones(6)), m.b.register_buffer("s", m.a.s)),
        lambda m, x: m.b(m.a(x) * m.a.s) * m.b.s,
    ),
}


class _Counting(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.kind, self.calls, self.seen = kind, 0, []
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).tanh()
        if self.kind == "counter":
            self.calls += 1
            y = y * self.calls
        elif self.kind == "list":
            self.seen.append(float(len(self.seen)))
            y = y * (1 + self.seen[-1])
        elif self.kind == "random.random":
            y = y * random.random()
        elif self.kind == "numpy":
            y = y * float(np.random.rand())
        elif self.kind == "layer drop":
            y = y if random.random() < 0.5 else self.b(y)
        elif self.kind == "buffer counter":
            self.count += 1
            y = y * self.count
        elif self.kind == "running average":
            self.average.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
            y = y - self.average
        elif self.kind == "buffer replaced":
            self.average = 0.9 * self.average + 0.1 * y.detach().mean(0)
            y = y - self.average
        elif self.kind == "kept output":
            self.last = y
        return self.b(y)


_KINDS = (
    "counter",
    "list",
    "random.random",
    "numpy",
    "layer drop",
    "buffer counter",
    "running average",
    "buffer replaced",
    "kept output",
)
STATE = {kind: whole(lambda kind=kind: _Counting(kind), floats(6)) for kind in _KINDS}

CHAPTERS: dict[str, dict[str, Case]] = {
    "memory formats": MEMORY_FORMATS,
    "data types": DTYPES,
    "batches": BATCHES,
    "storages": STORAGES,
    "python state": STATE,
}
