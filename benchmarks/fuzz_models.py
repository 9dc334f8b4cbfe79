"""Random models: a workload per seed, the same every time.

A model is a list of random blocks over values that all have one shape: [samples, width], [samples, tokens, width] or
[samples, channels, height, width]. A block reads the last value or an earlier one (skips), may share its module with an
earlier block (ties), may be frozen. Widths are often odd, so that they do not divide among devices.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from partitioner import Workload

SAMPLES = 4
CLASSES = 5


class Lambda(nn.Module):
    """A function without state."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Gated(nn.Module):
    """down(act(gate(x)) * up(x)), as Llama's feed-forward."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Attention over tokens, causal or not."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, width = x.shape
        parts = self.qkv(x).view(samples, tokens, 3, self.heads, width // self.heads).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).reshape(samples, tokens, width))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """An LSTM or a GRU over tokens."""

    def __init__(self, kind: type[nn.RNNBase], width: int) -> None:
        super().__init__()
        self.cell = kind(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x)[0]  # type: ignore[no-any-return]


class Experts(nn.Module):
    """A mixture of small linear experts, every token through all of them, weighted by its two best."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, count)
        self.weight = nn.Parameter(torch.randn(count, width, width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        kept = scores * (scores >= scores.topk(2, dim=-1).values[..., -1:])
        return torch.einsum("...w,ewv,...e->...v", x, self.weight, kept)


class Running(nn.Module):
    """Subtracts half of a running mean, a buffer that forward writes."""

    mean: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.flatten(0, -2).mean(0).to(self.mean.dtype), 0.25)
        return x - 0.5 * self.mean.to(x.dtype)


def _pointwise(draw: random.Random) -> nn.Module:
    functions: list[Callable[[Tensor], Tensor]] = [
        torch.tanh,
        F.gelu,
        F.silu,
        lambda x: F.relu_(x.clone()),
        lambda x: torch.where(x > 0, x, 0.1 * x),
        lambda x: x.masked_fill(x.detach() > 1.5, 0.5),
        lambda x: x.clamp(-1.0, 1.0) + x.sigmoid(),
        lambda x: x / (1 + x.abs()),
        lambda x: x.detach() * 0.5 + x,
        lambda x: x.double().sin().to(x.dtype),
        lambda x: torch.addcmul(x, x, x.cos(), value=0.5),
    ]
    return Lambda(draw.choice(functions))


def _over_last(draw: random.Random) -> nn.Module:
    functions: list[Callable[[Tensor], Tensor]] = [
        lambda x: x.softmax(-1),
        lambda x: x - x.mean(-1, keepdim=True),
        lambda x: x.cumsum(-1) * 0.3,
        lambda x: torch.cat([x[..., 1:], x[..., :1]], -1),
        lambda x: x.flip(-1),
        lambda x: x.roll(1, -1) + x,
        lambda x: F.normalize(x, dim=-1),
        lambda x: x + x.amax(-1, keepdim=True),
        lambda x: x.sort(-1).values,
        lambda x: x + x.logsumexp(-1, keepdim=True) * 0.1,
        lambda x: torch.stack(x.chunk(x.shape[-1], -1), 0).sum(0).expand(x.shape) * 0.2 + x,
    ]
    return Lambda(draw.choice(functions))


def _dense(draw: random.Random, width: int) -> nn.Module:
    """Draw a block over the last dimension."""
    hidden = draw.choice([4, 6, 8, 9, 12, 16])
    makers: list[Callable[[], nn.Module]] = [
        lambda: nn.Linear(width, width, bias=draw.random() < 0.7),
        lambda: nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)),
        lambda: Gated(width, hidden),
        lambda: nn.LayerNorm(width),
        lambda: nn.RMSNorm(width),
        lambda: _pointwise(draw),
        lambda: _over_last(draw),
        lambda: nn.Dropout(0.1),
        lambda: Experts(width, draw.choice([2, 3, 4])),
        lambda: Running(width),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(width, width)),
        lambda: nn.PReLU(),
    ]
    return draw.choice(makers)()


def _flat(draw: random.Random, width: int) -> nn.Module:
    if draw.random() < 0.15:
        return draw.choice([nn.BatchNorm1d(width), nn.PReLU(width), nn.Hardswish()])
    return _dense(draw, width)


def _sequence(draw: random.Random, width: int) -> nn.Module:
    makers: list[Callable[[], nn.Module]] = [
        lambda: Attention(width, 2 if width % 2 == 0 else 1, draw.random() < 0.5),
        lambda: Recurrent(draw.choice([nn.LSTM, nn.GRU]), width),
        lambda: Lambda(lambda x: x - x.mean(1, keepdim=True)),
        lambda: Lambda(lambda x: torch.cat([x[:, :1] * 0, x[:, :-1]], 1)),
        lambda: Lambda(lambda x: x.cumsum(1) * 0.2),
    ]
    return draw.choice(makers)() if draw.random() < 0.5 else _dense(draw, width)


