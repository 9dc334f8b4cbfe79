"""Small plans on two workers that together reach the rules, the programs, and everything that ranks do of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cost_models.cluster import ClusterSpec
from cost_models.errors import UsageError
from cost_models.precision import Precision
from partitioner import Plan, partition
from tests.distributed.sharded_models import Conv, Gpt, Mlp, conv_batch, gpt_batch, mlp_batch

RANKS = 2


class Columns(nn.Module):
    """x, y [b, 2, 12, 4]: convolutions in blocks of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = ((self.second(torch.tanh(self.first(x))) - y) ** 2).mean()
        return loss


class Pair(nn.Module):
    """x, y [b, 8]: two layers whose neurons are split."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.down(torch.tanh(self.up(x))), y)


class Dropping(nn.Module):
    """x, y [b, 8]: a layer, some of whose neurons are dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.down(F.dropout(self.up(x), 0.5, self.training)), y)


class Averaging(nn.Module):
    """x, y [b, 8]: two layers, between them a running mean that each micro-batch reads and writes."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.register_buffer("mean", torch.zeros(12))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        self.mean.mul_(0.9).add_(0.1 * h.detach().mean(0))
        return F.mse_loss(self.down(h - self.mean), y)


class Weighed(nn.Module):
    """x [b, 8], target [b]: samples weigh as their classes do."""

    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 5)
        self.register_buffer("weight", torch.linspace(0.5, 1.5, 5))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x), target, weight=self.weight)


def _classes_batch(samples: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(samples, 8, generator=draw, dtype=torch.float64)
    return {"x": x, "target": torch.randint(5, (samples,), generator=draw)}


def _columns_batch(samples: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(7)
    return {name: torch.randn(samples, 2, 12, 4, generator=draw, dtype=torch.float64) for name in ("x", "y")}


Made = tuple[Callable[[], nn.Module], Callable[[int], dict[str, Tensor]], Mapping[str, Any]]
"""The model, its batch, and the options of its plan."""


def _mesh(pins: Mapping[str, str]) -> dict[str, Any]:
    return {"strategy": "feature", "mesh": (RANKS,), "pins": pins}


_MIXED = Precision(compute=torch.bfloat16)
_HALVES = {"wte": 0, "h.0*": 0, "h.1*": 1, "head": 1}

PLANS: Mapping[str, Made] = {
    "stages": (Gpt, gpt_batch, {"pins": _HALVES, "schedule": "1f1b", "microbatches": 3}),
    "halves": (Gpt, gpt_batch, {"pins": _HALVES, "schedule": "zb-h1", "microbatches": 3}),
    "recompute": (Gpt, gpt_batch, {"pins": _HALVES, "schedule": "1f1b", "recompute": "full"}),
    "uneven": (Conv, conv_batch, {"pins": {"first": 0, "second": 1}, "schedule": "gpipe", "microbatches": 3}),
    "uneven_mean": (Pair, mlp_batch, {"pins": {"up": 0, "down": 1}, "schedule": "gpipe", "microbatches": 3}),
    "running": (Averaging, mlp_batch, {"pins": {"up": 0, "down": 1}, "schedule": "gpipe", "microbatches": 3}),
    "weighed_mean": (Weighed, _classes_batch, {**_mesh({"*": "data"}), "loss_reduction": "mean"}),
    "column_row": (Gpt, gpt_batch, _mesh({"*": "column_row"})),
    "vocabulary": (Gpt, gpt_batch, _mesh({"*": "vocabulary"})),
    "sequence": (Gpt, gpt_batch, _mesh({"*": "sequence"})),
    "positions": (Gpt, gpt_batch, _mesh({"scaled_dot_product_attention*": "S2"})),
    "width": (Gpt, gpt_batch, _mesh({"layer_norm*": "S2"})),
    "samples": (Conv, conv_batch, _mesh({"*": "data"})),
    "channels": (Conv, conv_batch, _mesh({"group_norm": "S1"})),
    "mean": (Pair, mlp_batch, _mesh({"*": "data"})),
    "hand_mean": (Mlp, mlp_batch, _mesh({"*": "data"})),
    "dropout": (Dropping, mlp_batch, _mesh({"*": "column_row"})),
    "zero1": (Gpt, gpt_batch, _mesh({"*": "zero1"})),
    "mixed": (Gpt, gpt_batch, {"pins": _HALVES, "microbatches": 3, "dtype": torch.float32, "precision": _MIXED}),
    "zero3": (Gpt, gpt_batch, _mesh({"*": "zero3"})),
    "neurons": (Pair, mlp_batch, {"strategy": "free", "splits": {"linear": (5, 7)}, "pins": {"*_b0": 0, "*_b1": 1}}),
    "halo": (Columns, _columns_batch, {"strategy": "free", "splits": {"conv2d:2": (6, 6)}, "pins": {"*_b0": 0, "*_b1": 1}}),
}  # fmt: skip
"""Plans by name. Pins that no rule allows are left out: a fault in a rule may allow them."""


def planned(name: str) -> tuple[Plan, nn.Module, dict[str, Tensor]]:
    """Plan as ``PLANS`` says: (plan, model with weights, batch)."""
    make, batch_of, options = PLANS[name]
    torch.manual_seed(0)
    model, batch = make().to(options.get("dtype", torch.float64)), batch_of(4)
    usual = {"batch_size": 8, "microbatches": 2, "optimizer_memory": "momentum", "time_limit_seconds": 3.0}
    settings = {"example_inputs": batch, **usual, **{n: o for n, o in options.items() if n != "dtype"}}
    try:
        plan = partition(model, ClusterSpec.local(RANKS), **{"strategy": "layer", **settings})
    except UsageError:
        if settings.get("strategy") != "feature":
            raise
        plan = partition(
            model, ClusterSpec.local(RANKS), **{"strategy": "layer", **settings, "pins": {"*": "data"}}
        )
    return plan, model, batch
