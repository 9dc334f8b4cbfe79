"""A language model whose base is frozen: low-rank adapters beside its linear layers are all that trains (Hu et al. 2021).

    partitioner fit examples/lora.py:lora --cluster RTX4090:1,2 --precision compute=bf16

A frozen parameter has no gradient and no optimizer state, and backward computes no gradient of it, for which the layer's
input would be kept: of a full fine-tuning's memory the parameters stay, and a part of the activations.

Shapes: token ids and labels (batch, seq), as the bundled model reads them.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from partitioner.models.bundled import bundled
from partitioner.models.workload import Workload

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of a Llama's block."""


class Adapted(nn.Module):
    """``base(x) + scale * up(down(x))``: ``down`` narrows to ``rank`` numbers per token, ``up`` begins as zero."""

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        like = {"bias": False, "dtype": base.weight.dtype, "device": base.weight.device}
        self.base, self.scale = base, scale
        self.down = nn.Linear(base.in_features, rank, **like)
        self.up = nn.Linear(rank, base.out_features, **like)
        nn.init.kaiming_uniform_(self.down.weight, a=math.sqrt(5))
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * self.up(self.down(x))  # type: ignore[no-any-return]


def adapted(model: nn.Module, rank: int, scale: float, layers: tuple[str, ...] = LINEARS) -> nn.Module:
    """Freeze all parameters of ``model``, and put an adapter beside each linear layer whose name is in ``layers``."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in layers and isinstance(child, nn.Linear):
                setattr(module, name, Adapted(child, rank, scale))
    return model


def lora(
    model: str = "llama-8b",
    rank: int = 16,
    scale: float = 2.0,
    size: Literal["full", "tiny"] = "full",
    seq: int = 0,
    dtype: str = "",
    layers: int = 0,
    batch: int = 2,
    seed: int = 0,
) -> Workload:
    """Adapt a bundled Llama; ``layers``, ``seq`` and ``dtype`` as the bundled model takes them. 0, "": its own."""
    base = bundled(model, size=size, seq=seq, dtype=dtype, layers=layers, batch=batch, seed=seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Workload(adapted(base.model, rank, scale), base.example_inputs, name=f"{base.name}-lora")
