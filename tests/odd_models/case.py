"""The words of the table: a case is a model, a function that draws its batches, and a loss. No code of this project."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SAMPLES, WIDTH = 8, 6


@dataclass(frozen=True)
class Case:
    """One unusual model. Everything is made new by ``make``, in every process, from one seed, in float64 by default."""

    make: Callable[[], Ready]
    batch_dims: Mapping[str, int | None] | None = None
    """The dimension of the samples of batch leaves, where the user has to say it."""
    whole: bool = False
    """True if the loop has to take the batch in one piece: a hook on a parameter sees the whole batch's gradient."""
    samples: int = SAMPLES
    tolerance: float = 1e-9
    """Relative difference allowed; more than 1e-9 only for models that compute in less than float64."""


@dataclass(frozen=True)
class Ready:
    """A model that can be trained. ``batch``: draws one batch; ``loss``: None if the model returns its loss."""

    model: nn.Module
    batch: Callable[[], Any]
    loss: Callable[[Any, Any], Any] | None


def odd(run: Callable[..., Any], **parts: Any) -> nn.Module:
    """Make a module of named parts whose ``forward`` is ``run``, with its signature and its lines of code."""
    module: nn.Module = type("odd", (nn.Module,), {"forward": run})()
    for name, part in parts.items():
        if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
            module.register_buffer(name, part)
        else:
            setattr(module, name, part)
    return module


class Between(nn.Module):
    """A layer with something to train before and behind it, so that its gradients are seen and there is something to cut.

    x [b, …] -> tanh(x * before + shift) -> the layer -> sin(y * after) of its first output
    """

    def __init__(self, layer: nn.Module | Callable[..., Any], shape: tuple[int, ...]) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.randn(shape))
        self.shift = nn.Parameter(torch.randn(shape))
        self.layer = layer
        self.after = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(torch.tanh(x * self.before + self.shift))
        while isinstance(y, tuple | list):
            y = y[0]
        return torch.sin(y * self.after)


def squared(output: Any, batch: Any) -> Tensor:
    """The mean square of all floating-point tensors of an output."""
    if isinstance(output, Tensor):
        return (output.abs() ** 2).mean()
    parts = output.values() if isinstance(output, Mapping) else output
    return sum(
        squared(part, batch) for part in parts if not isinstance(part, Tensor) or part.dtype.is_floating_point
    )  # type: ignore[return-value]


def floats(*shape: int, samples: int = SAMPLES) -> Callable[[], Tensor]:
    """Draw normal numbers of a shape, samples first."""
    return lambda: torch.randn(samples, *shape)


def ids(*shape: int, high: int = 11) -> Callable[[], Tensor]:
    """Draw token numbers."""
    return lambda: torch.randint(0, high, (SAMPLES, *shape))


def layer(make: Callable[[], Any], *shape: int, **options: Any) -> Case:
    """A layer between two trained scales. ``shape``: that of one sample."""
    return Case(lambda: Ready(Between(make(), shape), floats(*shape), squared), **options)


def function(run: Callable[[Tensor], Any], *shape: int, **options: Any) -> Case:
    """A function of one tensor between two trained scales."""
    return Case(lambda: Ready(Between(Apply(run), shape), floats(*shape), squared), **options)


class Apply(nn.Module):
    """A module that calls a function."""

    def __init__(self, run: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.run = run

    def forward(self, x: Tensor) -> Any:
        return self.run(x)


def model(
    run: Callable[..., Any],
    batch: Callable[[], Any] | None = None,
    loss: Callable[[Any, Any], Any] | None = squared,
    parts: Callable[[], Mapping[str, Any]] = dict,
    **options: Any,
) -> Case:
    """A forward over named parts; beside them always the linear layers ``a``, ``b``, ``c``."""

    def make() -> Ready:
        built = {name: nn.Linear(WIDTH, WIDTH) for name in "abc"} | dict(parts())
        return Ready(odd(run, **built), batch or floats(WIDTH), loss)

    return Case(make, **options)


def whole(
    make: Callable[[], nn.Module], batch: Callable[[], Any], loss: Any = squared, **options: Any
) -> Case:
    """A module as it is."""
    return Case(lambda: Ready(make(), batch, loss), **options)


def loss(
    make: Callable[[], Callable[..., Tensor]],
    target: Callable[[], Any],
    width: int = WIDTH,
    before: Callable[[Tensor], Any] = lambda y: y,
    **options: Any,
) -> Case:
    """Three layers and a loss of their output and ``batch["y"]`` (a tuple: of all its tensors)."""

    def ready() -> Ready:
        measure = make()
        layers = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, width)
        )
        net = odd(lambda m, x: m.layers(x), layers=layers)

        def batch() -> dict[str, Any]:
            made = target()
            made = made if isinstance(made, tuple) else (made,)
            return {"x": torch.randn(SAMPLES, WIDTH)} | {f"y{i}": part for i, part in enumerate(made)}

        def measured(output: Tensor, batch: Mapping[str, Any]) -> Tensor:
            targets = [batch[name] for name in sorted(batch) if name != "x"]
            given = before(output)
            return measure(*given, *targets) if isinstance(given, tuple) else measure(given, *targets)

        return Ready(net, batch, measured)

    return Case(ready, **options)


__all__ = [
    "Apply",
    "Between",
    "Case",
    "F",
    "Ready",
    "floats",
    "function",
    "ids",
    "layer",
    "loss",
    "model",
    "odd",
    "squared",
    "whole",
]
