"""The precision of a training step: scale, collect and check gradients, and keep leaves and owners together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cost_models.precision import Precision
from runtime.ranks.collective import Collectives
from runtime.state.loss_scale import LossScale
from runtime.state.precision import LeavesAndOwners
from runtime.state.rank_state import RankState
from runtime.state.sharded_owners import ShardedOwners


class StepPrecision:
    """The work on gradients and parameters between backward and the next forward. Collective where it scales."""

    def __init__(
        self,
        state: RankState,
        precision: Precision,
        collectives: Collectives,
        sharded: ShardedOwners | None = None,
    ) -> None:
        self._state, self._collectives = state, collectives
        self._pairs, self._sharded = LeavesAndOwners(state), sharded
        self.loss_scale = LossScale() if precision.loss_scale == "dynamic" else None

    @property
    def gradient_scale(self) -> float:
        """Factor that the next backward multiplies its gradients by."""
        return 1.0 if self.loss_scale is None else self.loss_scale.scale

    def after_backward(self, scale: float = 1.0) -> bool:
        """Hand owners their gradients, unscaled. Returns True if some overflowed and all ranks dropped theirs.

        ``scale``: a factor that backward multiplied gradients by beside ``gradient_scale``.
        """
        self._pairs.collect()
        if self._sharded is not None:
            self._sharded.collect()
        if scale != 1.0:
            for parameter in self._state.parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(1.0 / scale)
        if self.loss_scale is None:
            return False
        return self.loss_scale.unscale_or_drop(
            self._state.parameters.values(), self._collectives.device, self._maximum
        )

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep leaves up to date with every ``optimizer.step()``, whoever calls it."""
        self._pairs.attach(optimizer)
        if self._sharded is not None:
            self._sharded.attach(optimizer)

    def publish(self) -> None:
        """Copy owners' values to their leaves, after something else than the optimizer wrote them."""
        self._pairs.publish()
        if self._sharded is not None:
            self._sharded.publish()

    def state_dict(self) -> dict[str, float]:
        """Return what a checkpoint keeps, the same on every rank; empty without a loss scale."""
        return {} if self.loss_scale is None else self.loss_scale.state_dict()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned. A run without a loss scale saved nothing: this one's stays at its start."""
        if self.loss_scale is not None and saved:
            self.loss_scale.load_state_dict(saved)

    def _maximum(self, value: Tensor) -> Tensor:
        """Return the maximum over all ranks."""
        return self._collectives.all_reduce(value, "the check for overflow", dist.ReduceOp.MAX).wait()
