"""The other side of the executor benchmark: ``torch.distributed.pipelining`` on the same stages.

It is run at its best: the loss is divided by the number of micro-batches in the loss function, where that costs nothing,
instead of by ``scale_grads``, which would go over all gradients once more at the end of the step.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.nn import functional as F

from benchmarks.executor_models import ModelSpec

SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MULTI = {"interleaved": ScheduleInterleaved1F1B, "zb-v": ScheduleZBVZeroBubble}


class Theirs:
    """One rank's stages and schedule with its batch; ``step`` does the same work as ``Ours.step``."""

    def __init__(self, spec: ModelSpec, schedule: str, stage_ranks: tuple[int, ...]) -> None:
        rank = dist.get_rank()
        stages = len(stage_ranks)
        model = spec.build()
        self._x, self._target = spec.batch()
        self._stages: dict[int, nn.Module] = {}
        self._names: dict[int, list[str]] = {}
        for stage in (s for s in range(stages) if stage_ranks[s] == rank):
            layers = spec.stage_layers(stage, stages)
            self._stages[stage] = nn.Sequential(*(model.layers[layer] for layer in layers))
            self._names[stage] = [
                f"layers.{layer}.{name}"
                for layer in layers
                for name, _ in model.layers[layer].named_parameters()
            ]
        made: list[Any] = [
            PipelineStage(module, stage, stages, torch.device("cpu"))
            for stage, module in self._stages.items()
        ]
        share = 1.0 / spec.microbatches

        def loss_fn(output: Tensor, target: Tensor) -> Tensor:
            return F.mse_loss(output, target) * share

        self._schedule: Any = (
            SINGLE[schedule](made[0], spec.microbatches, loss_fn, scale_grads=False)
            if schedule in SINGLE
            else MULTI[schedule](made, spec.microbatches, loss_fn, scale_grads=False)
        )
        self._arguments = (self._x,) if 0 in self._stages else ()
        self._keywords = {"target": self._target} if stages - 1 in self._stages else {}

    def step(self) -> Tensor | None:
        """One step; the loss where this rank computes it."""
        for module in self._stages.values():
            module.zero_grad(set_to_none=True)
        if not self._keywords:
            self._schedule.step(*self._arguments, return_outputs=False)
            return None
        losses: list[Tensor] = []
        self._schedule.step(*self._arguments, losses=losses, return_outputs=False, **self._keywords)
        return torch.stack([loss.detach() for loss in losses]).sum()

    def gradients(self) -> dict[str, Tensor]:
        """By the model's parameter names."""
        return {
            name: parameter.grad
            for stage, module in self._stages.items()
            for name, parameter in zip(self._names[stage], module.parameters(), strict=True)
            if parameter.grad is not None
        }

    def close(self) -> None:
        """Nothing to stop."""