def _image(draw: random.Random, width: int) -> nn.Module:
    makers: list[Callable[[], nn.Module]] = [
        lambda: nn.Conv2d(width, width, 3, padding=1),
        lambda: nn.Conv2d(width, width, 3, padding=1, groups=width),
        lambda: nn.Conv2d(width, width, 1, bias=False),
        lambda: nn.Sequential(
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(2 * width, width, 1)
        ),
        lambda: nn.Conv2d(
            width, width, 3, padding=2, dilation=2, padding_mode=draw.choice(["zeros", "circular"])
        ),
        lambda: nn.GroupNorm(1, width),
        lambda: nn.BatchNorm2d(width),
        lambda: nn.Sequential(nn.AvgPool2d(2), nn.Upsample(scale_factor=2)),
        lambda: nn.MaxPool2d(3, 1, 1),
        lambda: _pointwise(draw),
        lambda: nn.Dropout2d(0.1),
        lambda: Lambda(lambda x: x * x.mean((2, 3), keepdim=True).sigmoid()),
    ]
    return draw.choice(makers)()


class Random(nn.Module):
    """The blocks with their skips, and a head."""

    def __init__(
        self,
        stem: nn.Module,
        blocks: list[nn.Module],
        reads: list[int],
        adds: list[int | None],
        head: nn.Module,
    ) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = stem, nn.ModuleList(blocks), head
        self.reads, self.adds = tuple(reads), tuple(adds)

    def forward(self, x: Tensor) -> Tensor:
        values = [self.stem(x)]
        for block, read, added in zip(self.blocks, self.reads, self.adds, strict=True):
            value = block(values[read])
            values.append(value if added is None else value + values[added])
        return self.head(values[-1])  # type: ignore[no-any-return]


class TiedHead(nn.Module):
    """Scores by the embedding's own weight."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def random_workload(seed: int) -> Workload:
    """Make the model, batch and loss of a seed."""
    draw = random.Random(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        kind = draw.choice(["flat", "sequence", "image"])
        width = draw.choice([4, 5, 6, 8, 12])
        block = {"flat": _flat, "sequence": _sequence, "image": _image}[kind]
        blocks: list[nn.Module] = []
        reads: list[int] = []
        adds: list[int | None] = []
        for number in range(draw.randint(2, 7)):
            shared = [b for b in blocks if not isinstance(b, Running)]
            blocks.append(draw.choice(shared) if shared and draw.random() < 0.15 else block(draw, width))
            reads.append(number if draw.random() < 0.85 else draw.randint(0, number))
            adds.append(draw.randint(0, number) if draw.random() < 0.35 else None)
        model, batch = _with_ends(draw, kind, width, blocks, reads, adds)
        if draw.random() < 0.15:
            for parameter in draw.choice(blocks).parameters():
                parameter.requires_grad_(False)
        loss = draw.choice(_LOSSES)
        return Workload(model, batch, loss, name=f"fuzz{seed}")


def _with_ends(
    draw: random.Random,
    kind: str,
    width: int,
    blocks: list[nn.Module],
    reads: list[int],
    adds: list[int | None],
) -> tuple[nn.Module, Mapping[str, Tensor]]:
    """Put a stem before the blocks and a head behind them, and draw a batch."""
    classes = (SAMPLES,)
    stem: nn.Module
    head: nn.Module = nn.Linear(width, CLASSES)
    if kind == "sequence":
        tokens = draw.choice([3, 4, 6])
        embedding = nn.Embedding(11, width)
        x = torch.randint(11, (SAMPLES, tokens))
        stem, classes = embedding, (SAMPLES, tokens)
        if draw.random() < 0.4:
            head = TiedHead(embedding)
    elif kind == "image":
        size = draw.choice([4, 6])
        x = torch.randn(SAMPLES, 3, size, size)
        stem = nn.Conv2d(3, width, 3, padding=1)
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)
    else:
        x = torch.randn(SAMPLES, 7)
        stem = nn.Linear(7, width)
    labels = torch.randint(CLASSES, classes)
    labels[-1:] = -100 if draw.random() < 0.5 and len(classes) > 1 else labels[-1:]
    return Random(stem, blocks, reads, adds, head), {"x": x, "labels": labels}


def _cross_entropy(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), batch["labels"].flatten())


def _summed(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), batch["labels"].flatten(), reduction="sum")


def _smoothed(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), batch["labels"].flatten(), label_smoothing=0.1)


def _squared(output: Tensor, batch: Any) -> Tensor:
    return output.square().mean()


def _huber(output: Tensor, batch: Any) -> Tensor:
    return F.smooth_l1_loss(output, torch.zeros_like(output)) + 0.1 * output.abs().amax(-1).mean()


_LOSSES: tuple[Callable[[Any, Any], Tensor], ...] = (
    _cross_entropy,
    _cross_entropy,
    _summed,
    _smoothed,
    _squared,
    _huber,
)
