"""The models that the executor benchmark cuts: a stack of transformer blocks, and one whose compute is nothing.

Shapes: transformer x, y: [batch, 128 positions, 512]; trivial x, y: [batch, width]. The loss is the mean square
difference of y and the target; ``layers`` are what stages are made of, ``layers.3`` is the fourth block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from partitioner.models.workload import Workload

POSITIONS, WIDTH, HEADS, BLOCKS = 128, 512, 8, 8
FLOAT_BYTES = 4


class Block(nn.Module):
    """A transformer block with its norms first, without dropout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        result: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return result


class Scale(nn.Module):
    """y = w · x: as little compute as a layer with a parameter can have."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), 1.01))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Stack(nn.Module):
    """Layers one after another; called with the whole batch (x, target)."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def loss_of_pair(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss in the form that ``partition`` asks for: (output, whole batch)."""
    return F.mse_loss(output, batch[1])


@dataclass(frozen=True)
class ModelSpec:
    """Which model, how it is cut into ``stages`` equal parts, and its batch.

    ``message_bytes``: of one micro-batch's activation in the trivial model; 0 means the transformer.
    """

    microbatches: int
    batch_size: int
    message_bytes: int = 0

    @property
    def layers(self) -> int:
        """Number of layers; a trivial stage is one layer, so that four stages need four."""
        return 4 if self.message_bytes else BLOCKS

    def build(self) -> Stack:
        """The model, with the same weights in every process."""
        torch.manual_seed(0)
        if not self.message_bytes:
            return Stack([Block(WIDTH, HEADS) for _ in range(BLOCKS)])
        return Stack([Scale(self._row) for _ in range(self.layers)])

    def batch(self) -> tuple[Tensor, Tensor]:
        """(x, target), the same in every process."""
        generator = torch.Generator().manual_seed(1)
        shape = (self.batch_size, self._row) if self.message_bytes else (self.batch_size, POSITIONS, WIDTH)
        return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)

    def workload(self) -> Workload:
        """The model as ``partition`` and the workers' executor take it."""
        return Workload(self.build(), self.batch(), loss_of_pair, name="stack")

    def stage_layers(self, stage: int, stages: int) -> range:
        """The layers of one of ``stages`` equal stages."""
        each = self.layers // stages
        return range(stage * each, (stage + 1) * each)

    @property
    def _row(self) -> int:
        return self.message_bytes * self.microbatches // (self.batch_size * FLOAT_BYTES)
