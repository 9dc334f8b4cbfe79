"""``Engine``: one rank of a running plan, as people train with it. Made by ``plan.deploy(model)``.

    loss = engine.train_step(batch, max_grad_norm=1.0)

is, in parts,

    engine.zero_grad()
    loss = engine.forward_backward(batch)
    engine.clip_grad_norm_(1.0)
    engine.optimizer.step()
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cost_models.errors import PlanError, RankFailureError
from partitioner.engine_batch import BatchReader
from partitioner.plan import Plan
from runtime.execute import Executor
from runtime.microbatch import batch_size_of
from runtime.rank_state import RankState


class Engine:
    """One rank of a running plan. ``parameters`` holds only what this rank owns, by the model's own names."""

    def __init__(
        self,
        plan: Plan,
        executor: Executor,
        state: RankState,
        reader: BatchReader,
        optimizer: torch.optim.Optimizer | None,
        loss_rank: int,
    ) -> None:
        self.plan = plan
        self.executor = executor
        self.state = state
        self.optimizer = optimizer
        self._reader = reader
        self._loss_rank = loss_rank

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """What the optimizer updates on this rank, by the model's own names."""
        return self.state.parameters

    @property
    def buffers(self) -> Mapping[str, Tensor]:
        """The buffers that this rank owns, by the model's own names."""
        return self.state.buffers

    def train_step(self, batch: Any) -> Tensor:
        """One optimizer step on ``batch`` (the whole batch, on every rank). Returns the loss, on every rank."""
        leaves = self._reader.leaves(batch)
        samples = batch_size_of(leaves, self.executor.batch_spec)
        if samples != self.plan.batch_size:
            raise PlanError(
                f"this batch does not fit the plan for {self.plan.model.name}",
                because=[f"it has {samples} samples, the plan is made for {self.plan.batch_size} a step"],
                suggestions=[
                    f"give batches of {self.plan.batch_size}",
                    f"plan again with batch_size={samples}",
                ],
            )
        loss = self.executor.train_step(leaves, self.plan.microbatches, self.optimizer)
        shared = torch.zeros((), dtype=torch.float64, device=self.executor.device)
        if loss is not None:
            shared.copy_(loss)
        if dist.get_world_size() > 1:
            try:
                dist.broadcast(shared, self._loss_rank)
            except RuntimeError as error:
                raise RankFailureError(
                    f"rank {self._loss_rank} failed or hangs: rank {dist.get_rank()} waited on it for the loss",
                    because=[str(error)],
                    suggestions=[f"read the log of rank {self._loss_rank}"],
                ) from error
        return shared

    def close(self) -> None:
        """Stop this rank's watchers; the process group stays for its owner."""
        self.executor.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
