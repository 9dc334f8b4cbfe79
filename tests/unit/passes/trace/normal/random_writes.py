"""Models made at random of views, writes through them and reads: the hardest input for pass functional."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

Tensor = torch.Tensor
Chance = random.Random


def _dim(t: Tensor, chance: Chance) -> int:
    return chance.randrange(t.dim())


def _inner(t: Tensor, chance: Chance) -> int:
    """A dimension that is not made of the batch's (whose size, 3 or 5, is dynamic in the trace)."""
    fixed = [d for d, size in enumerate(t.shape) if isinstance(size, int) and size in (2, 4)]
    return chance.choice(fixed)


def _split(t: Tensor, chance: Chance) -> Tensor:
    pieces = t.split(1, _inner(t, chance))
    return chance.choice(pieces)


def _transpose(t: Tensor, chance: Chance) -> Tensor:
    return t.transpose(_dim(t, chance), _dim(t, chance))


def _permute(t: Tensor, chance: Chance) -> Tensor:
    return t.permute(chance.sample(range(t.dim()), t.dim()))


def _slice(t: Tensor, chance: Chance) -> Tensor:
    dim = _inner(t, chance)
    start, step = chance.randrange(t.shape[dim] - 1), chance.choice((1, 1, 2))
    return t[(slice(None),) * dim + (slice(start, None, step),)]


def _negative(t: Tensor, chance: Chance) -> Tensor:
    dim = _inner(t, chance)
    return t[(slice(None),) * dim + (slice(-2, -1),)]


def _narrow(t: Tensor, chance: Chance) -> Tensor:
    dim = _inner(t, chance)
    return t.narrow(dim, chance.choice((0, -1)), 1)


def _unflatten(t: Tensor, chance: Chance) -> Tensor:
    dim = chance.choice([d for d, size in enumerate(t.shape) if isinstance(size, int) and size in (2, 4)])
    return t.unflatten(dim, (2, -1))


VIEWS: list[Callable[[Tensor, Chance], Tensor]] = [
    lambda t, c: t.select(_inner(t, c), c.choice((0, -1))),
    lambda t, c: t[c.choice((0, -1))],
    lambda t, c: t.unsqueeze(_dim(t, c)),
    lambda t, c: t.unsqueeze(0).squeeze(0),
    lambda t, c: t.movedim(0, -1),
    lambda t, c: t.view(-1),
    lambda t, c: t.flatten(0, 1),
    lambda t, c: t.expand(t.shape),
    lambda t, c: t.diagonal(c.choice((0, 1)), 0, 1),
    lambda t, c: F.dropout(t, 0.5, training=False),
    lambda t, c: t.contiguous(),
    lambda t, c: t.reshape(-1),
    lambda t, c: t.view_as(t),
    lambda t, c: torch.view_as_complex(t.unflatten(-1, (-1, 2))).real,
    lambda t, c: c.choice(t.unbind(_inner(t, c))),
    lambda t, c: c.choice(t.chunk(2, _inner(t, c))),
    _split, _transpose, _permute, _slice, _negative, _narrow, _unflatten,
]  # fmt: skip

WRITES: list[Callable[[Tensor, Tensor, Chance], Tensor]] = [
    lambda t, s, c: t.add_(c.uniform(-1, 1)),
    lambda t, s, c: t.mul_(c.uniform(0.5, 1.5)),
    lambda t, s, c: t.add_(s.sum(), alpha=0.1),
    lambda t, s, c: t.copy_(s.mean()),
    lambda t, s, c: t.fill_(c.uniform(-1, 1)),
    lambda t, s, c: t.zero_(),
    lambda t, s, c: t.masked_fill_(t.detach() > 0.5, 0.25),
    lambda t, s, c: t.sub_(t.clone().mean()),
]


class RandomWrites(nn.Module):
    """``steps`` random steps, the same ones in every forward. An impossible step is skipped, always alike."""

    def __init__(self, seed: int, steps: int, gradient: bool) -> None:
        super().__init__()
        self.seed, self.steps, self.gradient = seed, steps, gradient
        self.linear = nn.Linear(4, 4)
        self.register_buffer("state", torch.linspace(-1, 1, 12).view(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        chance = random.Random(self.seed)
        h = self.linear(x)
        pool = [h if self.gradient else h.detach().clone(), x.clone()]
        if self.gradient:
            pool.append(x)
        else:
            pool.append(self.state)
        read = [h.sum()]
        for _ in range(self.steps):
            tensor = chance.choice(pool)
            kind = chance.random()
            if kind < 0.5:
                view = chance.choice(VIEWS)
                if self.gradient and view in VIEWS[-9:-6]:
                    continue  # autograd forbids writes to one of several views
                try:
                    pool.append(view(tensor, chance))
                except (RuntimeError, IndexError, ValueError):
                    continue
            elif kind < 0.85:
                write = chance.choice(WRITES)
                written = write(tensor, chance.choice(pool).clone(), chance)
                pool.append(written)
            elif kind < 0.9:
                pool.append(tensor.clone())
            else:
                read.append(tensor.clone().pow(2).mean())
        read += [tensor.clone().pow(2).mean() for tensor in pool]
        return torch.stack([value * (i + 1) for i, value in enumerate(read)]).sum()
