"""What each of the four workers of the hybrid benchmark does: hold both sides and compare them; turns are `sharded_rank`'s.

Ours is the executor on the plan's programs. Theirs is ``PipelineStage`` under ``Schedule1F1B`` on stage modules that went
through ``parallelize_module``, at its best: q, k and v are made at once, outputs are not collected, and the loss is divided
by the number of micro-batches where it is computed instead of all gradients at the end (``scale_grads=False``).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from benchmarks.hybrid_executor_models import SHARDS, STAGES, HybridSpec
from benchmarks.sharded_models import COLUMNS, ROWS
from benchmarks.sharded_rank import hold
from partitioner.verify.rank import VerificationTask, build_rank


class Ours:
    """The executor of the hybrid plan."""

    def __init__(self, task: VerificationTask) -> None:
        self._executor, self._state, _ = build_rank(task)
        self._batch, self._microbatches = task.batch, task.microbatches

    def step(self) -> Tensor:
        loss = self._executor.train_step(self._batch, self._microbatches)
        return torch.zeros(()) if loss is None else loss

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self._state.parameters.items() if p.grad is not None}

    def loss(self, own: Tensor) -> Tensor:
        total = (
            own.double()
        )  # as the executor sums it; ranks of the last stage have parts of a sum, others nothing
        dist.all_reduce(total)
        return total

    def close(self) -> None:
        self._executor.close()


class Theirs:
    """``torch.distributed.pipelining`` over ``parallelize_module``, on a mesh of stages x shards."""

    def __init__(self, spec: HybridSpec) -> None:
        mesh = init_device_mesh("cpu", (STAGES, SHARDS), mesh_dim_names=("stages", "shards"))
        stage = mesh["stages"].get_local_rank()
        own, model = spec.stage_layers(stage), spec.build()
        styles: dict[str, Any] = {f"*.{name}": ColwiseParallel() for name in COLUMNS}
        styles |= {f"*.{name}": RowwiseParallel() for name in ROWS}
        self._module = parallelize_module(
            nn.Sequential(*(model.layers[i] for i in own)), mesh["shards"], styles
        )
        self._first = own[0]
        share = 1.0 / spec.microbatches

        def loss_fn(output: Tensor, target: Tensor) -> Tensor:
            return F.mse_loss(output, target) * share

        made = PipelineStage(
            self._module, stage, STAGES, torch.device("cpu"), group=mesh["stages"].get_group()
        )
        self._schedule: Any = Schedule1F1B(made, spec.microbatches, loss_fn, scale_grads=False)
        x, target = spec.batch()
        self._arguments = (x,) if stage == 0 else ()
        self._keywords = {"target": target} if stage == STAGES - 1 else {}

    def step(self) -> Tensor:
        self._module.zero_grad(set_to_none=True)
        if not self._keywords:
            self._schedule.step(*self._arguments, return_outputs=False)
            return torch.zeros(())
        losses: list[Tensor] = []
        self._schedule.step(*self._arguments, losses=losses, return_outputs=False, **self._keywords)
        return torch.stack([loss.detach() for loss in losses]).sum()

    def gradients(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, parameter in self._module.named_parameters():
            if parameter.grad is not None:
                layer, rest = name.split(".", 1)
                grad = parameter.grad
                local = grad.to_local() if isinstance(grad, DTensor) else grad
                found[f"layers.{int(layer) + self._first}.{rest}"] = local
        return found

    def loss(self, own: Tensor) -> Tensor:
        total = own / SHARDS  # every rank of the last stage has all of it
        dist.all_reduce(total)
        return total

    def close(self) -> None:
        """Nothing to stop."""


def prepare(name: str, spec: HybridSpec, task: VerificationTask) -> dict[str, float]:
    """Build both sides, and compare them."""
    return hold(name, Ours(task), Theirs(spec))
