"""A small decoder with the module names of torchtitan's, any of which may be missing; plans of it with given degrees."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache

import torch
from torch import Tensor, nn

from cost_models.cluster import ClusterSpec
from partitioner import Plan, Workload, partition
from partitioner.formats.parallelism import Parallelism
from partitioner.models.as_graph import as_graph
from passes.graph.graph import OpGraph

LAYERS, WIDTH, WORDS, LENGTH = 8, 16, 32, 4
MODULES = ("tok_embeddings", *(f"layers.{index}" for index in range(LAYERS)), "norm", "lm_head")


class DecoderBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        added: Tensor = self.down(torch.tanh(self.up(self.norm(hidden))))
        return hidden + added


class Decoder(nn.Module):
    """Runs the modules that it has: all, or after ``keep`` those of a stage."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings: nn.Module | None = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleDict({str(index): DecoderBlock() for index in range(LAYERS)})
        self.norm: nn.Module | None = nn.LayerNorm(WIDTH)
        self.lm_head: nn.Module | None = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = tokens
        for module in (self.tok_embeddings, *self.layers.values(), self.norm, self.lm_head):
            hidden = hidden if module is None else module(hidden)
        return hidden

    def keep(self, names: Collection[str]) -> Decoder:
        """Drop all other modules, as torchtitan makes a stage of a whole model."""
        for name in ("tok_embeddings", "norm", "lm_head"):
            if name not in names:
                setattr(self, name, None)
        for index in [key for key in self.layers if f"layers.{key}" not in names]:
            del self.layers[index]
        return self


def token_loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def decoder_batch(samples: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, WORDS, (2, samples, LENGTH), generator=draw)
    return {"tokens": tokens[0], "targets": tokens[1]}


def decoder_model() -> Decoder:
    """The same weights at every call, in float64."""
    torch.manual_seed(0)
    return Decoder().double()


def decoder_workload() -> Workload:
    return Workload(decoder_model(), decoder_batch(2), token_loss, "decoder")


@cache
def decoder_graph() -> OpGraph:
    return as_graph(decoder_workload())


def decoder_plan(p: Parallelism, cluster: ClusterSpec | None = None) -> Plan:
    """Plan the decoder with the degrees of ``p``."""
    return partition(
        decoder_graph(),
        cluster or ClusterSpec.local(p.world_size),
        batch_size=p.batch_size,
        microbatches=p.microbatches,
        strategy="hybrid",
        schedule=p.schedule if p.pipeline > 1 else "auto",
        fix={name: value for name, value in vars(p.fix(MODULES)).items() if value is not None},
    )
